"""Prefixes are reused where that is exact, and only there."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollhook_torch import batch
from rollhook_torch.microbatch import TokenRow, score
from rollhook_torch.weights import load_model

WAIT = 60.0
#: by how much log-probabilities in float32 may differ with the order of summation
TOLERANCE = 2e-5
IDS = st.lists(st.integers(3, 250), min_size=1, max_size=40)
#: turns: which earlier one is continued (or none), what is appended, how long the reply is
TURNS = st.lists(st.tuples(st.integers(0, 5), IDS, st.integers(1, 12)), min_size=1, max_size=6)


def exactly_scored(model: Any, request: Any, temperature: float = 1.0) -> bool:
    """Return whether the log-probabilities are those of one pass over the whole sequence."""
    ids = [*request.prompt, *request.ids]
    mask = [0] * len(request.prompt) + [1] * len(request.ids)
    with torch.no_grad():
        scored = score(model, [TokenRow(np.array(ids, np.int32), np.array(mask, np.uint8))], temperature)
    return bool(np.allclose(request.logprobs, scored.logprobs, atol=TOLERANCE, rtol=0))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load_model(model_dir, "float32", torch.device("cpu"))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,  # a near tie of two logits may go either way
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(turns=TURNS, together=st.booleans())
def test_replies_are_the_same_with_and_without_reuse(
    turns: list[tuple[int, list[int], int]], together: bool, pair: list[Any], model: Any
) -> None:
    reusing, plain = pair
    assert reusing.decoder.flush().result(WAIT)
    histories: list[list[int]] = [[]]
    held: list[list[int]] = []
    for parent, ids, count in turns:
        prompt = histories[parent % len(histories)] + ids
        asked = [(temperature, seed) for temperature in (0.0, 1.0) for seed in range(1 + together)]
        pending = [reusing.submit(prompt, temperature=t, seed=s, count=count) for t, s in asked]
        assert all(done.wait(WAIT) for _, done in pending)
        for (temperature, seed), (request, _) in zip(asked, pending, strict=True):
            alone = plain.run(prompt, temperature=temperature, seed=seed, count=count)
            assert request.ids == alone.ids
            assert alone.cached_tokens == 0
            assert exactly_scored(model, request)
            held.append([*prompt, *request.ids][:-1])
        first = pending[0][0]
        assert first.cached_tokens >= min(len(prompt) - 1, len(histories[parent % len(histories)]) - 1)
        histories.append([*prompt, *first.ids])


@pytest.fixture
def pair(make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One that reuses, computes in small pieces and moves its rows often; one that does nothing of it."""
    monkeypatch.setattr(batch, "SPARE", 5)
    return [
        make_client(context_length=1024, prefill_tokens=24),
        make_client(context_length=1024, prefix_cache_bytes=0),
    ]


def test_a_turn_computes_its_new_tokens_only(client: Any) -> None:
    first = client.run([5] * 20, count=10)
    second = client.run([*first.prompt, *first.ids, 7, 8, 9])
    assert (first.cached_tokens, second.cached_tokens) == (0, 29)
    again = client.run(second.prompt)
    assert again.cached_tokens == 32  # the last is computed for its logits
    other = client.run([5] * 12 + [6] * 8)
    assert other.cached_tokens == 12
    assert client.decoder.counts.cached_tokens == 29 + 32 + 12


def test_namespaces_share_nothing(client: Any) -> None:
    prompt = [5] * 20
    keys = [None, "weight-version:1", "mine", "mine", "weight-version:2"]
    assert [client.run(prompt, extra_key=key).cached_tokens for key in keys] == [0, 19, 0, 19, 0]


def test_no_more_is_kept_than_allowed(make_client: Callable[..., Any]) -> None:
    per_token = 2 * 2 * 16 * 4  # two layers, keys and values, one head of 16 float32
    client = make_client(prefix_cache_bytes=40 * per_token)
    for start in range(3, 20):
        client.run([start] * 20, count=5)
        assert 0 < client.decoder.prefixes.size <= 40 * per_token
    assert client.run([19] * 20).cached_tokens == 19
    assert client.run([3] * 20).cached_tokens == 0
    assert client.decoder.flush().result(WAIT)
    assert client.decoder.prefixes.size == 0


def test_nothing_of_old_weights_is_reused(client: Any, make_model: Callable[..., Path]) -> None:
    other = make_model(seed=7)
    reached, go_on = threading.Event(), []

    def pause_at_five(request: Any) -> None:
        if len(request.ids) == 5 and not go_on:
            go_on.append(client.decoder.pause("in_place"))
            reached.set()

    before = client.run([9] * 30)
    frozen, done = client.submit([5] * 20, count=20, progress=pause_at_five)
    assert reached.wait(WAIT)
    go_on[0].result(WAIT)
    client.decoder.load(other, "2").result(WAIT)
    client.decoder.resume().result(WAIT)
    assert done.wait(WAIT)
    assert frozen.versions == ["1"] * 5 + ["2"] * 15
    fresh = load_model(other, "float32", torch.device("cpu"))
    for ids in ([*frozen.prompt, *frozen.ids], before.prompt):
        for key in (None, "weight-version:1"):
            request = client.run([*ids, 7], extra_key=key)
            assert request.cached_tokens == 0
            assert exactly_scored(fresh, request)


@pytest.mark.parametrize("interruption", ["none", "abort", "retract", "load"])
def test_a_long_prompt_stalls_nobody(
    interruption: str, make_client: Callable[..., Any], make_model: Callable[..., Path], model: Any
) -> None:
    other = make_model(seed=7)
    client = make_client(prefill_tokens=8)
    order: list[str] = []

    def progress(request: Any) -> None:
        order.append(request.rid)
        if request.rid == "short" and len(request.ids) == 10:  # while the prompt of the other is computed
            if interruption == "abort":
                client.decoder.abort(lambda other: other.rid == "long")
            elif interruption == "retract":
                client.decoder.pause("retract")
                client.decoder.resume()
            elif interruption == "load":
                client.decoder.load(other, "2")

    client.decoder.pause("in_place").result(WAIT)
    short, done_short = client.submit([5, 6, 7], count=60, rid="short", progress=progress)
    long, done_long = client.submit([8] * 200, count=5, rid="long", progress=progress)
    client.decoder.resume().result(WAIT)
    assert done_short.wait(WAIT)
    assert done_long.wait(WAIT)
    assert len(short.ids) == 60
    assert client.decoder.running == client.decoder.waiting == 0
    if interruption == "abort":
        assert (long.finish, long.ids) == ({"type": "abort", "message": "aborted"}, [])
    else:
        assert order.index("long") >= 200 // 8 - 1
    if interruption == "load":  # what was computed of the prompt is of no use with new weights
        assert exactly_scored(load_model(other, "float32", torch.device("cpu")), long)
    else:
        assert exactly_scored(model, long)
        assert exactly_scored(model, short)
