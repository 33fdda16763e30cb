"""What a turn costs beside the engine: many conversations at once, each of ten turns of 64 tokens.

Whole episodes run (session, agent, environment, verdict, record, samples), without a sandbox. The engine
answers at once: as a coroutine in the process, or over HTTP from a process of its own. Beside them, in the
same run: a bare aiohttp loop that posts and reads the same tokens at the same server, and verifiers 0.4.0,
whose conversations are messages without tokens. CPU is that of the measured process alone, not the server's.
At last the same with ten times as many at once, a few turns each: whether a turn costs more among so many.

Budgets: 2x the bare loop (engine in the process); 256 KiB per open session of 30 turns beyond its tokens;
0.1 MB per finished episode.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import measuring
import mock_engine
import orjson

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.component import Config
from rollhook.engine.base import Generation, GenerationRequest, SamplingParams
from rollhook.engine.client import EngineClient
from rollhook.engine.server_info import RankLoad
from rollhook.engine.streaming import TokenSink
from rollhook.environment import (
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.router import RouterPolicy, Worker
from rollhook.routing import Chain
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, EpisodeRunner
from rollhook.session import PolicyClient, Renderer
from rollhook.testing.environment import build_context
from rollhook.testing.tokenizer import write_tokenizer

ASK = "What comes next? Think about it and answer in one line."
VERIFIERS = "verifiers==0.4.0"
#: a thousand would take minutes
PEER_CONVERSATIONS = 200
#: the second table: so many times the conversations, so many turns of each
MANY, FEW_TURNS = 10, 2
KIB = 1024


class Coroutine:
    """An engine that is a coroutine."""

    async def generate(
        self, worker: Worker, request: GenerationRequest, on_tokens: TokenSink | None = None
    ) -> Generation:
        await asyncio.sleep(0)
        return Generation(mock_engine.IDS, mock_engine.LOGPROBS, "stop", weight_version=1)

    async def health(self, worker: Worker) -> bool:
        return True

    async def load(self, worker: Worker) -> list[RankLoad]:
        return []

    async def aclose(self) -> None:
        pass


class Talk(Agent):
    """Talks until its turns are used up."""

    async def run(self, context: AgentContext) -> StopReason:
        messages = list(context.observation.messages)
        while context.budget.turns_left:
            reply = await context.session.chat(messages)
            messages += [reply.message, message("user", ASK)]
        return StopReason.MAX_TURNS


class Talks(Environment):
    """Nothing to do but talk."""

    verifies_apart = False

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return [Task("talk", hashlib.sha256(b"talk").hexdigest(), "train")]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        return TalkEpisode()


class TalkEpisode(Episode):
    async def phases(self) -> AsyncIterator[Phase]:
        yield TalkPhase()


class TalkPhase(Phase):
    observation = Observation([message("user", ASK)])

    async def verify(self, transcript: Transcript) -> Verdict:
        return Verdict(1.0)


def policy_of(directory: Path, client: Any, url: str) -> PolicyClient:
    write_tokenizer(directory)
    chain = Chain([RouterPolicy(Config(), build_context(directory))])
    policy = PolicyClient(Renderer(directory), chain, client, context_length=1 << 20)
    policy.set_workers([Worker(url)], 1)
    return policy


async def episodes(count: int, turns: int, url: str, *, http: bool) -> list[EpisodeResult]:
    """Run whole episodes at once."""
    client: Any = EngineClient(connect_timeout=600.0) if http else Coroutine()
    with tempfile.TemporaryDirectory() as directory:
        policy = policy_of(Path(directory), client, url)
        runner = EpisodeRunner(
            name="talks",
            environment=Talks(Config(), build_context()),
            agent=Talk(Config(), build_context()),
            pool=None,
            policy=policy,
            limits=Budgets(turns=turns, max_seq_len=1 << 20, reply_tokens=mock_engine.TOKENS),
            outcome_policy=Outcomes(),
            context=build_context(),
        )
        (task,) = runner.environment.tasks()
        requests = [EpisodeRequest(f"e{n}", "g", task, n, SamplingParams()) for n in range(count)]
        try:
            return await asyncio.gather(*(runner.run(request) for request in requests))
        finally:
            await policy.close()
            await client.aclose()


async def bare(count: int, turns: int, url: str) -> None:
    """Post the tokens so far, read the new ones, append: what nobody can do without."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def conversation() -> None:
            ids: list[int] = list(range(40))
            for _ in range(turns):
                body = orjson.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 64}})
                async with session.post(f"{url}/generate", data=body) as response:
                    answer = orjson.loads(await response.read())
                ids += [row[1] for row in answer["meta_info"]["output_token_logprobs"]]

        await asyncio.gather(*(conversation() for _ in range(count)))


def run_turns(part: str, count: int, turns: int, url: str) -> dict[str, float]:
    """Return milliseconds of wall and of CPU per turn."""
    work = {
        "bare": lambda n: bare(n, turns, url),
        "in-process": lambda n: episodes(n, turns, url, http=False),
        "http": lambda n: episodes(n, turns, url, http=True),
    }[part]
    asyncio.run(work(min(8, count)))
    wall, cpu = time.perf_counter(), time.process_time()
    results = asyncio.run(work(count))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    for result in results or ():
        assert result.record.outcome.kind == "scored", result.record.outcome
        assert result.record.completion_tokens == turns * mock_engine.TOKENS
    return {"wall": wall / count / turns * 1e3, "cpu": cpu / count / turns * 1e3}


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def open_sessions(count: int, turns: int) -> dict[str, float]:
    """Return what open sessions hold, in bytes each, and how much of that is their tokens."""
    with tempfile.TemporaryDirectory() as directory:
        policy = policy_of(Path(directory), Coroutine(), "http://none")

        async def talk(name: str) -> list[Any]:
            session = policy.open(name, max_seq_len=1 << 20, reply_tokens=64, turns=turns)
            messages = [message("user", ASK)]
            for _ in range(turns):
                reply = await session.chat(messages)
                messages += [reply.message, message("user", ASK)]
            return messages

        await talk("warm")
        before = resident()
        kept = await asyncio.gather(*(talk(f"s{n}") for n in range(count)))
        grown = resident() - before
        tokens = sum(
            leaf.token_ids.nbytes + leaf.logprobs.nbytes + leaf.mask.nbytes
            for session in list(policy.sessions.values())[1:]
            for leaf in session.leaves()
        )
        assert len(kept) == count
        await policy.close()
    return {"bytes": grown / count, "tokens": tokens / count}


def run_memory(part: str, count: int) -> dict[str, float]:
    if part == "open":
        return asyncio.run(open_sessions(count, 30))
    asyncio.run(episodes(8, 10, "http://none", http=False))
    before = resident()
    results = asyncio.run(episodes(count, 10, "http://none", http=False))
    grown = resident() - before
    tokens = sum(s.token_ids.nbytes + s.logprobs.nbytes + s.mask.nbytes for r in results for s in r.samples)
    return {"bytes": grown / count, "tokens": tokens / count}


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--conversations", type=int, default=1000, help="at once (default: 1000)")
    parser.add_argument("--turns", type=int, default=10, help="of each (default: 10)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    count = 20 if options.quick else options.conversations
    if options.part in ("open", "finished"):
        print(json.dumps(run_memory(options.part, count)))
    elif options.part:
        print(json.dumps(run_turns(options.part, count, options.turns, options.url)))
    else:
        report(count, options.turns, quick=options.quick)


def cost(part: str, conversations: int, turns: int, url: str) -> dict[str, float]:
    """Return milliseconds of wall and of CPU per turn of a part, measured in a process of its own."""
    size = ["--conversations", str(conversations), "--turns", str(turns)]
    return measuring.measured([sys.executable, Path(__file__), *size, "--part", part, "--url", url])


def report(count: int, turns: int, *, quick: bool) -> None:
    names = {
        "bare": "bare aiohttp loop",
        "in-process": "rollhook, engine in the process",
        "http": "rollhook, engine over HTTP",
    }
    with mock_engine.mock_engine() as url:
        found = {part: cost(part, count, turns, url) for part in names}
        many = {} if quick else {part: cost(part, MANY * count, FEW_TURNS, url) for part in names}
        if not quick and (python := measuring.peer(VERIFIERS)):
            program = Path(__file__).parent / "peers/turns_verifiers.py"
            fewer = min(count, PEER_CONVERSATIONS)
            names["verifiers"] = f"verifiers 0.4.0, over HTTP, {fewer} at once"
            found["verifiers"] = measuring.measured([python, program, str(fewer), str(turns), url])
    tables = [(count, turns, found)] + ([(MANY * count, FEW_TURNS, many)] if many else [])
    for conversations, each, figures in tables:
        bare_cpu = figures["bare"]["cpu"]
        rows = [
            [names[part], row["wall"], row["cpu"], row["cpu"] / bare_cpu] for part, row in figures.items()
        ]
        title = f"{conversations} conversations at once, {each} turns of {mock_engine.TOKENS} tokens"
        measuring.table(title, ["", "wall ms/turn", "CPU ms/turn", "x bare (CPU)"], rows)
    me = [sys.executable, Path(__file__)]
    memory = []
    labels = {"open": "open session of 30 turns", "finished": f"finished episode of {turns} turns"}
    for part, label in labels.items():
        row = measuring.measured([*me, "--conversations", str(min(count, 400)), "--part", part])
        beyond = (row["bytes"] - row["tokens"]) / KIB
        memory.append([label, row["bytes"] / KIB, row["tokens"] / KIB, beyond])
    measuring.table("memory of each, KiB", ["", "resident", "of it tokens", "beyond them"], memory)


if __name__ == "__main__":
    main()
