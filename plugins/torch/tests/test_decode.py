"""The decode loop: what a request gets does not depend on who else is in the batch, or on interruptions."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollhook_torch.microbatch import TokenRow, score
from rollhook_torch.weights import load_model

WAIT = 60.0
MakeModel = Callable[..., Path]


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 250, 3 + 5 * (i % 4)).tolist() for i in range(count)]


def test_greedy_tokens_are_those_of_transformers(client: Any, model_dir: Path) -> None:
    model = load_model(model_dir, "float32", torch.device("cpu"))
    for prompt in prompts(4):
        wanted = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert client.run(prompt, temperature=0.0).ids == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(client: Any, model_dir: Path, temperature: float) -> None:
    model = load_model(model_dir, "float32", torch.device("cpu"))
    pending = [
        client.submit(prompt, seed=i, temperature=temperature, count=3 + i)
        for i, prompt in enumerate(prompts(9))
    ]
    for request, done in pending:
        assert done.wait(WAIT)
        ids = [*request.prompt, *request.ids]
        mask = [0] * len(request.prompt) + [1] * len(request.ids)
        row = TokenRow(np.array(ids, np.int32), np.array(mask, np.uint8))
        with torch.no_grad():
            scored = score(model, [row], temperature)
        assert request.logprobs == pytest.approx(scored.logprobs.tolist(), abs=1e-5)


def test_a_row_gets_what_it_would_get_alone(client: Any, make_client: Callable[..., Any]) -> None:
    alone = [client.run(prompt, seed=i, count=4 + 3 * i).ids for i, prompt in enumerate(prompts(10))]
    crowd = make_client(max_batch=3, prefill_tokens=16)
    pending = [crowd.submit(prompt, seed=i, count=4 + 3 * i) for i, prompt in enumerate(prompts(10))]
    for (request, done), wanted in zip(pending, alone, strict=True):
        assert done.wait(WAIT)
        assert request.ids == wanted
        assert request.finish == {"type": "length", "length": len(wanted)}
        assert request.admitted is not None


def test_equal_prompts_are_prefilled_once_and_drawn_apart(client: Any) -> None:
    client.decoder.pause("in_place").result(WAIT)
    pending = [client.submit(prompts(1)[0], seed=seed) for seed in range(4)]
    client.decoder.resume().result(WAIT)
    assert all(done.wait(WAIT) for _, done in pending)
    assert [request.cached_tokens for request, _ in pending] == [0, 3, 3, 3]
    assert len({tuple(request.ids) for request, _ in pending}) > 1


def test_the_stop_token_is_part_of_the_reply(client: Any) -> None:
    free = client.run(prompts(1)[0], seed=5)
    stop = free.ids[4]
    stopped = client.run(prompts(1)[0], seed=5, stops=[stop])
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.finish == {"type": "stop", "matched": stop}


def test_a_reply_ends_at_the_context(make_client: Callable[..., Any]) -> None:
    request = make_client(context_length=20).run(prompts(2)[1], count=100)
    assert len(request.prompt) + len(request.ids) == 20
    assert request.finish == {"type": "length", "length": len(request.ids)}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_loses_no_token(client: Any, mode: Any) -> None:
    prompt = prompts(2)[1]
    wanted = client.run(prompt, seed=3, count=60)
    request, done = client.submit(prompt, seed=3, count=60)
    for _ in range(3):
        client.decoder.pause(mode).result(WAIT)
        assert client.decoder.running == 0 or mode == "in_place"
        client.decoder.resume().result(WAIT)
    assert done.wait(WAIT)
    assert request.ids == wanted.ids
    assert request.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_a_pause_by_abort_ends_what_runs_and_what_waits(make_client: Callable[..., Any]) -> None:
    client = make_client(max_batch=1)
    pending = [client.submit(prompts(1)[0], seed=seed, count=200) for seed in range(2)]
    client.decoder.pause("abort").result(WAIT)
    for request, done in pending:
        assert done.wait(WAIT)
        assert request.finish is not None
        assert request.finish["type"] == "abort"
        assert len(request.ids) < 200
        assert len(request.ids) == len(request.logprobs) == len(request.versions)


def test_versions_change_with_the_weights_and_with_nothing_else(client: Any, make_model: MakeModel) -> None:
    other = make_model(seed=7)
    prompt = prompts(1)[0]
    first, done_first = client.submit(prompt, seed=1, count=40, temperature=0.0)
    client.decoder.pause("in_place").result(WAIT)
    drawn = len(first.ids)
    client.decoder.load(other, "2").result(WAIT)
    client.decoder.resume().result(WAIT)
    assert done_first.wait(WAIT)
    assert first.versions == ["1"] * drawn + ["2"] * (40 - drawn)
    fresh = client.run(prompt, temperature=0.0)
    assert set(fresh.versions) == {"2"}
    model = load_model(other, "float32", torch.device("cpu"))
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert fresh.ids[0] == int(logits.argmax())


def test_weights_that_do_not_fit_change_nothing(client: Any, make_model: MakeModel, tmp_path: Path) -> None:
    before = client.run(prompts(1)[0], temperature=0.0)
    for directory in (make_model(hidden_size=16), tmp_path):
        with pytest.raises(ValueError, match=r"do not fit|cannot be read"):
            client.decoder.load(directory, "9").result(WAIT)
    after = client.run(prompts(1)[0], temperature=0.0)
    assert after.ids == before.ids
    assert client.decoder.version == "1"


def test_an_abort_ends_what_matches_only(client: Any) -> None:
    _, done_long = client.submit(prompts(1)[0], seed=1, count=200)
    other, done_other = client.submit(prompts(1)[0], seed=2, count=30)
    assert client.decoder.abort(lambda request: request.rid == "r1").result(WAIT) <= 1
    assert done_long.wait(WAIT)
    assert done_other.wait(WAIT)
    assert other.finish == {"type": "length", "length": 30}
    assert client.decoder.running == client.decoder.waiting == 0


def test_a_dead_decode_thread_answers_everyone(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(client.decoder.model, "forward", broken)
    for _ in range(2):
        request, done = client.submit(prompts(1)[0])
        assert done.wait(WAIT)
        assert request.finish == {"type": "abort", "message": "the decode thread died: no memory left"}
    assert isinstance(client.decoder.error, RuntimeError)
    with pytest.raises(RuntimeError, match="no memory left"):
        client.decoder.pause("in_place").result(WAIT)


def test_an_asker_that_is_gone_does_no_harm(client: Any) -> None:
    """Such as a client that waited no longer for an engine that stood still."""
    stands_still = threading.Event()
    client.decoder._act(stands_still.wait)
    assert client.decoder.pause("in_place").cancel()
    stands_still.set()
    reply = client.run(prompts(1)[0], seed=1, count=3)
    assert reply.finish == {"type": "length", "length": 3}


def test_other_architectures_decode_alike(make_model: MakeModel, make_client: Callable[..., Any]) -> None:
    sizes = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    client = make_client(make_model(architecture="gemma3_text", **sizes))
    alone = [client.run(prompt, temperature=0.0, count=20).ids for prompt in prompts(4)]
    pending = [client.submit(prompt, temperature=0.0, count=20) for prompt in prompts(4)]
    assert all(done.wait(WAIT) for _, done in pending)
    assert [request.ids for request, _ in pending] == alone
