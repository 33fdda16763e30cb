"""The fleet of engine workers: loads, health, breaker, retries, joining, leaving and draining."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollhook.component import Config
from rollhook.engine.client import EngineClient
from rollhook.engine.ranks import expand
from rollhook.errors import EngineError
from rollhook.metric_names import unlisted
from rollhook.router import RouterPolicy, Worker, WorkerLoad
from rollhook.session import Renderer
from rollhook.session.breaker import Breaker, is_fault
from rollhook.session.turn import Limits
from rollhook.session.workers import WorkerTable
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

A, B, C = WORKERS = [Worker(f"http://{name}") for name in "abc"]
USER = {"role": "user", "content": "go"}
NEXT = {"role": "user", "content": "on"}
FAST = Limits(backoff=0.001, no_worker=0.05, abort=0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def renderer(directory):
    return Renderer(directory)


@pytest.fixture
def engines(renderer):
    return [FakeEngine(says(renderer, "x")), FakeEngine(says(renderer, "x"))]


class Least(RouterPolicy):
    """Picks the worker with the fewest sessions."""

    def pick(self, request, workers):
        return min(workers, key=lambda load: load.open_sessions).worker if workers else None


def least(directory):
    return [Least(Config(), build_context(directory))]


def open_session(policy, name="s", **keys):
    return policy.open(name, **({"max_seq_len": 5000, "reply_tokens": 100, "turns": 20} | keys))


def offered(policy):
    return [entry.worker for entry in policy.table.offered()]


# -- loads


def test_the_load_of_other_processes_adds_to_the_own():
    table = WorkerTable()
    table.set_workers([A, B], 1)
    own = table.get(A)
    own.open_sessions, own.tokens_in_flight = 2, 100
    table.set_remote({A: (3, 1000), C: (9, 9)})
    assert [table.load(entry) for entry in table] == [WorkerLoad(A, 5, 1100), WorkerLoad(B, 0, 0)]
    assert table.local_loads() == {A: (2, 100), B: (0, 0)}
    table.set_remote({})
    assert table.load(own) == WorkerLoad(A, 2, 100)


async def test_a_session_that_is_busy_with_tools_counts_on_its_worker(directory, engines):
    async with serving(*engines, directory=directory, policies=least(directory)) as policy:
        one, two = open_session(policy, "one"), open_session(policy, "two")
        await one.chat([USER])
        assert {one.route.worker, two.route.worker} == set(policy.table.workers)
        left = two.route.worker
        await two.close()
        assert open_session(policy, "three").route.worker == left


async def test_policies_see_how_many_requests_wait_at_each_rank(directory, renderer):
    engine = FakeEngine(says(renderer, "x"), dp_size=2, slots=1)
    engine.hold()
    async with serving(engine, directory=directory, policies=least(directory)) as policy:
        calls = [asyncio.ensure_future(open_session(policy, f"s{n}").chat([USER])) for n in range(5)]
        await engine.until(lambda: engine.running == 5)
        await policy.fleet.health.ask_loads()
        assert sum(policy.table.load(entry).queued for entry in policy.table) == 4
        await engine.release()
        await asyncio.gather(*calls)
        await policy.fleet.health.ask_loads()
        assert [policy.table.load(entry).queued for entry in policy.table] == [0, 0]


async def test_an_engine_that_tells_no_load_is_not_asked_again(directory, engines):
    async with serving(engines[0], directory=directory) as policy:
        for path in ("/v1/loads", "/get_load"):
            engines[0].fail(path, 404, times=1)
        await policy.fleet.health.ask_loads()
        await policy.fleet.health.ask_loads()
        assert [policy.table.load(entry).queued for entry in policy.table] == [None]


# -- choosing with the prompt


class Prompts(RouterPolicy):
    """Notes the prompts that it sees and when; picks the first worker."""

    needs_prefix = True

    def __init__(self, *keys):
        super().__init__(*keys)
        self.seen, self.again = [], False

    @property
    def each_turn(self):
        return self.again

    def pick(self, request, workers):
        self.seen.append(list(request.prefix_ids))
        return workers[0].worker if workers else None


async def test_a_policy_that_looks_at_prompts_chooses_at_the_first_turn(directory, renderer, engines):
    prompts = Prompts(Config(), build_context(directory))
    async with serving(*engines, directory=directory, policies=[prompts]) as policy:
        session = open_session(policy)
        assert session.route.worker is None
        reply = await session.chat([USER])
        await session.chat([USER, reply.message, NEXT])
        assert prompts.seen == [renderer.first([USER])]
        prompts.again = True
        await session.chat([USER, reply.message, NEXT])
        assert len(prompts.seen) == 2
        assert prompts.seen[1][: len(prompts.seen[0])] == prompts.seen[0]


# -- health


async def test_three_probes_that_fail_take_a_worker_out_and_two_that_go_well_bring_it_back(
    directory, engines
):
    ill, well = engines
    async with serving(*engines, directory=directory) as policy:
        steps = [(False, True)] * 2 + [(True, True)] + [(False, True)] * 2 + [(False, False)]
        steps += [(True, False), (False, False), (True, False), (True, True)]
        for healthy, still in steps:
            ill.healthy = healthy
            await policy.fleet.health.probe()
            assert (ill.worker in offered(policy)) == still
            assert well.worker in offered(policy)


async def test_engines_are_probed_in_the_background_also_when_nobody_asks(directory, engines):
    slept, going = [], asyncio.Event()

    async def sleep(seconds):
        slept.append(seconds)
        await (going.wait() if len(slept) < 12 else asyncio.Event().wait())
        await asyncio.sleep(0)

    limits = Limits(health_interval=7.0, load_interval=3.0)
    async with serving(*engines, directory=directory, limits=limits, sleep=sleep) as policy:
        policy.fleet.start()
        policy.fleet.start()
        engines[0].healthy = False
        going.set()
        while engines[0].worker in offered(policy):
            await asyncio.sleep(0.001)
        assert set(slept) == {7.0, 3.0}


async def test_no_engine_is_probed_during_a_weight_update(directory, engines):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        if slept.count(1.0) > 1 or seconds != 1.0:
            await asyncio.Event().wait()

    limits = Limits(health_interval=1.0)
    async with serving(engines[0], directory=directory, limits=limits, sleep=sleep) as policy:
        policy.pause()
        engines[0].healthy = False
        policy.fleet.start()
        while slept.count(1.0) < 2:
            await asyncio.sleep(0.001)
        assert [entry.down for entry in policy.table] == [0]


async def test_a_watch_that_breaks_is_told(directory, engines, caplog):
    async def sleep(seconds):
        raise RuntimeError("no sleep")

    async with serving(engines[0], directory=directory, sleep=sleep) as policy:
        policy.fleet.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "the engines are not probed any more: no sleep" in caplog.text


async def test_all_who_wait_for_a_worker_share_one_probe_of_it(directory, engines):
    async with serving(engines[0], directory=directory) as policy:
        policy.set_version(1, failed={engines[0].worker})
        await asyncio.gather(*(policy.check_health() for _ in range(20)))
        assert [entry.up for entry in policy.table] == [1]
        assert offered(policy) == [], "twenty that ask at once are no twenty probes in a row"


async def test_an_engine_that_fails_a_request_and_a_probe_is_out_with_all_its_ranks(directory, renderer):
    engines = [FakeEngine(says(renderer, "x"), dp_size=8), FakeEngine(says(renderer, "y"))]
    async with serving(*engines, directory=directory, limits=FAST) as policy:
        well = engines[1].worker
        policy.fleet.set_draining(well)
        session = open_session(policy)
        policy.fleet.set_draining(well, False)
        engines[0].fail("/generate", 500, times=99)
        engines[0].healthy = False
        assert (await session.chat([USER])).message["content"] == "y"
        assert offered(policy) == [well]
        assert len(engines[0].requests) == 1


async def test_ranks_of_an_engine_share_its_probes(directory, renderer):
    engine = FakeEngine(says(renderer, "x"), dp_size=4)
    async with serving(engine, directory=directory) as policy:
        engine.fail("/health", 503, times=3)
        for _ in range(3):
            await policy.fleet.health.probe()
        assert offered(policy) == []
        await policy.fleet.health.probe()
        await policy.fleet.health.probe()
        assert len(offered(policy)) == 4


# -- the breaker


def test_the_breaker_opens_on_faults_in_a_row_and_closes_by_one_request_that_is_answered():
    now = [0.0]
    breaker = Breaker(faults=3, seconds=10.0, now=lambda: now[0])

    def fail():
        breaker.failed(breaker.sent())

    fail(), fail()
    breaker.answered()
    fail(), fail()
    assert breaker.lets_through
    fail()
    assert (breaker.lets_through, breaker.openings) == (False, 1)
    now[0] = 9.9
    assert not breaker.lets_through
    now[0] = 10.0
    assert breaker.lets_through
    assert breaker.sent()
    assert not breaker.lets_through, "one request tries, not all"
    breaker.failed(trying=True)
    assert (breaker.lets_through, breaker.openings) == (False, 2)
    now[0] = 20.0
    breaker.dropped(breaker.sent())
    assert breaker.lets_through, "a request that was cancelled told nothing"
    breaker.sent()
    breaker.answered()
    assert breaker.lets_through
    assert not breaker.open


def test_a_request_that_tries_for_long_lets_others_through():
    now = [0.0]
    breaker = Breaker(faults=1, seconds=10.0, now=lambda: now[0])
    breaker.failed(breaker.sent())
    now[0] = 10.0
    tries = breaker.sent()
    now[0] = 19.9
    assert not breaker.lets_through
    now[0] = 20.0
    assert breaker.lets_through, "a long reply is no fault"
    other = breaker.sent()
    breaker.failed(other)
    assert (breaker.lets_through, breaker.openings) == (True, 1)
    breaker.failed(tries)
    assert (breaker.lets_through, breaker.openings) == (False, 2)


def test_what_was_sent_before_it_opened_does_not_keep_it_open():
    now = [0.0]
    breaker = Breaker(faults=1, seconds=10.0, now=lambda: now[0])
    early = breaker.sent()
    breaker.failed(breaker.sent())
    now[0] = 9.0
    breaker.failed(early)
    now[0] = 10.0
    assert breaker.lets_through


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (EngineError("no answer", kind="retryable"), True),
        (EngineError("outside the protocol", kind="infrastructure"), True),
        (EngineError("500", kind="retryable", status=500), True),
        (EngineError("501", kind="infrastructure", status=501), True),
        (EngineError("400", kind="user", status=400), False),
        (EngineError("429", kind="retryable", status=429), False),
        (EngineError("408", kind="retryable", status=408), False),
        (EngineError("503", kind="retryable", status=503), False),
    ],
    ids=str,
)
def test_only_the_servers_own_faults_count(error, fault):
    assert is_fault(error) == fault


async def test_ten_bad_requests_leave_the_breaker_closed_and_ten_faults_open_it(directory, engines):
    now = [0.0]
    limits = Limits(backoff=0.001, breaker_faults=10, breaker_seconds=60.0)
    one, two = engines
    async with serving(*engines, directory=directory, limits=limits, now=lambda: now[0]) as policy:
        session = open_session(policy, turns=99)
        bad = one if session.route.worker == one.worker else two
        entry = policy.table.get(bad.worker)
        bad.fail("/generate", 400, times=10)
        for _ in range(10):
            with pytest.raises(EngineError, match="400"):
                await session.chat([USER])
        assert not entry.breaker.open
        bad.fail("/generate", 500, times=11)
        for number in range(10):
            await open_session(policy, f"s{number}").chat([USER])  # answered by the other one
        assert entry.breaker.open
        assert bad.worker not in offered(policy)
        assert entry.healthy, "its health says that it is well"
        now[0] = 60.0
        assert bad.worker in offered(policy)
        await open_session(policy, "trial").chat([USER])
        assert (entry.breaker.open, entry.breaker.openings) == (True, 2)
        now[0] = 120.0
        await open_session(policy, "again").chat([USER])
        assert not entry.breaker.open


# -- retries


async def test_an_answer_of_503_is_asked_again_after_a_pause_and_a_400_is_not(directory, engines):
    pauses = []

    async def sleep(seconds):
        if seconds >= 5:
            await asyncio.Event().wait()
        pauses.append(seconds)

    limits = Limits(backoff=0.5)
    async with serving(engines[0], directory=directory, limits=limits, sleep=sleep) as policy:
        engines[0].fail("/generate", 503, times=2)
        session = open_session(policy)
        await session.chat([USER])
        assert len(engines[0].requests) == 3
        assert 0.4 <= pauses[0] <= 0.6
        assert 0.8 <= pauses[1] <= 1.2
        engines[0].fail("/generate", 400)
        with pytest.raises(EngineError, match="400"):
            await session.chat([USER])
        assert len(engines[0].requests) == 4


async def test_a_request_that_got_no_answer_is_aborted_before_it_is_asked_elsewhere(directory, engines):
    async with serving(*engines, directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        first = next(engine for engine in engines if engine.worker == session.route.worker)
        first.fail("/generate", 0)
        await session.chat([USER])
        await policy.close()
        aborted = [body["rid"] for name, body in first.control if name == "abort_request"]
        assert aborted == [first.requests[0]["rid"]]


async def test_a_request_that_was_answered_with_an_error_is_not_aborted(directory, engines):
    async with serving(*engines, directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        first = next(engine for engine in engines if engine.worker == session.route.worker)
        first.fail("/generate", 500)
        await session.chat([USER])
        await policy.close()
        assert [name for name, _ in first.control if name == "abort_request"] == []


async def test_a_request_that_waited_for_a_worker_waits_for_a_weight_update_that_has_begun_meanwhile(
    directory, renderer
):
    engine = FakeEngine(says(renderer, "x"))

    async def sleep(seconds):
        if seconds >= 1:
            await asyncio.Event().wait()
        policy.pause(2)

    async with serving(engine, directory=directory, limits=FAST, sleep=sleep) as policy:
        engine.fail("/generate", 503)
        call = asyncio.ensure_future(open_session(policy).chat([USER]))
        while not policy._gate.paused:
            await asyncio.sleep(0.001)
        await asyncio.wait({call}, timeout=0.05)
        assert len(engine.requests) == 1, "what is sent now names the cache of the old weights"
        policy.set_version(2)
        policy.resume()
        await call
        assert engine.requests[1]["extra_key"] == "weight-version:2"


async def test_an_engine_that_does_not_start_anew_is_no_reason_to_give_up_the_others(directory, engines):
    asked = []

    async def revive(worker):
        asked.append(worker)
        if worker == min(engine.worker for engine in engines):
            raise EngineError("it does not start")
        for engine in engines:
            engine.healthy = engine.worker == worker
        return True

    async with serving(*engines, directory=directory, limits=FAST, revive=revive) as policy:
        for engine in engines:
            engine.healthy = False
        policy.set_version(1, failed=set(policy.table.workers))
        session = open_session(policy)
        assert (await session.chat([USER])).message["content"] == "x"
        assert asked == policy.table.workers


async def test_an_engine_that_does_not_start_anew_fails_no_turn_that_another_will_serve(directory, engines):
    async def revive(worker):
        raise EngineError("it does not start")

    limits = Limits(backoff=0.001, no_worker=60.0, breaker_faults=1, breaker_seconds=0.05)
    async with serving(*engines, directory=directory, limits=limits, revive=revive) as policy:
        engines[0].healthy = False
        policy.set_version(1, failed={engines[0].worker})
        engines[1].fail("/generate", 500)
        assert (await open_session(policy).chat([USER])).message["content"] == "x"


# -- joining, draining, leaving


async def test_a_worker_that_joins_with_version_default_gets_nothing_until_it_serves_the_current_one(
    directory, renderer, engines
):
    async with (
        FakeEngine(says(renderer, "new"), version="default") as new,
        serving(engines[0], directory=directory, policies=least(directory)) as policy,
    ):
        open_session(policy, "old")
        policy.fleet.add([new.worker])
        for _ in range(4):
            await policy.fleet.health.probe()
            assert offered(policy) == [engines[0].worker]
        new.version = 7
        await policy.fleet.health.probe()
        assert new.worker not in offered(policy)
        new.version = 1
        await policy.fleet.health.probe()
        await policy.fleet.health.probe()
        assert new.worker in offered(policy)
        assert (await open_session(policy, "s").chat([USER])).message["content"] == "new"


class JoinsAmidUpdate(EngineClient):
    """Has `joins` called when an engine loads weights."""

    joins = None

    async def update_weights_from_disk(self, worker, path, version):
        self.joins()
        await super().update_weights_from_disk(worker, path, version)


async def test_a_worker_that_joins_amid_a_weight_update_gets_nothing_until_it_has_the_weights(
    directory, renderer, engines, tmp_path
):
    client = JoinsAmidUpdate()
    async with (
        FakeEngine(says(renderer, "new")) as new,
        serving(engines[0], directory=directory, client=client) as policy,
    ):
        client.joins = lambda: policy.fleet.add([new.worker], version=1)
        assert await policy.update_weights(tmp_path, 2) == {}
        assert offered(policy) == [engines[0].worker]
        new.version = 2
        await policy.fleet.health.probe()
        await policy.fleet.health.probe()
        assert new.worker in offered(policy)


async def test_a_worker_that_leaves_finishes_what_is_under_way_and_gets_no_more(directory, renderer):
    engines = [FakeEngine(says(renderer, "x"), dp_size=2), FakeEngine(says(renderer, "y"))]
    engines[0].hold(1)
    async with serving(*engines, directory=directory, policies=least(directory)) as policy:
        policy.fleet.set_draining(engines[1].worker)
        session = open_session(policy)
        policy.fleet.set_draining(engines[1].worker, False)
        assert session.route.worker == Worker(engines[0].url, 0)
        call = asyncio.ensure_future(session.chat([USER]))
        await engines[0].until(lambda: engines[0].running == 1)
        policy.fleet.remove(Worker(engines[0].url))
        assert policy.table.workers == [engines[1].worker], "an engine leaves with all its ranks"
        other = await open_session(policy, "t").chat([USER])
        assert other.message["content"] == "y"
        await engines[0].release()
        reply = await call
        assert reply.message["content"] == "x"
        await session.chat([USER, reply.message, NEXT])
        assert session.route.worker == engines[1].worker
        assert policy.table.local_loads() == {engines[1].worker: (2, 0)}


async def test_a_turn_that_gets_no_worker_says_what_holds_each_back(directory, renderer):
    ill, well = FakeEngine(says(renderer, "x")), FakeEngine(says(renderer, "x"), dp_size=5)
    ill.healthy = False
    async with serving(ill, well, directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        policy.table.get(ill.worker).healthy = False
        drains, behind, *broken = policy.table.of(well.url)
        drains.draining, behind.version = True, 0
        for entry in broken:
            for _ in range(10):
                entry.breaker.failed(False)
        with pytest.raises(EngineError) as caught:
            await session.chat([USER])
    assert ("none of the 6 engine workers takes requests: ") in (said := str(caught.value))
    for reason in ("1 not healthy", "1 draining", "1 not at weight version 1", "3 with an open circuit br"):
        assert reason in said


async def test_a_worker_that_comes_back_starts_with_no_sessions_of_its_former_life(directory, engines):
    async with serving(*engines, directory=directory, policies=least(directory)) as policy:
        session = open_session(policy)
        worker = session.route.worker
        policy.fleet.remove(worker)
        policy.fleet.add([worker], version=1)
        assert policy.table.local_loads()[worker] == (0, 0)
        await session.chat([USER])
        assert sum(count for count, _ in policy.table.local_loads().values()) == 1
        await session.close()
        assert {count for count, _ in policy.table.local_loads().values()} == {0}


async def test_draining_waits_for_what_is_under_way_and_not_for_ever(directory, engines):
    engine = engines[0]
    engine.hold(1)
    async with serving(*engines, directory=directory) as policy:
        session = open_session(policy)
        assert session.route.worker in (engines[0].worker, engines[1].worker)
        policy.fleet.set_draining(engines[1].worker)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        policy.fleet.set_draining(engine.worker)
        assert not await policy.fleet.idle(0.01, engine.worker)
        waiting = asyncio.ensure_future(policy.fleet.idle(60, engine.worker))
        await engine.release()
        assert await waiting
        await call
        assert offered(policy) == []


async def test_a_weight_update_drains_what_is_under_way_where_it_is_asked_to(directory, renderer, tmp_path):
    engine = FakeEngine(says(renderer, "abc"))
    engine.hold(2)
    async with serving(engine, directory=directory, limits=Limits(drain=60.0)) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        update = asyncio.ensure_future(policy.update_weights(tmp_path, 2))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(open_session(policy, "later").chat([USER]))
        await asyncio.sleep(0.01)
        assert engine.control == []
        assert len(engine.requests) == 1, "new requests wait"
        await engine.release()
        await call
        assert await update == {}
        (leaf,) = session.leaves()
        assert leaf.spans[:, 2:].tolist() == [[1, 1]]
        await later


async def test_a_weight_update_does_not_wait_longer_than_it_may(directory, renderer, tmp_path):
    engine = FakeEngine(says(renderer, "abc"))
    engine.hold(2)
    async with serving(engine, directory=directory, limits=Limits(drain=0.01)) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        assert await policy.update_weights(tmp_path, 2) == {}
        await engine.release()
        await call
        assert session.leaves()[0].spans[-1, 3] == 2


class FleetLife(RuleBasedStateMachine):
    """Sessions and workers come and go in a table: counts always add up, and only the able are offered."""

    @initialize()
    def begin(self):
        self.table = WorkerTable(lambda: Breaker(faults=1, seconds=1e9))
        self.table.set_workers(WORKERS, 1)
        self.held = []

    @rule(worker=st.sampled_from(WORKERS))
    def open(self, worker):
        if (entry := self.table.get(worker)) is not None:
            sending = entry.sending(10)
            sending.__enter__()
            self.held.append((entry, sending))

    @rule(number=st.integers(0, 9), status=st.sampled_from([200, 400, 500]))
    def end(self, number, status):
        if not self.held:
            return
        _, sending = self.held.pop(number % len(self.held))
        error = EngineError("no", kind="user" if status == 400 else "retryable", status=status)
        ended = (None, None, None) if status == 200 else (EngineError, error, None)
        assert not sending.__exit__(*ended), "it swallows nothing"

    @rule(workers=st.sets(st.sampled_from(WORKERS)))
    def remove(self, workers):
        self.table.remove(workers)

    @rule(workers=st.lists(st.sampled_from(WORKERS)), version=st.integers(0, 3))
    def add(self, workers, version):
        self.table.add(workers, version)

    @rule(version=st.integers(1, 3), failed=st.sets(st.sampled_from(WORKERS)))
    def update(self, version, failed):
        self.table.set_version(version, failed)

    @invariant()
    def counts_add_up(self):
        for entry in self.table:
            own = [each for each, _ in self.held if each is entry]
            assert (entry.requests, entry.tokens_in_flight) == (len(own), 10 * len(own))

    @invariant()
    def only_the_able_are_offered(self):
        for entry in self.table.offered():
            assert entry.healthy
            assert not entry.breaker.open
            assert entry.version == self.table.version


TestFleetLife = FleetLife.TestCase
TestFleetLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# -- figures


async def test_the_figures_tell_how_even_the_routing_is_and_how_often_sessions_stay(directory, engines):
    async with serving(*engines, directory=directory, policies=least(directory), limits=FAST) as policy:
        first, second = open_session(policy, "first"), open_session(policy, "second")
        reply = await first.chat([USER])
        await second.chat([USER])
        history = [USER, reply.message, NEXT]
        reply = await first.chat(history)
        figures = policy.fleet.stats.take()
        assert unlisted(figures) == set()
        assert figures["router/stickiness"] == 1.0
        assert figures["router/session_imbalance"] == 1.0
        assert figures["router/retries"] == 0
        assert figures["router/tokens_in_flight/0"] == figures["router/tokens_in_flight/1"] == 0
        policy.fleet.set_draining(first.route.worker)
        await first.chat([*history, reply.message, NEXT])
        figures = policy.fleet.stats.take()
        assert figures["router/stickiness"] == 0.0
        assert figures["router/offered"] == 1
        assert policy.fleet.stats.take().get("router/stickiness") is None


async def test_the_figures_count_retries_and_breaker_openings(directory, engines):
    limits = Limits(backoff=0.001, breaker_faults=1)
    async with serving(*engines, directory=directory, limits=limits) as policy:
        session = open_session(policy)
        first = next(engine for engine in engines if engine.worker == session.route.worker)
        first.fail("/generate", 500)
        await session.chat([USER])
        figures = policy.fleet.stats.take()
        assert (figures["router/retries"], figures["router/breaker_openings"]) == (1, 1)
        figures = policy.fleet.stats.take()
        assert (figures["router/retries"], figures["router/breaker_openings"]) == (0, 0)


async def test_the_openings_of_a_breaker_count_once_also_when_its_worker_leaves(directory, engines):
    async with serving(*engines, directory=directory) as policy:
        for entry in policy.table:
            entry.breaker.openings = 2
        assert policy.fleet.stats.take()["router/breaker_openings"] == 4
        policy.fleet.remove(engines[0].worker)
        policy.table.get(engines[1].worker).breaker.openings += 1
        assert policy.fleet.stats.take()["router/breaker_openings"] == 1


# -- ranks


async def test_an_engine_of_four_ranks_becomes_four_workers(renderer):
    async with FakeEngine(dp_size=4) as engine, FakeEngine() as single:
        client = EngineClient()
        workers = await expand(client, [engine.worker, single.worker])
        assert workers == [*(Worker(engine.url, rank) for rank in range(4)), single.worker]
        assert await expand(client, workers) == workers
        assert await expand(client, [engine.worker], "off") == [engine.worker]
        with pytest.raises(EngineError, match=r"router\.dp_aware is on, but .* has one data-parallel rank"):
            await expand(client, [engine.worker, single.worker], "on")
        single.fail("/server_info", 404)
        single.fail("/get_server_info", 404)
        assert await expand(client, [single.worker]) == [single.worker]
        single.fail("/server_info", 500)
        with pytest.raises(EngineError, match="500"):
            await expand(client, [single.worker])
        await client.aclose()


@pytest.mark.parametrize(
    ("release", "field"),
    [("0.5.9", "data_parallel_rank"), ("0.5.10", "routed_dp_rank"), ("0.5.23", "routed_dp_rank")],
)
async def test_the_chosen_rank_is_in_the_body_under_the_name_of_the_release(
    directory, renderer, release, field
):
    engine = FakeEngine(says(renderer, "x"), dp_size=3, sglang=release)
    async with serving(engine, directory=directory, policies=least(directory)) as policy:
        sessions = [open_session(policy, f"s{n}") for n in range(3)]
        await asyncio.gather(*(session.chat([USER]) for session in sessions))
    assert sorted(body[field] for body in engine.requests) == [0, 1, 2]
    assert all(len({"data_parallel_rank", "routed_dp_rank"} & set(body)) == 1 for body in engine.requests)


async def test_an_engine_that_is_out_at_a_weight_update_is_asked_whether_it_is_well_again(
    directory, engines, tmp_path
):
    ill, well = engines
    async with serving(*engines, directory=directory) as policy:
        policy.table.get(ill.worker).healthy = policy.table.get(well.worker).healthy = False
        ill.fail("/health", 503)
        assert await policy.update_weights(tmp_path, 2) == {
            ill.worker: "it was out of the routing and is not healthy"
        }
        assert (ill.control, ill.version, well.version) == ([], 1, 2)
        assert offered(policy) == [well.worker]
