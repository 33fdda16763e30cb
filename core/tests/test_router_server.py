"""The router as a proxy: what goes through it unchanged, what is tried again, workers that come and go."""

import asyncio
import contextlib
import itertools
import logging

import aiohttp
import orjson
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from rollhook.component import Config
from rollhook.errors import UsageError
from rollhook.router import RouterPolicy, Worker
from rollhook.router_server import asked as asking
from rollhook.router_server.names import parse_name, worker_id, worker_name
from rollhook.router_server.pool import Pool
from rollhook.router_server.proxy import Retries
from rollhook.router_server.server import RouterOptions, RouterServer
from rollhook.routing import Chain
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine, scripted

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "stop_token_ids": []}, "rid": "r"}


class Keyed(RouterPolicy):
    """Keeps a session where it is, and gives new ones out in turn; notes what it is told."""

    def __init__(self) -> None:
        super().__init__(Config(), build_context())
        self.known = {}
        self.turns = itertools.count()
        self.ended = []

    def pick(self, request, workers):
        own = self.known.get(request.session_id)
        if own in [load.worker for load in workers]:
            return own
        return workers[next(self.turns) % len(workers)].worker

    def assigned(self, request, worker):
        self.known[request.session_id] = worker

    def closed(self, session_id):
        self.ended.append(session_id)
        self.known.pop(session_id, None)


@contextlib.asynccontextmanager
async def routing(*urls, policy=None, **options):
    """Yield a router on a free port, all of its first workers routable, and a client."""
    options = {"port": 0, "retries": Retries(backoff=0.0), "drain": 5.0, **options}
    server = RouterServer(Chain([policy or Keyed()]), RouterOptions(**options), urls)
    await server.start()
    async with aiohttp.ClientSession(server.url) as client:
        try:
            async with asyncio.timeout(20):
                while {worker.url for worker in server.pool.table.workers} < {
                    parse_name(u).url for u in urls
                }:
                    await asyncio.sleep(0.005)
            yield server, client
        finally:
            await server.stop()


async def listed(client):
    async with client.get("/workers") as response:
        return (await response.json())["workers"]


async def registered(client, url, count):
    """Register an engine as frameworks do, and return when it is routable."""
    async with client.post("/workers", json={"url": url, "worker_type": "regular"}) as response:
        assert response.status == 202
        accepted = await response.json()
    async with asyncio.timeout(20):
        while len(await listed(client)) < count:
            await asyncio.sleep(0.005)
    return accepted


async def generated(client, body=None, key=None, path="/generate"):
    headers = {"X-SMG-Routing-Key": key} if key else {}
    async with client.post(path, json=body or BODY, headers=headers) as response:
        return response.status, orjson.loads(await response.read())


# -- names


hosts = st.sampled_from(["engine", "10.0.0.7", "[::1]", "[fe80::1]", "a.b-c.example"])
ports = st.integers(1, 65535)
paths = st.sampled_from(["", "/v1", "/engines/3"])
urls = st.builds(
    lambda s, h, p, d: f"{s}://{h}:{p}{d}", st.sampled_from(["http", "https"]), hosts, ports, paths
)


@given(urls, st.none() | st.integers(0, 999999))
@example("http://[::1]:80", 2)
def test_a_name_means_one_worker_and_a_worker_has_one_name(url, rank):
    worker = parse_name(url if rank is None else f"{url}@{rank}")
    assert worker.dp_rank == rank
    assert "@" not in worker.url
    assert parse_name(worker_name(worker)) == worker
    assert worker_id(worker) == worker_id(parse_name(worker_name(worker)))


@given(st.text(max_size=40) | st.builds(lambda u, s: u + s, urls, st.text(max_size=6)))
@example("http://host@name")
@example("http://user:secret@host:1")
@example("http://[::1")
@example("http://host:1@-2")
@example("http://host:1@٣")
@example("host:80@1")
def test_what_is_no_name_is_refused_and_nothing_else_happens(text):
    try:
        worker = parse_name(text)
    except ValueError as error:
        said = str(error)
        assert "secret" not in said
    else:
        assert worker.url.startswith("http")
        assert parse_name(worker_name(worker)) == worker


# -- bodies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(), json_values, max_size=5),
    st.sampled_from(["", " ", "\n  "]),
    st.integers(0, 64),
)
def test_a_rank_is_added_to_a_body_and_the_rest_stays_byte_for_byte(data, space, rank):
    for name in asking.RANK_FIELDS:
        data.pop(name, None)
    with contextlib.suppress(orjson.JSONEncodeError):
        inside = orjson.dumps(data)[1:-1]
        body = space.encode() + b"{" + space.encode() + inside + space.encode() + b"}" + space.encode()
        sent = asking.read({}, body).for_rank(rank, "data_parallel_rank")
        assert orjson.loads(sent) == {**orjson.loads(body), "data_parallel_rank": rank}
        assert inside in sent
        assert asking.read({}, body).for_rank(None, "data_parallel_rank") == body


@given(st.binary(max_size=60))
@example(b"[1]")
@example(b'{"input_ids": ["a"], "prompt": 3, "messages": 4, "sampling_params": []}')
@example(b'{"text": "\xf0\x9f\xa4\x96", "max_tokens": true}')
def test_any_body_is_read_or_refused(body):
    with contextlib.suppress(asking.BodyError):
        asked = asking.read({}, body)
        assert all(isinstance(number, int) for number in asked.route.prefix_ids)
        assert asked.route.expected_tokens >= 0


def test_prompts_that_begin_alike_do_so_for_policies_whatever_their_form():
    begin = [{"role": "user", "content": "the same beginning of a conversation"}]
    first = asking.read({}, orjson.dumps({"messages": begin})).route.prefix_ids
    longer = asking.read({}, orjson.dumps({"messages": [*begin, {"role": "user", "content": "x"}]}))
    assert list(longer.route.prefix_ids[: len(first) - 1]) == list(first[:-1])
    assert list(asking.read({}, b'{"input_ids": [5, 6]}').route.prefix_ids) == [5, 6]
    assert list(asking.read({}, b'{"prompt": [5, 6]}').route.prefix_ids) == [5, 6]
    assert len(asking.read({}, b'{"text": "12345678"}').route.prefix_ids) == 2


# -- through the proxy


async def test_a_framework_registers_its_engines_and_generates_with_routing_keys():
    """What miles does: POST /workers, /generate with a key, listing, removal by the id of the URL."""
    async with FakeEngine(dp_size=1) as one, FakeEngine(dp_size=1) as two, routing() as (_, client):
        assert (await generated(client))[0] == 503
        await registered(client, one.url, 1)
        await registered(client, two.url, 2)
        for key in ("a", "b", "a", "b", "a"):
            assert (await generated(client, key=key))[0] == 200
        assert sorted([len(one.requests), len(two.requests)]) == [2, 3]
        (row,) = [row for row in await listed(client) if row["url"] == one.url]
        async with client.delete(f"/workers/{row['id']}") as response:
            assert response.status == 202
        assert [row["url"] for row in await listed(client)] == [two.url]
        for _ in range(3):
            assert (await generated(client, key="a"))[0] == 200
        assert len(one.requests) + len(two.requests) == 8


async def test_unknown_fields_and_unknown_headers_survive():
    async with Echo() as echo, routing(echo.url) as (_, client):
        raw = b'{"text": "\\u00e9  x", "zzz": 1.50, "return_routed_experts": true, "big": 123456789012345678}'
        headers = {"X-SMG-Routing-Key": "k", "X-Anything": "1", "Authorization": "Bearer theirs"}
        async with client.post("/generate?a=%20b", data=raw, headers=headers) as response:
            assert response.headers["X-Echo"] == "yes"
            assert response.status == 200
        (seen,) = echo.seen
        assert seen["body"] == raw
        assert seen["path"] == "/generate?a=%20b"
        assert {name: seen["headers"][name] for name in headers} == headers


async def test_a_body_is_not_json():
    async with routing() as (_, client):
        for body in (b"", b"[1]", b"{", b'{"a": \xff}'):
            async with client.post("/v1/chat/completions", data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "invalid_body"


async def test_without_engines_the_answer_is_that_of_sglangs_router():
    async with routing() as (_, client):
        status, body = await generated(client)
        assert (status, body["error"]["code"]) == (503, "no_available_workers")
        async with client.get("/readiness") as response:
            assert response.status == 503
        async with client.get("/health") as response:
            assert response.status == 200


async def test_a_stream_comes_through_piece_by_piece():
    async with FakeEngine(scripted([7, 8, 9])) as engine, routing(engine.url) as (_, client):
        engine.hold(2)
        async with client.post("/generate", json={**BODY, "stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = [line async for line in _until(response.content, b'"output_ids":[7,8]')]
            assert lines  # two tokens are here while the third is held
            await engine.release()
            rest = await response.content.read()
        assert rest.rstrip().endswith(b"data: [DONE]")


async def _until(content, text):
    async for line in content:
        yield line
        if text in line.replace(b" ", b""):
            return
    raise AssertionError("the stream ended")


async def test_a_stream_that_is_cut_is_cut_for_the_client_too():
    async with FakeEngine(scripted([7, 8, 9])) as engine, routing(engine.url) as (_, client):
        engine.hold(1)
        async with client.post("/generate", json={**BODY, "stream": True}) as response:
            await response.content.readline()
            await engine.stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()


async def test_a_client_that_goes_away_ends_its_request_at_the_engine():
    async with FakeEngine() as engine, routing(engine.url) as (server, client):
        engine.hold()
        task = asyncio.ensure_future(generated(client))
        await engine.until(lambda: engine.running == 1)
        task.cancel()
        await asyncio.wait({task})
        async with asyncio.timeout(20):
            while server.pool.sessions or any(entry.requests for entry in server.pool.table):
                await asyncio.sleep(0.005)


# -- ranks


async def test_an_engine_is_expanded_to_its_ranks_and_the_rank_goes_into_the_body():
    async with FakeEngine(dp_size=4) as engine, routing(engine.url) as (_, client):
        rows = await listed(client)
        assert [row["url"] for row in rows] == [f"{engine.url}@{rank}" for rank in range(4)]
        for _ in range(8):
            assert (await generated(client))[0] == 200
        assert sorted(body["data_parallel_rank"] for body in engine.requests) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (await generated(client, {**BODY, "data_parallel_rank": 2}))[0] == 200
        assert engine.requests[-1]["data_parallel_rank"] == 2
        status, body = await generated(client, {**BODY, "data_parallel_rank": 7})
        assert (status, body["error"]["code"]) == (503, "no_available_workers")


@pytest.mark.parametrize(("dp_aware", "count"), [("off", 1), ("on", 4), ("auto", 4)])
async def test_dp_aware(dp_aware, count):
    async with FakeEngine(dp_size=4) as engine, routing(engine.url, dp_aware=dp_aware) as (_, client):
        assert len(await listed(client)) == count
        assert (await generated(client))[0] == 200
        assert ("data_parallel_rank" in engine.requests[0]) == (count == 4)


async def test_newer_engines_are_given_the_rank_under_its_new_name():
    async with FakeEngine(dp_size=2, sglang="0.5.12") as engine, routing(engine.url) as (_, client):
        assert (await generated(client))[0] == 200
        assert "routed_dp_rank" in engine.requests[0]


async def test_removing_an_engine_removes_its_ranks_and_what_is_under_way_there_finishes():
    async with FakeEngine(dp_size=2) as engine, routing() as (_, client):
        accepted = await registered(client, engine.url, 2)
        engine.hold()
        task = asyncio.ensure_future(generated(client))
        await engine.until(lambda: engine.running == 1)
        async with client.delete(accepted["location"]) as response:
            assert response.status == 202
        assert await listed(client) == []
        assert (await generated(client))[0] == 503
        await engine.release()
        assert (await task)[0] == 200
        async with client.delete(accepted["location"]) as response:
            assert response.status == 404


async def test_a_drained_worker_gets_nothing_new_until_it_is_taken_back():
    async with FakeEngine() as engine, routing(engine.url) as (_, client):
        (row,) = await listed(client)
        for draining, status in ((True, 503), (False, 200)):
            async with client.put(f"/workers/{row['id']}", json={"draining": draining}) as response:
                assert response.status == 202
            assert (await generated(client))[0] == status


async def test_the_forms_with_a_query_of_older_routers():
    async with FakeEngine() as engine, routing() as (_, client):
        async with client.post("/add_worker", params={"url": engine.url}) as response:
            assert response.status == 200
        async with asyncio.timeout(20):
            while not (names := (await (await client.get("/list_workers")).json())["urls"]):
                await asyncio.sleep(0.005)
        assert names == [engine.url]
        async with client.post("/remove_worker", params={"url": engine.url}) as response:
            assert response.status == 200
        assert (await (await client.get("/list_workers")).json())["urls"] == []
        for path in ("/add_worker", "/remove_worker", "/add_worker?url=nonsense"):
            async with client.post(path) as response:
                assert response.status == 400


async def test_a_worker_is_routable_only_once_it_is_healthy():
    async with FakeEngine() as engine, routing() as (_, client):
        engine.healthy = False
        async with client.post("/workers", json={"url": engine.url}) as response:
            accepted = await response.json()
        async with client.get(accepted["location"]) as response:
            assert (await response.json())["job_status"]["status"] == "processing"
        assert (await generated(client))[0] == 503
        engine.healthy = True
        await registered(client, engine.url, 1)
        async with client.get(accepted["location"]) as response:
            assert (await response.json())["job_status"]["status"] == "completed"
        assert (await generated(client))[0] == 200


async def test_an_engine_that_waits_and_one_that_leaves_are_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="rollhook.router_server")
    async with FakeEngine() as engine, routing(engine.url) as (_, client):
        await client.delete(f"/workers/{worker_id(parse_name(engine.url))}")
        async with FakeEngine() as ill:
            ill.healthy = False
            await client.post("/workers", json={"url": ill.url})
            async with asyncio.timeout(20):
                while f"engine {ill.url} is waited for: {ill.url}/health" not in caplog.text:
                    await asyncio.sleep(0.005)
            status, answer = await generated(client)
    assert f"engine {engine.url} left" in caplog.text
    assert status == 503
    assert "no engine has joined; add one with POST /workers" in answer["error"]["message"]


# -- retries


async def test_what_was_not_started_is_tried_again_and_nothing_else():
    async with FakeEngine() as engine, routing(engine.url) as (_, client):
        engine.fail("/generate", 503, 2)
        assert (await generated(client))[0] == 200
        assert len(engine.requests) == 3
        for status in (400, 408, 422, 500, 502, 504):
            count = len(engine.requests)
            engine.fail("/generate", status, 1)
            assert (await generated(client))[0] == status
            assert len(engine.requests) == count + 1


async def test_a_generation_that_may_have_begun_is_not_run_twice():
    async with FakeEngine() as engine, routing(engine.url) as (_, client):
        engine.fail("/generate", 0, 1)
        status, body = await generated(client)
        assert (status, body["error"]["code"]) == (502, "engine_failed")
        assert len(engine.requests) == 1


async def test_an_engine_that_is_gone_costs_a_client_nothing_while_another_is_there():
    async with FakeEngine() as gone, FakeEngine() as engine, routing(gone.url, engine.url) as (_, client):
        await gone.stop()
        for _ in range(4):
            assert (await generated(client))[0] == 200
        assert len(engine.requests) == 4


async def test_pauses_between_tries_grow_and_are_jittered_and_the_last_answer_is_passed_on():
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    async with (
        FakeEngine() as engine,
        routing(engine.url, retries=Retries(backoff=1.0, sleep=sleep)) as (_, client),
    ):
        engine.fail("/generate", 503, 9, {"error": {"message": "full"}})
        assert await generated(client) == (503, {"error": {"message": "full"}})
    assert len(engine.requests) == 5
    assert [0.8 * 1.5**n <= pause <= 1.2 * 1.5**n for n, pause in enumerate(pauses)] == [True] * 4
    assert pauses[0] != 1.0


async def test_a_get_is_tried_again_whatever_went_wrong():
    async with FakeEngine() as engine, routing(engine.url) as (_, client):
        engine.fail("/model_info", 500, 1)
        engine.fail("/model_info", 0, 1)
        async with client.get("/model_info") as response:
            assert response.status == 200


# -- breaker and health


async def test_the_breaker_opens_on_faults_of_the_server_only_and_one_request_tries_again():
    async with FakeEngine() as engine, routing(engine.url, breaker_seconds=3600.0) as (server, client):
        (entry,) = server.pool.table
        for status, again in ((400, False), (429, True), (503, True)):
            engine.fail("/generate", status, 10)
            for _ in range(2 if again else 10):
                assert (await generated(client))[0] == status
            assert not entry.breaker.open
        engine.fail("/generate", 500, 10)
        for _ in range(10):
            assert (await generated(client))[0] == 500
        assert (await listed(client))[0]["circuit_breaker"] == "open"
        assert (await generated(client))[1]["error"]["code"] == "no_available_workers"
    async with FakeEngine() as engine, routing(engine.url, breaker_seconds=0.0) as (server, client):
        engine.fail("/generate", 500, 11)
        for status in [*[500] * 11, 200, 200]:
            assert (await generated(client))[0] == status
        assert (await listed(client))[0]["circuit_breaker"] == "closed"


async def test_an_ill_worker_gets_nothing_until_it_is_well_again():
    async with (
        FakeEngine() as ill,
        FakeEngine() as well,
        routing(ill.url, well.url, health_interval=0.01) as (_, client),
    ):
        for healthy in (False, True):
            ill.healthy = healthy
            async with asyncio.timeout(20):
                while [row["is_healthy"] for row in await listed(client) if row["url"] == ill.url] != [
                    healthy
                ]:
                    await asyncio.sleep(0.01)
            count = len(ill.requests)
            for _ in range(4):
                assert (await generated(client))[0] == 200
            assert (len(ill.requests) > count) == healthy


# -- sessions


def asked(key=None):
    return asking.read({"X-SMG-Routing-Key": key} if key else {}, b'{"input_ids": [1, 2], "max_tokens": 8}')


def test_an_idle_session_counts_until_its_time_is_over_and_a_request_without_a_key_until_its_end():
    now, policy = [0.0], Keyed()
    pool = Pool(Chain([policy]), session_idle=10.0, now=lambda: now[0])
    pool.add([Worker("http://a"), Worker("http://b")])

    def send(key=None):
        with pool.request(request := asked(key)):
            entry = pool.choose(request, set())
            with entry.sending(request.route.expected_tokens):
                assert entry.tokens_in_flight == 10
        return entry

    assert send("s") is send("s")
    send()
    assert len(policy.ended) == 1  # the one without a key
    assert [entry.open_sessions for entry in pool.table] == [1, 0]
    assert [entry.tokens_in_flight for entry in pool.table] == [0, 0]
    now[0] = 9.0
    with pool.request(other := asked("t")):
        pool.choose(other, set())
        now[0] = 11.0
        send("u")
        assert pool.sessions == 2
        now[0] = 25.0  # "t" has been idle for long, but its request is still under way
        send("v")
        assert pool.sessions == 2
    assert sum(entry.open_sessions for entry in pool.table) == 2
    assert len(policy.ended) == 1  # nobody said that "s" and "u" are over


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 20), st.booleans()), max_size=40
    )
)
def test_counts_of_open_sessions_are_right_whatever_comes(steps):
    now = [0.0]
    pool = Pool(Chain([Keyed()]), session_idle=10.0, now=lambda: now[0])
    for key, seconds, changes in steps:
        now[0] += seconds
        if changes and len(pool.table.workers) > 1:
            pool.remove(pool.table.workers[0])
        elif changes:
            pool.add([Worker(f"http://{now[0]}"), Worker("http://z", 1)])
        if key is not None and seconds == 7:
            pool.forget(key)
        with pool.request(request := asked(key)):
            pool.choose(request, set())
        placed = [session for session in pool._sessions.values() if session.entry in list(pool.table)]
        assert sum(entry.open_sessions for entry in pool.table) == len(placed)
        assert all(entry.open_sessions >= 0 for entry in pool.table)


async def test_a_session_keeps_its_worker_whatever_the_policy_until_that_is_gone():
    class Turns(RouterPolicy):
        def pick(self, request, workers):
            return workers[next(turns) % len(workers)].worker

    turns = itertools.count()
    policy = Turns(Config(), build_context())
    async with (
        FakeEngine() as one,
        FakeEngine() as two,
        routing(one.url, two.url, policy=policy) as (_, client),
    ):
        for _ in range(4):
            await generated(client, key="a")
        assert sorted([len(one.requests), len(two.requests)]) == [0, 4]
        first, second = (one, two) if one.requests else (two, one)
        await first.stop()
        assert (await generated(client, key="a"))[0] == 200
        assert len(second.requests) == 1


async def test_a_client_can_say_that_a_session_is_over():
    async with FakeEngine() as engine, routing(engine.url) as (server, client):
        await generated(client, key="run/1")
        assert server.pool.sessions == 1
        for status in (204, 404):
            async with client.delete("/sessions/run%2F1") as response:
                assert response.status == status
        assert [entry.open_sessions for entry in server.pool.table] == [0]


# -- all engines at once


async def test_every_engine_is_asked_once_whatever_its_ranks():
    async with FakeEngine(dp_size=3) as one, FakeEngine() as two, routing(one.url, two.url) as (_, client):
        async with client.post("/flush_cache") as response:
            assert response.status == 200
            assert sorted((await response.json())["successful"]) == sorted([one.url, two.url])
        assert [name for name, _ in one.control] == ["flush_cache"]
        async with client.get("/get_loads") as response:
            rows = (await response.json())["workers"]
        assert [row["worker"] for row in rows] == [row["url"] for row in await listed(client)]
        assert all(row["load"] >= 0 for row in rows)
        async with client.post("/abort_request", json={"rid": "x"}) as response:
            assert response.status == 200
        assert one.control[-1] == ("abort_request", {"rid": "x"})
        await two.stop()
        async with client.post("/flush_cache") as response:
            assert response.status == 206
            assert [row["worker"] for row in (await response.json())["failed"]] == [two.url]


async def test_metrics():
    async with FakeEngine(dp_size=2) as engine, routing(engine.url) as (_, client):
        await generated(client, key="a")
        async with client.get("/metrics") as response:
            text = await response.text()
        name = f'worker="{engine.url}@0"'
        assert f'rollhook_router_answers_total{{path="/generate",status="200",{name}}} 1.0' in text
        assert f"rollhook_router_worker_sessions{{{name}}} 1.0" in text
        assert f"rollhook_router_worker_healthy{{{name}}} 1.0" in text


async def test_metrics_of_engines_are_put_together_by_name():
    text = '# HELP tokens_total t\n# TYPE tokens_total counter\ntokens_total{model="m"} %d\n'
    async with (
        Echo(metrics=text % 3) as one,
        Echo(metrics=text % 4) as two,
        routing(one.url, two.url) as (_, client),
        client.get("/engine_metrics") as response,
    ):
        merged = await response.text()
    assert merged.count("# TYPE") == 1
    for echo, value in ((one, 3), (two, 4)):
        assert f'tokens_total{{model="m",worker_addr="{echo.url}"}} {value}.0' in merged


# -- who may ask


async def test_a_token_is_asked_of_clients_and_never_sent_to_engines():
    async with Echo() as echo, routing(echo.url, token="t0ken", worker_token="theirs") as (_, client):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("POST", "/generate"), ("GET", "/workers"), ("GET", "/metrics")):
                async with client.request(method, path, headers=headers) as response:
                    assert response.status == 401
        headers = {"Authorization": "Bearer t0ken"}
        async with client.post("/generate", json=BODY, headers=headers) as response:
            assert response.status == 200
        assert echo.seen[-1]["headers"]["Authorization"] == "Bearer theirs"
        async with client.get("/health") as response:
            assert response.status == 200


def test_beyond_loopback_a_token_is_needed():
    chain = Chain([Keyed()])
    with pytest.raises(UsageError, match="--token"):
        RouterServer(chain, RouterOptions(host="0.0.0.0"))
    RouterServer(chain, RouterOptions(host="0.0.0.0", token="x"))
    RouterServer(chain, RouterOptions(host="0.0.0.0", trust_network=True))
    RouterServer(chain, RouterOptions(host="::1"))
    assert "s3cret" not in repr(RouterOptions(token="s3cret", worker_token="s3cret"))


async def test_stopping_lets_requests_finish_and_takes_no_more():
    async with FakeEngine() as engine, routing(engine.url) as (server, client):
        engine.hold()
        task = asyncio.ensure_future(generated(client))
        await engine.until(lambda: engine.running == 1)
        stopping = asyncio.ensure_future(server.stop())
        async with asyncio.timeout(20):
            while True:
                try:
                    async with aiohttp.ClientSession() as other, other.get(server.url + "/health"):
                        await asyncio.sleep(0.005)
                except aiohttp.ClientConnectorError:
                    break
        await engine.release()
        assert (await task)[0] == 200
        await stopping


class Echo:
    """A server that notes what comes in and says yes; a double of any engine."""

    def __init__(self, metrics=""):
        self.seen = []
        self.metrics = metrics

    async def __aenter__(self):
        app = web.Application()
        app.add_routes([web.get("/health", self.well), web.get("/metrics", self.told)])
        app.add_routes([web.post("/generate", self.note)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self.runner.addresses[0][:2])
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()

    async def well(self, request):
        return web.Response()

    async def told(self, request):
        return web.Response(text=self.metrics)

    async def note(self, request):
        self.seen.append({"headers": request.headers, "body": await request.read(), "path": request.path_qs})
        self.seen[-1]["path"] = request.raw_path
        return web.json_response({}, headers={"X-Echo": "yes"})
