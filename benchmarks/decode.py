"""Tokens per second of the transformers engine beside transformers' own `generate`, with the same batch.

The same model, prompts, number of new tokens and threads; all replies of a turn start together. Weights are
random. Single-turn: one reply to each prompt. Multi-turn: a conversation of an agent, to which each of its
turns adds the reply and 20 to 80 tokens of a tool. `generate` gets all of it in every turn, as its users
do; beside it, `generate` with the cache of the turn before, kept by hand (possible only while the batch
stays the same). The engine also gives log-probabilities and versions, which `generate` is not asked for.

Ratios are medians over repetitions in which the contenders take turns. That of CPU time says more where
other work shares the machine; the server's is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import measuring
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollhook_torch import quiet
from rollhook_torch.decode import Decoder
from rollhook_torch.request import Request

#: hidden size, layers, heads, key-value heads, intermediate size, vocabulary
SIZES = {
    "quickstart": (96, 2, 2, 2, 256, 768),
    "larger": (256, 4, 4, 2, 704, 4096),
}
CONTEXT = 8192
#: an engine's reply to each of some prompts
Generate = Callable[[Sequence[list[int]]], Sequence[list[int]]]


def make_model(size: str) -> Any:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SIZES[size]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, intermediate_size=intermediate, vocab_size=vocabulary,
            max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.generation_config.pad_token_id = 0
    return model.eval()


class Own:
    """transformers' `generate`; with `keep`, the cache of the turn before goes into the next."""

    def __init__(self, model: Any, count: int, *, greedy: bool, keep: bool = False) -> None:
        self._model = model
        # renamed in transformers 5.2x
        names = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in names else "past_key_values"
        # without top_k, which is 50 by default, it samples what the engine samples
        self._keys = {"max_new_tokens": count, "do_sample": not greedy}
        self._keys |= {} if greedy else {"top_k": 0, "temperature": 1.0}
        self._keep = keep
        self._last: Any = None
        self._ids = self._mask = torch.zeros(0, 0, dtype=torch.long)

    def __call__(self, prompts: Sequence[list[int]]) -> Sequence[list[int]]:
        if self._last is None:
            self._ids = self._mask = torch.zeros(len(prompts), 0, dtype=torch.long)
        # what the cache lacks goes behind it, padded; the mask leaves holes, which positions do not count
        new = [prompt[int(have) :] for prompt, have in zip(prompts, self._mask.sum(1), strict=True)]
        width = max(map(len, new))
        padded = torch.tensor([[0] * (width - len(p)) + p for p in new])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in new])
        ids, mask = torch.cat([self._ids, padded], 1), torch.cat([self._mask, mask], 1)
        cache = {} if self._last is None else {self._cache: self._last}
        found = self._model.generate(
            ids, attention_mask=mask, return_dict_in_generate=True, use_cache=True, **self._keys, **cache
        )
        replies = found.sequences[:, ids.shape[1] :]
        if self._keep:
            self._last = getattr(found, self._cache)
            self._ids, self._mask = found.sequences, torch.cat([mask, torch.ones_like(replies)], 1)
        return replies.tolist()


class InProcess:
    """The engine's decode thread, which has forgotten all before."""

    def __init__(self, decoder: Decoder, count: int, *, greedy: bool) -> None:
        assert decoder.flush().result()
        self._decoder = decoder
        self._count = count
        self._temperature = 0.0 if greedy else 1.0

    def __call__(self, prompts: Sequence[list[int]]) -> Sequence[list[int]]:
        left = threading.Semaphore(0)
        requests = [
            Request(
                rid=str(n), prompt=prompt, temperature=self._temperature, top_p=1.0, top_k=-1,
                max_new_tokens=self._count, stops=frozenset(), random=random.Random(n),
                done=lambda _: left.release(),
            )
            for n, prompt in enumerate(prompts)
        ]  # fmt: skip
        for request in requests:
            self._decoder.submit(request)
        for _ in requests:
            left.acquire()
        return [request.ids for request in requests]


class OverHTTP:
    """The engine's server, asked as anybody asks it, which has forgotten all before."""

    def __init__(self, url: str, count: int, *, greedy: bool) -> None:
        self._url = url
        self._params = {"max_new_tokens": count, "temperature": 0.0 if greedy else 1.0, "ignore_eos": True}
        asyncio.run(_post(url + "/flush_cache", {}))

    def __call__(self, prompts: Sequence[list[int]]) -> Sequence[list[int]]:
        return asyncio.run(self._all(prompts))

    async def _all(self, prompts: Sequence[list[int]]) -> Sequence[list[int]]:
        params = {"sampling_params": self._params, "return_logprob": True}
        bodies = [{"input_ids": prompt, **params} for prompt in prompts]
        answers = await asyncio.gather(*(_post(self._url + "/generate", body) for body in bodies))
        return [answer["output_ids"] for answer in answers]


async def _post(url: str, body: dict[str, Any]) -> Any:
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(url, json=body) as response,
    ):
        return await response.json()


def seconds(
    generate: Generate, vocabulary: int, batch: int, turns: int, count: int, seed: int
) -> tuple[float, float]:
    """Return wall and CPU time of a batch of conversations; the same seed, the same prompts and tools."""
    draw = random.Random(seed)

    def text(shortest: int, longest: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(shortest, longest))]

    prompts = [text(60, 160) for _ in range(batch)]
    tools = [[text(20, 80) for _ in range(batch)] for _ in range(turns - 1)]
    wall, cpu = time.perf_counter(), time.process_time()
    for turn in range(turns):
        replies = generate(prompts)
        assert [len(reply) for reply in replies] == [count] * batch
        if turn < turns - 1:
            prompts = [p + r + t for p, r, t in zip(prompts, replies, tools[turn], strict=True)]
    return time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def server(model: Any, threads: int) -> Iterator[str]:
    """Serve a model from a process of its own; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        argv = [sys.executable, "-m", "rollhook_torch.server", "--model", directory, "--port", str(port)]
        process = subprocess.Popen([*argv, "--device", "cpu", "--threads", str(threads)])
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_healthy(url, process))
            yield url
        finally:
            process.terminate()
            process.wait()


async def _healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(url + "/health"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise SystemExit("the engine's server ended while starting")


def compare(size: str, options: argparse.Namespace) -> None:
    """Print the tables of one model: greedy and sampled, single-turn and multi-turn."""
    model = make_model(size)
    decoder = Decoder(
        model, "1", context_length=CONTEXT, max_batch=256, prefill_tokens=2048, prefix_cache_bytes=1 << 29
    )
    with server(model, options.threads) as url:
        for greedy in (True, False):
            for turns in (1, options.turns):
                own = functools.partial(Own, model, options.tokens, greedy=greedy)
                contenders: dict[str, Callable[[], Generate]] = {
                    "generate": own,
                    "engine, in the process": functools.partial(
                        InProcess, decoder, options.tokens, greedy=greedy
                    ),
                    "engine, over HTTP": functools.partial(OverHTTP, url, options.tokens, greedy=greedy),
                }
                if turns > 1:
                    contenders["generate, cache kept"] = functools.partial(own, keep=True)
                way = "greedy" if greedy else "sampled"
                title = f"{size} model, {way}, {turns} turns of {options.tokens} tokens"
                print_table(title, contenders, SIZES[size][-1], turns, options)
    decoder.stop()


def print_table(
    title: str,
    contenders: Mapping[str, Callable[[], Generate]],
    vocabulary: int,
    turns: int,
    options: argparse.Namespace,
) -> None:
    """Let the contenders take turns, and print their tokens per second and ratios."""
    batch, count = options.batch, options.tokens
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for round_ in range(options.rounds + 1):  # the first warms up
        for name, make in contenders.items():
            found[name].append(seconds(make(), vocabulary, batch, turns, count, round_))
    rows = []
    for name, taken in found.items():
        pairs = list(zip(found["generate"][1:], taken[1:], strict=True))
        rate = batch * turns * count / statistics.median(wall for wall, _ in taken[1:])
        walls, cpus = ([own[n] / it[n] for own, it in pairs] for n in (0, 1))
        cpu = "-" if "HTTP" in name else statistics.median(cpus)
        rows.append([name, round(rate), statistics.median(walls), min(walls), max(walls), cpu])
    heads = ["", "tokens/s", "x generate", "least", "most", "x generate (CPU)"]
    measuring.table(f"{title}; batch {batch}", heads, rows)


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--batch", type=int, default=16, help="conversations at once (default: 16)")
    parser.add_argument("--turns", type=int, default=8, help="of a conversation (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="new ones per turn (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for each")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES), help="models (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.turns, options.tokens, options.rounds = 3, 2, 4, 1
        options.size = ["quickstart"]
    torch.set_num_threads(options.threads)
    quiet.quiet_transformers()
    for size in options.size:
        compare(size, options)


if __name__ == "__main__":
    main()
