"""The engine client: payloads per endpoint, deadlines, and what counts as a failure."""

import asyncio
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.engine.base import GenerationRequest, SamplingParams
from rollhook.engine.client import EngineClient
from rollhook.engine.generation import generate_body, parse_generation, version_number
from rollhook.engine.server_info import parse_loads
from rollhook.engine.weights import MARKER, WeightStore, paused, update_workers
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.testing.fake_engine import FakeEngine, scripted

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


REQUEST = GenerationRequest("r", [1, 2, 3], SamplingParams(max_new_tokens=4, stop_token_ids=(9,), seed=7))


@pytest.fixture
async def engine():
    async with FakeEngine(scripted([5, 6, 9, 8])) as engine:
        yield engine


@pytest.fixture
async def client():
    client = EngineClient(generate_timeout=5, control_timeout=5)
    yield client
    await client.aclose()
    await client.aclose()


async def test_a_generation_has_one_logprob_and_one_version_per_token(engine, client):
    generation = await client.generate(engine.worker, REQUEST)
    assert generation.token_ids == [5, 6, 9]
    assert generation.logprobs == [-1 / 128, -2 / 128, -3 / 128]
    assert generation.versions == [1, 1, 1]
    assert (generation.finish_reason, generation.weight_version, generation.queue_seconds) == (
        "stop",
        1,
        None,
    )


@pytest.mark.parametrize(
    ("release", "field"),
    [
        ("", "data_parallel_rank"),
        ("0.5.9.post1", "data_parallel_rank"),
        ("0.5.10rc0", "routed_dp_rank"),
        ("0.5.23", "routed_dp_rank"),
        ("0.6.0.dev3+gabc", "routed_dp_rank"),
    ],
)
async def test_the_rank_travels_in_the_body_under_the_name_that_the_release_knows(client, release, field):
    """Invariant 10: a worker is a URL and a rank, two fields."""
    async with FakeEngine(scripted([5]), dp_size=4, sglang=release) as engine:
        await client.generate(Worker(engine.url, 3), REQUEST)
        await client.generate(engine.worker, REQUEST)
        assert engine.requests[0][field] == 3
        assert not {"data_parallel_rank", "routed_dp_rank"} & set(engine.requests[1])
        assert len({"data_parallel_rank", "routed_dp_rank"} & set(engine.requests[0])) == 1
        assert engine.requests[0]["sampling_params"]["sampling_seed"] == 7


async def test_a_cache_key_is_sglangs_extra_key(engine, client):
    keyed = GenerationRequest("k", [1], SamplingParams(), cache_key="weight-version:7")
    await client.generate(engine.worker, keyed)
    await client.generate(engine.worker, REQUEST)
    assert [body.get("extra_key") for body in engine.requests] == ["weight-version:7", None]


async def test_a_flush_is_asked_again_while_requests_are_queued(engine):
    waits = []
    client = EngineClient(control_timeout=5, sleep=noting(waits))
    engine.fail("/flush_cache", 400, times=2, body={})
    await client.flush(engine.worker)
    assert waits == [1.0, 1.0]
    assert [name for name, _ in engine.control] == ["flush_cache"] * 3
    await client.aclose()


async def test_a_flush_gives_up_after_its_tries(engine):
    waits = []
    client = EngineClient(control_timeout=5, sleep=noting(waits))
    engine.fail("/flush_cache", 400, times=100)
    with pytest.raises(EngineError, match="refused 60 times to flush its cache") as caught:
        await client.flush(engine.worker)
    assert (len(waits), caught.value.kind) == (59, "infrastructure")
    await client.aclose()


async def test_a_flush_that_fails_for_another_reason_is_not_asked_again(engine, client):
    engine.fail("/flush_cache", 500)
    with pytest.raises(EngineError, match="answered 500"):
        await client.flush(engine.worker)
    assert len(engine.control) == 1


async def test_a_continue_that_does_not_get_through_is_tried_again(engine):
    waits = []
    client = EngineClient(control_timeout=5, sleep=noting(waits))
    engine.fail("/continue_generation", 0)
    engine.fail("/continue_generation", 503)
    await client.pause(engine.worker)
    await client.continue_(engine.worker)
    assert (engine.paused, len(waits)) == (False, 2)
    await client.aclose()


def test_a_request_without_a_seed_sends_none():
    body = generate_body(GenerationRequest("r", [1], SamplingParams()))
    assert "sampling_seed" not in body["sampling_params"]


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda c, w, p: c.pause(w, "abort"), "pause_generation", {"mode": "abort"}),
        (lambda c, w, p: c.continue_(w), "continue_generation", {}),
        (lambda c, w, p: c.flush(w), "flush_cache", {}),
        (lambda c, w, p: c.abort(w, "x"), "abort_request", {"rid": "x"}),
        (lambda c, w, p: c.abort(w), "abort_request", {"abort_all": True}),
        (
            lambda c, w, p: c.update_weights_from_disk(w, p, 12),
            "update_weights_from_disk",
            {"model_path": "PATH", "weight_version": "12", "flush_cache": False},
        ),
        (
            lambda c, w, p: c.update_weight_version(w, 12),
            "update_weight_version",
            {"new_version": "12", "abort_all_requests": False},
        ),
    ],
    ids=["pause", "continue", "flush", "abort one", "abort all", "update", "name the version"],
)
async def test_control_calls_send_what_sglang_takes(engine, client, tmp_path, call, path, body):
    await call(client, engine.worker, tmp_path)
    assert engine.control == [(path, {k: str(tmp_path) if v == "PATH" else v for k, v in body.items()})]


async def test_the_version_is_asked_under_either_path(engine, client):
    assert await client.weight_version(engine.worker) == 1
    engine.fail("/model_info", 404)
    assert await client.weight_version(engine.worker) == 1
    engine.version = "default"
    assert await client.weight_version(engine.worker) is None


async def test_health_is_a_yes_or_no(engine, client):
    assert await client.health(engine.worker)
    engine.healthy = False
    assert not await client.health(engine.worker)
    await engine.stop()
    assert not await client.health(engine.worker)


@pytest.mark.parametrize("release", ["", "0.5.7", "0.5.21", "0.5.22", "0.5.23"])
async def test_an_engine_is_expanded_to_its_ranks_whatever_its_release_calls_them(client, release):
    async with FakeEngine(dp_size=4, sglang=release) as engine:
        info = await client.server_info(engine.worker)
        assert (info.version, info.dp_size, info.dp_attention) == (release, 4, True)
        assert info.workers(engine.url) == [Worker(engine.url, rank) for rank in range(4)]


async def test_server_info_is_asked_under_either_path(engine, client):
    engine.fail("/server_info", 404)
    info = await client.server_info(engine.worker)
    assert (info.dp_size, info.dp_attention, info.fields["fake"]) == (1, False, True)
    assert info.workers(engine.url) == [Worker(engine.url)]


@pytest.mark.parametrize("answer", [[], "text", {"dp_size": "many"}, {"dp_size": -1}, {"dp_size": [2]}])
async def test_a_description_that_is_none_is_an_engine_error(engine, client, answer):
    engine.fail("/server_info", 200, body=answer)
    with pytest.raises(EngineError, match="/server_info"):
        await client.server_info(engine.worker)


@pytest.mark.parametrize("release", ["0.5.7", "0.5.8", "0.5.23"])
async def test_the_load_of_each_rank_is_told_by_every_release(client, release):
    async with FakeEngine(dp_size=2, slots=1, sglang=release) as engine:
        engine.hold()
        calls = [
            asyncio.ensure_future(client.generate(Worker(engine.url, 1), replace(REQUEST, rid=n)))
            for n in "ab"
        ]
        await engine.until(lambda: engine.running == 2 and engine.queued == 1)
        idle, busy = await client.load(engine.worker)
        assert (idle.dp_rank, idle.running, idle.waiting, idle.tokens) == (0, 0, 0, 0)
        assert (busy.dp_rank, busy.running, busy.waiting, busy.tokens) == (1, 1, 1, 6)
        assert "sglang:num_queue_reqs 1" in await client.metrics(engine.worker)
        await engine.release()
        await asyncio.gather(*calls)


@given(json)
def test_any_json_is_a_load_or_an_error_of_the_protocol(data):
    try:
        parse_loads(data)
    except (KeyError, TypeError, ValueError, OverflowError):
        return


async def test_a_generation_proves_health_and_none_can_be_made_in_a_pause(engine, client):
    assert await client.health_generate(engine.worker)
    await client.pause(engine.worker)
    assert not await client.health_generate(engine.worker, timeout=1.0)
    assert await client.health(engine.worker)


async def test_a_200_that_says_no_is_a_failure(engine, client):
    engine.fail("/continue_generation", 200, body={"success": False, "error_message": "not paused"})
    with pytest.raises(EngineError, match=r"http://.*/continue_generation failed: not paused"):
        await client.continue_(engine.worker)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (302, "user"),
        (400, "user"),
        (404, "user"),
        (422, "user"),
        (408, "retryable"),
        (429, "retryable"),
        (500, "retryable"),
        (501, "infrastructure"),
        (502, "retryable"),
        (503, "retryable"),
    ],
)
async def test_a_status_tells_who_can_mend_it(engine, client, status, kind):
    engine.fail("/generate", status)
    with pytest.raises(
        EngineError, match=f"{engine.url}/generate answered {status}: scripted failure"
    ) as caught:
        await client.generate(engine.worker, REQUEST)
    assert caught.value.kind == kind


async def test_a_dropped_connection_is_retryable(engine, client):
    engine.fail("/generate", 0)
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        await client.generate(engine.worker, REQUEST)
    assert caught.value.kind == "retryable"


async def test_nobody_listening_is_retryable(client):
    with pytest.raises(EngineError, match=r"http://127.0.0.1:1/generate cannot be reached") as caught:
        await client.generate(Worker("http://127.0.0.1:1"), REQUEST)
    assert caught.value.kind == "retryable"


async def test_silence_ends_at_the_deadline(engine):
    client = EngineClient(generate_timeout=0.05)
    engine.hold()
    with pytest.raises(EngineError, match=r"did not answer within 0\.05 s") as caught:
        await client.generate(engine.worker, REQUEST)
    assert caught.value.kind == "retryable"
    await client.aclose()


@pytest.mark.parametrize(("told", "kept"), [(2, 2), (3, 3), (4, 3), (10**9, 3), (-1, 0), (None, 0)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_no_more_of_a_prompt_was_cached_than_it_has(engine, client, told, kept, streamed):
    def mangle(answer):
        answer["meta_info"]["cached_tokens"] = told
        return answer

    engine.mangle = mangle
    generation = await client.generate(engine.worker, REQUEST, (lambda ids: None) if streamed else None)
    assert generation.cached_tokens == kept


async def test_a_connection_that_is_not_made_is_told_with_its_own_limit():
    client = EngineClient(connect_timeout=0.2)
    with socket.socket() as deaf, ExitStack() as others:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(2):  # they fill its queue, so that nobody else gets in
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        worker = Worker(f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(EngineError, match=r"/generate: no connection within 0\.2 s") as caught:
            await client.generate(worker, REQUEST)
        assert caught.value.kind == "retryable"
    await client.aclose()


async def test_a_client_of_a_shared_session_leaves_it_open(engine):
    import aiohttp

    async with aiohttp.ClientSession() as session:
        client = EngineClient(session)
        await client.generate(engine.worker, REQUEST)
        await client.aclose()
        assert not session.closed


def noting(waits):
    async def sleep(seconds):
        waits.append(seconds)

    return sleep


def change(**meta):
    def mangle(answer):
        answer["meta_info"].update(meta)
        return answer

    return mangle


def says(*ids):
    """Answer with these ids, whatever was asked."""

    def mangle(answer):
        rows = [[-0.1, index, None] for index in ids]
        answer["meta_info"] |= {"completion_tokens": len(ids), "output_token_logprobs": rows}
        return {"meta_info": {k: v for k, v in answer["meta_info"].items() if k != "weight_versions"}}

    return mangle


def without(key):
    def mangle(answer):
        del answer["meta_info"][key]
        return answer

    return mangle


@pytest.mark.parametrize(
    "mangle",
    [
        change(completion_tokens=2),
        change(output_token_logprobs=[[-0.1, 5, None]]),
        change(output_token_logprobs=[[None, 5], [-0.1, 6], [-0.1, 9]]),
        change(output_token_logprobs=[[-0.1, 5], [-0.1, 6], [-0.1]]),
        change(output_token_logprobs=[[-0.1, 5], [-0.1, 6], [-0.1, 7]]),
        change(output_token_logprobs="no"),
        change(finish_reason={"type": "tired"}),
        change(finish_reason=None),
        change(weight_versions=[1]),
        change(weight_versions=[1, 1, 1 << 31]),
        change(weight_version="99999999999999999999"),
        says(5, 1 << 40),
        says(-5),
        says(5, 5, 5, 5, 5),
        without("output_token_logprobs"),
        without("finish_reason"),
        without("completion_tokens"),
        lambda answer: {},
        lambda answer: [],
        lambda answer: "text",
        lambda answer: None,
    ],
)
async def test_an_answer_outside_the_protocol_is_an_engine_error(engine, client, mangle):
    engine.mangle = mangle
    with pytest.raises(EngineError, match="outside the protocol") as caught:
        await client.generate(engine.worker, REQUEST)
    assert caught.value.kind == "infrastructure"


@pytest.mark.parametrize("answer", [None, [], "text", {"logprob": float("inf")}])
async def test_an_answer_that_is_no_json_object_is_called_that(engine, client, answer):
    engine.mangle = lambda _: answer
    with pytest.raises(EngineError, match="ValueError: the answer is not a JSON object"):
        await client.generate(engine.worker, REQUEST)


async def test_an_aborted_request_needs_no_tokens(engine, client):
    engine.mangle = lambda answer: {"meta_info": {"finish_reason": {"type": "abort"}}}
    assert (await client.generate(engine.worker, REQUEST)).finish_reason == "abort"


async def test_an_abort_ends_the_request_that_it_names(engine, client):
    engine.hold()
    calls = [
        asyncio.ensure_future(
            client.generate(engine.worker, GenerationRequest(rid, [1], SamplingParams(max_new_tokens=2)))
        )
        for rid in "ab"
    ]
    await engine.until(lambda: engine.running == 2)
    await client.abort(engine.worker, "a")
    assert (await calls[0]).finish_reason == "abort"
    await engine.release()
    assert (await calls[1]).finish_reason == "length"


meta = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": json | st.just({"type": "stop"}),
        "output_token_logprobs": json | st.just([[-0.1, 3]]),
        "completion_tokens": json | st.just(1),
        "weight_versions": json,
        "weight_version": json,
        "queue_time": json,
        "cached_tokens": json,
    },
)


@given(st.builds(lambda m: {"meta_info": m}, meta) | json)
def test_any_json_is_a_generation_or_an_error_of_the_protocol(answer):
    try:
        generation = parse_generation(answer)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return
    assert len(generation.token_ids) == len(generation.logprobs)


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), (3, 3), ("default", None), (None, None), ("", None)]
)
def test_versions_are_numbers_or_nothing(text, number):
    assert version_number(text) == number


# -- weights


def test_a_version_is_complete_once_committed(tmp_path):
    store = WeightStore(tmp_path / "w")
    path = store.new(3)
    (path / "model.safetensors").write_bytes(b"x")
    assert store.newest() is None
    store.commit(path, 3)
    assert store.newest() == (3, path)
    assert (path / MARKER).exists()


def test_a_version_is_published_once_and_a_crashs_leftover_is_replaced(tmp_path):
    store = WeightStore(tmp_path)
    (store.new(1) / "half").write_text("x")
    path = store.new(1)
    assert list(path.iterdir()) == []
    store.commit(path, 1)
    with pytest.raises(EngineError, match="was published before"):
        store.new(1)


def test_two_versions_and_those_in_use_are_kept(tmp_path):
    store = WeightStore(tmp_path)
    for version in range(1, 7):
        store.commit(store.new(version), version)
    half, coming = store.new(0), store.new(9)
    assert store.prune(in_use={2}) == [0, 1, 3, 4]
    assert store.complete() == [2, 5, 6]
    assert not half.exists()
    assert coming.exists()


def test_other_directories_are_left_alone(tmp_path):
    store = WeightStore(tmp_path)
    (tmp_path / "notes").mkdir()
    for version in (1, 2, 3):
        store.commit(store.new(version), version)
    store.prune()
    assert (tmp_path / "notes").exists()
    assert WeightStore(tmp_path / "absent").prune() == []


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_an_update_is_this_sequence_once_however_many_ranks(tmp_path, client, mode):
    async with FakeEngine(dp_size=4) as engine:
        assert await update_workers(client, engine.workers, tmp_path, 2, mode) == {}
        flush = [] if mode == "in_place" else ["flush_cache"]
        assert [name for name, _ in engine.control] == [
            "pause_generation",
            *flush,
            "update_weights_from_disk",
            "continue_generation",
        ]
        assert engine.control[0][1] == {"mode": mode}
        assert (engine.version, engine.paused) == (2, False)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("release", ["0.5.9", "0.5.20", "0.5.23"])
async def test_an_update_with_requests_under_way_works_with_every_release(tmp_path, mode, release):
    client = EngineClient(generate_timeout=5, control_timeout=5, sleep=noting([]))
    async with FakeEngine(scripted([5, 6, 9, 8]), sglang=release) as engine:
        engine.hold(after=2)
        call = asyncio.ensure_future(client.generate(engine.worker, REQUEST))
        await engine.until(lambda: engine.running == 1)
        assert await update_workers(client, engine.workers, tmp_path, 2, mode) == {}
        await engine.release()
        generation = await call
        refuses = release == "0.5.20"
        aborted = mode == "abort" or (mode == "retract" and refuses)
        assert generation.finish_reason == ("abort" if aborted else "stop")
        assert ("abort_request" in dict(engine.control)) == (mode == "retract" and refuses)
    await client.aclose()


async def test_an_engine_that_does_not_flush_has_failed_and_generates_on(tmp_path):
    client = EngineClient(control_timeout=5, sleep=noting([]))
    async with FakeEngine() as engine:
        engine.fail("/flush_cache", 400, times=100)
        failed = await update_workers(client, engine.workers, tmp_path, 2, "abort")
        assert "to flush its cache" in failed[engine.worker]
        assert (engine.version, engine.paused) == (1, False)
    await client.aclose()


async def test_an_engine_is_never_taken_back_to_older_weights(tmp_path, client):
    async with FakeEngine(version=5) as engine:
        failed = await update_workers(client, engine.workers, tmp_path, 4)
        assert failed == {engine.worker: "it serves version 5, which 4 does not follow"}
        assert engine.control == []


async def test_few_engines_read_weights_at_once(tmp_path, client):
    engines = [FakeEngine() for _ in range(4)]
    reading = Reading(client, "update_weights_from_disk")
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        workers = [engine.worker for engine in engines]
        assert await update_workers(reading, workers, tmp_path, 2, at_once=2) == {}
    assert reading.peak == 2


class Reading:
    """Passes calls on and counts how many of one kind are under way."""

    def __init__(self, client, name):
        self.client, self.name, self.now, self.peak = client, name, 0, 0
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    def __getattr__(self, name):
        call = getattr(self.client, name)
        return self.counted(call) if name == self.name else call

    def counted(self, call):
        async def counting(*args):
            self.now += 1
            self.peak = max(self.peak, self.now)
            self.reached.set()
            try:
                await self.go.wait()
                await call(*args)
            finally:
                self.now -= 1

        return counting


@pytest.mark.parametrize("step", ["pause", "update_weights_from_disk", "weight_version", "continue_"])
async def test_an_update_that_is_cancelled_leaves_no_engine_paused(tmp_path, client, step):
    stopped = Reading(client, step)
    async with FakeEngine() as one, FakeEngine() as two:
        stopped.go.clear()
        workers = [one.worker, two.worker]
        update = asyncio.ensure_future(update_workers(stopped, workers, tmp_path, 2, "in_place"))
        async with asyncio.timeout(10):
            while stopped.now < 2:
                await stopped.reached.wait()
                stopped.reached.clear()
        update.cancel()
        stopped.go.set()
        with pytest.raises(asyncio.CancelledError):
            await update
        for engine in (one, two):
            assert not engine.paused
            names = [name for name, _ in engine.control]
            assert names.count("pause_generation") == names.count("continue_generation") or step == "pause"


async def test_an_engine_goes_on_when_the_block_in_its_pause_fails(client):
    async with FakeEngine() as engine:
        with pytest.raises(KeyError):  # noqa: PT012 - what it leaves behind counts
            async with paused(client, engine.worker, "retract"):
                assert engine.paused
                raise KeyError("x")
        assert not engine.paused


async def test_an_error_in_a_pause_is_told_and_not_the_continue_that_failed_after_it(client, caplog):
    async with FakeEngine() as engine:
        engine.fail("/continue_generation", 400)
        with pytest.raises(EngineError, match="the first"):
            async with paused(client, engine.worker):
                raise EngineError("the first")
    assert "may be paused still" in caplog.text


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/pause_generation", "pause_generation answered 501"),
        ("/update_weights_from_disk", "update_weights_from_disk answered 501"),
        ("/model_info", "model_info answered 501"),
        ("/continue_generation", "continue_generation answered 501"),
    ],
)
async def test_an_engine_that_fails_in_any_step_is_reported_and_told_to_continue(
    tmp_path, client, path, told
):
    async with FakeEngine(dp_size=2) as bad, FakeEngine() as good:
        if path == "/model_info":
            bad.fail(path, 200, body={"weight_version": "1"})  # the version before the update
        bad.fail(path, 501)
        failed = await update_workers(client, [*bad.workers, *good.workers], tmp_path, 2)
        assert set(failed) == set(bad.workers)
        assert told in failed[bad.workers[0]]
        assert bad.control[-1][0] == "continue_generation"
        assert good.version == 2


async def test_an_engine_that_says_yes_and_serves_the_old_version_has_failed(tmp_path, client):
    async with FakeEngine() as engine:
        engine.fail("/update_weights_from_disk", 200, body={"success": True})
        failed = await update_workers(client, engine.workers, tmp_path, 2)
        assert failed == {engine.worker: "it serves version 1 after the update"}


async def test_an_engine_that_is_gone_does_not_hold_up_the_others(tmp_path, client):
    async with FakeEngine() as good:
        began = time.monotonic()
        failed = await update_workers(client, [Worker("http://127.0.0.1:1"), good.worker], tmp_path, 2)
        assert list(failed) == [Worker("http://127.0.0.1:1")]
        assert good.version == 2
        assert time.monotonic() - began < 5


async def test_an_engine_that_is_out_of_the_routing_and_hangs_costs_an_update_one_look(tmp_path):
    asked, closed = [], asyncio.Event()

    async def hang(reader, writer):
        asked.append((await reader.readline()).split()[1])
        await closed.wait()
        writer.close()

    client = EngineClient(control_timeout=0.2)
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, FakeEngine(dp_size=2) as good:
        hung = Worker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        out = {hung, good.workers[0]}
        failed = await update_workers(client, [hung, *good.workers], tmp_path, 2, out=out)
        assert failed == {hung: "it was out of the routing and is not healthy"}
        assert asked == [b"/health"]
        assert good.version == 2
        assert await update_workers(client, good.workers, tmp_path, 3, out=set(good.workers)) == {}
        assert good.version == 3
        closed.set()
    await client.aclose()


async def test_an_engine_that_hangs_amid_an_update_is_not_waited_for_to_continue(
    tmp_path, client, monkeypatch
):
    monkeypatch.setattr("rollhook.engine.weights._CONTINUE_SECONDS", 0.05)
    hung = Reading(client, "continue_")
    hung.go.clear()
    async with FakeEngine() as engine:
        engine.fail("/update_weights_from_disk", 500)
        failed = await asyncio.wait_for(update_workers(hung, engine.workers, tmp_path, 2), 5)
        assert "answered 500" in failed[engine.worker]
    assert hung.now == 0
