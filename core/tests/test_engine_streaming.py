"""Streams of `/generate`: however the server cuts them, they are one answer."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.engine.base import GenerationRequest, SamplingParams
from rollhook.engine.client import EngineClient
from rollhook.engine.generation import parse_generation
from rollhook.engine.streaming import CutStreamError, read_events, read_generation
from rollhook.errors import EngineError
from rollhook.testing.fake_engine import FakeEngine, scripted


async def pieces(raw, size):
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def read(raw, size=1 << 16):
    """Return the generation of a stream that arrives in pieces, and the ids in the order they were given."""
    given_ids = []
    generation = asyncio.run(read_generation(pieces(raw, size), given_ids.extend))
    return generation, given_ids


def event(data):
    return b"data: " + orjson.dumps(data) + b"\n\n"


def chunk(rows, total, reason=None, **meta):
    return {
        "text": "",
        "meta_info": {
            "finish_reason": reason,
            "completion_tokens": total,
            "output_token_logprobs": rows,
            "weight_version": "3",
            **meta,
        },
    }


def stream(rows, cuts, *, incremental, done=True):
    """Return the events of a generation of `rows`, cut after the given numbers of tokens."""
    raw, seen = b"", 0
    for end in [*sorted(cuts), len(rows)]:
        last = end == len(rows)
        reason = {"type": "stop"} if last else None
        spans = [{"version": "3", "start": 0, "end": end}]
        raw += event(chunk(rows[seen if incremental else 0 : end], end, reason, weight_versions=spans))
        seen = end
        if last:
            break
    return raw + (b"data: [DONE]\n\n" if done else b"")


ROWS = [[-0.5, 7, None], [-0.25, 8, None], [-0.125, 9, None]]


@given(
    st.lists(st.integers(0, 1000), max_size=8),
    st.sets(st.integers(0, 8)),
    st.booleans(),
    st.integers(1, 200),
)
def test_a_stream_gives_what_one_answer_gives(ids, cuts, incremental, size):
    rows = [[-n / 8, index, None] for n, index in enumerate(ids)]
    raw = stream(rows, {c for c in cuts if c < len(ids)}, incremental=incremental)
    generation, given_ids = read(raw, size)
    assert given_ids == generation.token_ids == ids
    assert generation.logprobs == [row[0] for row in rows]
    assert generation.versions == [3] * len(ids)
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("end", ["cut", "error", "reset"])
def test_a_stream_that_is_cut_keeps_what_came(end):
    raw = event(chunk(ROWS[:2], 2))
    if end == "error":
        raw += event({"error": {"message": "out of memory"}})

    async def broken():
        yield raw
        if end == "reset":
            raise ConnectionResetError("reset by peer")

    given_ids = []
    with pytest.raises(CutStreamError) as caught:
        asyncio.run(read_generation(broken(), given_ids.extend))
    assert caught.value.kind == "retryable"
    partial = caught.value.partial
    assert (partial.token_ids, partial.logprobs, partial.finish_reason) == ([7, 8], [-0.5, -0.25], "abort")
    assert given_ids == [7, 8]


def test_a_stream_that_says_that_it_failed_before_its_first_token_is_an_engine_error():
    with pytest.raises(EngineError, match="out of memory") as caught:
        read(event({"error": {"message": "out of memory"}}))
    assert not isinstance(caught.value, CutStreamError)


@pytest.mark.parametrize(
    "raw",
    [
        event(chunk(ROWS, 2)),
        event(chunk(ROWS[:2], 2)) + event(chunk(ROWS[:1], 1)),
        event(chunk(ROWS[:2], 2)) + event(chunk([[-0.5, 7], [-0.5, 6], [-0.5, 5]], 3)),
        event(chunk([[None, 7]], 1, {"type": "stop"})),
        event(chunk([[-0.5]], 1)),
        event([]),
        event({"meta_info": None}),
        b"data: {\n\n",
    ],
    ids=["count", "shrinks", "changes", "no number", "no id", "list", "no meta", "no JSON"],
)
def test_what_breaks_the_protocol_is_told_apart(raw):
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        read(raw)


GOOD = event(chunk(ROWS[:2], 2))


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (GOOD + event(chunk(ROWS[:1], 9)), "1 log-probabilities after 2 of 9"),
        (GOOD + event(chunk([*ROWS[:2], ["nan", 9]], 3)), "not finite"),
        (GOOD + event(chunk([*ROWS[:2], [-0.5, -9]], 3)), "out of range"),
        (GOOD + event(chunk([*ROWS[:2], [-0.5]], 3)), "IndexError"),
        (GOOD + event([1]), "TypeError"),
        (GOOD + event({"meta_info": None}), "TypeError"),
        (GOOD + b"data: {\n\n", "JSONDecodeError"),
        (GOOD + event(chunk(ROWS[:2], 2, {"type": "unheard-of"})), "'unheard-of' is unknown"),
    ],
    ids=["count", "logprob", "id", "no id", "list", "no meta", "no JSON", "reason"],
)
def test_what_breaks_the_protocol_after_the_first_tokens_keeps_them(raw, told):
    given_ids = []
    with pytest.raises(CutStreamError, match=told) as caught:
        asyncio.run(read_generation(pieces(raw, 1 << 16), given_ids.extend))
    partial = caught.value.partial
    assert (partial.token_ids, partial.logprobs, partial.finish_reason) == ([7, 8], [-0.5, -0.25], "abort")
    assert given_ids == [7, 8]


async def test_only_data_up_to_done_is_read():
    raw = b": ping\r\nevent: x\r\ndata: 1\r\n\r\ndata: [DONE]\n\ndata: 2\n\n"
    assert [each async for each in read_events(pieces(raw, 3))] == [1]


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}], [3, 3, 4]),
        ([{"version": "4", "start": 0, "end": 99}], [4, 4, 4]),
        ([{"version": "default", "start": 0, "end": 3}], None),
        (["3", "3", "4"], [3, 3, 4]),
    ],
)
def test_versions_come_per_token_or_as_spans(spans, versions):
    answer = chunk(ROWS, 3, {"type": "stop"}, weight_versions=spans)
    assert parse_generation(answer).versions == versions


@pytest.mark.parametrize("spans", [[{"version": "3", "start": 0, "end": 2}], [{"start": 0}], ["3"], [{}]])
def test_versions_that_do_not_cover_the_tokens_break_the_protocol(spans):
    with pytest.raises((ValueError, KeyError)):
        parse_generation(chunk(ROWS, 3, {"type": "stop"}, weight_versions=spans))


# -- over HTTP

REQUEST = GenerationRequest("r", [1, 2, 3], SamplingParams(max_new_tokens=4, stop_token_ids=(9,)))


@pytest.fixture
async def client():
    client = EngineClient(generate_timeout=5, control_timeout=5, vocab_size=10)
    yield client
    await client.aclose()


@pytest.mark.parametrize("incremental", [False, True])
async def test_ids_come_one_by_one_and_the_generation_is_the_same(client, incremental):
    async with FakeEngine(scripted([5, 6, 9, 8])) as engine:
        engine.incremental = incremental
        whole = await client.generate(engine.worker, REQUEST)
        pieces = []
        streamed = await client.generate(engine.worker, REQUEST, lambda ids: pieces.append(list(ids)))
    assert [body["stream"] for body in engine.requests] == [False, True]
    assert pieces == [[5], [6], [9]]
    assert streamed == whole


async def test_the_first_ids_come_before_the_last_are_generated(client):
    async with FakeEngine(scripted([5, 6, 9])) as engine:
        engine.hold(after=2)
        came = asyncio.Event()
        pieces = []

        def sink(ids):
            pieces.extend(ids)
            if len(pieces) == 2:
                came.set()

        call = asyncio.ensure_future(client.generate(engine.worker, REQUEST, sink))
        await came.wait()
        assert engine.running == 1
        await engine.release()
        assert (await call).token_ids == [5, 6, 9]


@pytest.mark.parametrize("after", [1, 2])
async def test_a_dropped_connection_gives_what_came_before(client, after):
    async with FakeEngine(scripted([5, 6, 9])) as engine:
        engine.cut(after)
        with pytest.raises(CutStreamError) as caught:
            await client.generate(engine.worker, REQUEST, lambda ids: None)
    assert str(caught.value).startswith(f"{engine.url}/generate was cut: ")
    assert caught.value.partial.token_ids == [5, 6][:after]
    assert caught.value.partial.versions == [1, 1][:after]


async def test_a_connection_dropped_before_the_first_token_is_an_ordinary_failure(client):
    async with FakeEngine(scripted([5, 6, 9])) as engine:
        engine.cut(0)
        with pytest.raises(EngineError) as caught:
            await client.generate(engine.worker, REQUEST, lambda ids: None)
    assert caught.value.kind == "retryable"
    assert not isinstance(caught.value, CutStreamError)


async def test_a_server_that_cannot_stream_answers_at_once(client):
    async with FakeEngine(scripted([5, 6, 9])) as engine:
        engine.fail("/generate", 200, body=chunk([[-0.5, 9]], 1, {"type": "stop"}))
        pieces = []
        await client.generate(engine.worker, REQUEST, lambda ids: pieces.append(list(ids)))
    assert pieces == [[9]]


async def test_a_stream_outside_the_protocol_is_an_engine_error(client):
    async with FakeEngine(scripted([5, 6, 9])) as engine:
        engine.mangle = lambda answer: {"meta_info": {"completion_tokens": 7}}
        with pytest.raises(CutStreamError, match="broke the protocol after 3 tokens") as caught:
            await client.generate(engine.worker, REQUEST, lambda ids: None)
        assert caught.value.partial.token_ids == [5, 6, 9]
    async with FakeEngine(scripted([])) as engine:
        engine.mangle = lambda answer: {"meta_info": {"completion_tokens": 7}}
        with pytest.raises(EngineError, match="outside the protocol"):
            await client.generate(engine.worker, REQUEST, lambda ids: None)


@pytest.mark.parametrize(
    "reason", [None, {"type": "abort"}, {"type": "stop"}], ids=["cut", "aborted", "whole"]
)
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([["nan", 7]], "not finite"),
        ([["-inf", 7]], "not finite"),
        ([[-0.5, 7]] * 5, "at most 4"),
        ([[-0.5, 10]], "the model has 10"),
    ],
    ids=["nan", "inf", "too many", "no token"],
)
async def test_what_is_kept_of_a_stream_is_checked_however_it_ends(client, reason, rows, told):
    async with FakeEngine(scripted([])) as engine:
        engine.mangle = lambda answer: chunk(rows, len(rows), reason)
        with pytest.raises(EngineError, match=told) as caught:
            await client.generate(engine.worker, REQUEST, lambda ids: None)
    assert not isinstance(caught.value, CutStreamError)
