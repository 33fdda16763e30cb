"""The sandbox pool: throttle, retries, leases before requests, and nothing left behind whatever happens."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.errors import BudgetExceeded, RunError, SandboxDead, SandboxError
from rollhook.sandbox.backend import RawSandbox, SandboxSpec
from rollhook.sandbox.deletions import PoolTimes
from rollhook.sandbox.lease import Lease
from rollhook.sandbox.pool import SandboxPool
from rollhook.testing.scripted import (
    FakeTime,
    ListJournal,
    NeedyRaw,
    ScriptedBackend,
    ThrottledError,
    settle,
)

SPEC = SandboxSpec(lifetime_seconds=100.0)


class Adopting(ScriptedBackend):
    """One that attaches to what it made, unless `adopt_error` is set."""

    capabilities = frozenset({"adopt"})
    adopt_error: Exception | None = None

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> RawSandbox:
        if self.adopt_error is not None:
            raise self.adopt_error
        return self.live[sandbox_id]


class FaultyRaw(NeedyRaw):
    """One whose touches fail as `errors` says."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self.errors: list[Exception] = []

    async def touch(self) -> None:
        await super().touch()
        if self.errors:
            raise self.errors.pop(0)


class Priced(ScriptedBackend):
    """One whose price is known for sandboxes of known size."""

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        return spec.cpus


class Bench:
    """A pool with everything around it scripted."""

    def __init__(self, *, backend: Any = None, **options: Any) -> None:
        self.backend: Any = backend or ScriptedBackend()
        self.journal = ListJournal()
        self.time = FakeTime()
        options.setdefault("sleep", self.time.sleep)
        self.pool = SandboxPool(
            self.backend,
            run_id="demo",
            attempt=2,
            journal=self.journal,
            clock=self.time.clock,
            wall=lambda: 5000.0,
            rng=random.Random(1),
            **options,
        )

    def start(self, episode: str = "e1", spec: SandboxSpec = SPEC) -> asyncio.Task[Any]:
        return asyncio.create_task(self.pool.acquire(spec, episode_id=episode, timeout=None))

    async def close(self) -> None:
        """Close the pool; nothing is left, and every lease that was opened is released."""
        await self.pool.aclose()
        assert self.backend.live == {}
        opened = [data["nonce"] for event, data in self.journal.entries if event == "lease"]
        released = [data["nonce"] for event, data in self.journal.entries if event == "lease_released"]
        assert sorted(opened) == sorted(released)


def fail(error: Exception) -> Callable[[SandboxSpec], None]:
    def step(spec: SandboxSpec) -> None:
        raise error

    return step


def hold(gate: asyncio.Event) -> Callable[[SandboxSpec], Awaitable[object]]:
    return lambda spec: gate.wait()


async def test_a_sandbox_is_made_leased_and_deleted() -> None:
    bench = Bench()
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1", box="main", timeout=9.0)
    lease = Lease.from_labels(bench.backend.specs[0].labels)
    assert lease is not None
    assert (lease.run_id, lease.attempt, lease.episode, lease.box) == ("demo", 2, "e1", "main")
    assert lease.expiry == 5000.0 + 100.0 + 300.0
    assert bench.pool.stats()["sandbox/live"] == 1
    await bench.pool.release(sandbox)
    await bench.pool.release(sandbox)
    assert bench.backend.deleted == [sandbox.id]
    assert bench.journal.events(lease.nonce) == ["lease", "lease_created", "lease_released"]
    await bench.close()


async def test_the_lease_is_durable_before_the_request() -> None:
    bench = Bench()
    bench.journal.gate = asyncio.Event()
    task = bench.start()
    await settle()
    assert bench.journal.events() == ["lease"]
    assert bench.backend.specs == []
    bench.journal.gate.set()
    await task
    assert len(bench.backend.specs) == 1
    await bench.close()


async def test_a_lease_that_cannot_be_written_asks_for_nothing() -> None:
    bench = Bench()
    bench.journal.error = RunError("no space is left on the device")
    with pytest.raises(RunError, match="no space"):
        await bench.pool.acquire(SPEC, episode_id="e1")
    assert bench.backend.specs == []
    await bench.pool.aclose()


async def test_creates_are_throttled() -> None:
    bench = Bench(create_concurrency=3)
    gates = [asyncio.Event() for _ in range(10)]
    bench.backend.plan = [hold(gate) for gate in gates]
    tasks = [bench.start(f"e{number}") for number in range(10)]
    for gate in gates:
        await settle()
        assert bench.backend.under_way <= 3
        gate.set()
    await asyncio.gather(*tasks)
    assert bench.backend.most_under_way == 3
    await bench.close()


async def test_one_that_waits_to_try_again_holds_no_place() -> None:
    resume = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await resume.wait()

    bench = Bench(create_concurrency=1, sleep=sleep)
    bench.backend.plan = [fail(ThrottledError("slow down"))]
    first = bench.start("e1")
    await settle()
    second = bench.start("e2")
    await second
    assert not first.done()
    resume.set()
    await first
    await bench.close()


async def test_what_the_backend_calls_retryable_is_tried_again_with_jitter() -> None:
    bench = Bench(create_retries=3)
    asked = ThrottledError("slow down")
    asked.retry_after = 17.0
    bench.backend.plan = [fail(ThrottledError("slow down")), fail(ThrottledError("again")), fail(asked)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert 0.25 <= bench.time.slept[0] <= 0.5 <= bench.time.slept[1] <= 1.0
    assert bench.time.slept[2] == 17.0
    assert bench.pool.stats()["sandbox/create_retries"] == 3
    assert len({spec.labels["rollhook.nonce"] for spec in bench.backend.specs}) == 1
    await bench.pool.release(sandbox)
    await bench.close()


async def test_tries_are_bounded_and_the_error_says_how_many() -> None:
    bench = Bench(create_retries=2)
    bench.backend.plan = [fail(ThrottledError("slow down"))] * 3
    with pytest.raises(SandboxError, match="no sandbox after 3 tries: ThrottledError: slow down"):
        await bench.pool.acquire(SPEC, episode_id="e1")
    assert bench.pool.stats()["sandbox/create_failures"] == 1
    await bench.close()


@pytest.mark.parametrize("error", [SandboxError("no such image", kind="user"), OSError("boom")])
async def test_other_errors_are_not_tried_again(error: Exception) -> None:
    bench = Bench()
    bench.backend.plan = [fail(error)]
    with pytest.raises(SandboxError, match=r"no such image|OSError: boom"):
        await bench.pool.acquire(SPEC, episode_id="e1")
    assert len(bench.backend.specs) == 1
    await bench.close()


def made_and_lost(bench: Bench) -> Callable[[SandboxSpec], None]:
    """The reply was lost: the provider has made a sandbox that nobody has the id of."""

    def step(spec: SandboxSpec) -> None:
        bench.backend.make(spec)
        raise ThrottledError("connection reset")

    return step


async def test_what_a_failed_create_left_behind_is_swept() -> None:
    bench = Bench()
    bench.backend.plan = [made_and_lost(bench)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert len(bench.backend.live) == 2
    await bench.pool.release(sandbox)
    assert bench.backend.live == {}
    bench.backend.plan = [made_and_lost(bench)] * 9
    with pytest.raises(SandboxError):
        await bench.pool.acquire(SPEC, episode_id="e2")
    await bench.close()


async def test_a_sandbox_whose_reply_was_lost_is_adopted() -> None:
    bench = Bench(backend=Adopting())
    bench.backend.plan = [made_and_lost(bench)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert list(bench.backend.live) == [sandbox.id]
    assert len(bench.backend.specs) == 1, "it was not asked for again"
    assert bench.time.slept == []
    stats = bench.pool.stats()
    assert (stats["sandbox/adopted"], stats["sandbox/creates"], stats["sandbox/create_retries"]) == (1, 1, 0)
    (created,) = [data for event, data in bench.journal.entries if event == "lease_created"]
    assert created["sandbox_id"] == sandbox.id
    await bench.close()


async def test_a_list_that_lags_is_asked_again_before_the_next_try() -> None:
    bench = Bench(backend=Adopting())
    bench.backend.lag = 1
    bench.backend.plan = [made_and_lost(bench)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert list(bench.backend.live) == [sandbox.id]
    assert (len(bench.backend.specs), len(bench.time.slept)) == (1, 1)
    await bench.close()


async def test_one_that_is_found_too_late_to_adopt_is_deleted() -> None:
    bench = Bench(backend=Adopting())
    bench.backend.lag = 2
    bench.backend.plan = [made_and_lost(bench)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert len(bench.backend.live) == 2
    await bench.pool.release(sandbox)
    assert bench.backend.live == {}
    await bench.close()


async def test_one_that_cannot_be_adopted_is_deleted_in_the_end() -> None:
    bench = Bench(backend=Adopting())
    bench.backend.adopt_error = SandboxDead("it does not start")
    bench.backend.plan = [made_and_lost(bench)]
    await bench.pool.acquire(SPEC, episode_id="e1")
    assert len(bench.backend.live) == 2
    await bench.close()


async def test_a_refusal_is_not_looked_for() -> None:
    """A provider that says when to come again has made nothing; under a rate limit a list costs too."""
    bench = Bench(backend=Adopting())
    refused = ThrottledError("slow down")
    refused.retry_after = 1.0
    bench.backend.plan = [fail(refused)]
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    await bench.pool.release(sandbox)
    assert bench.backend.lists == 0
    await bench.close()


async def test_what_a_lost_create_made_is_deleted_though_the_list_lags() -> None:
    bench = Bench(create_retries=0)
    bench.backend.lag = 1
    bench.backend.plan = [made_and_lost(bench)]
    with pytest.raises(SandboxError):
        await bench.pool.acquire(SPEC, episode_id="e1")
    await bench.close()
    assert bench.time.slept == [5.0]


async def test_cancelled_while_creating_the_sandbox_is_deleted_once_it_is_there() -> None:
    bench = Bench(create_concurrency=1)
    gate = asyncio.Event()
    bench.backend.plan = [hold(gate)]
    task = bench.start()
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.backend.under_way == 1
    other = bench.start("e2")
    await settle()
    assert bench.backend.under_way == 1, "an abandoned create keeps its place in the throttle"
    gate.set()
    await other
    await settle()
    assert len(bench.backend.live) == 1
    assert len(bench.backend.deleted) == 1
    await bench.close()


@settings(max_examples=60, deadline=None)
@given(turns=st.integers(0, 12), failures=st.integers(0, 2), warm=st.integers(0, 1))
async def test_cancelled_at_any_moment_nothing_is_left(turns: int, failures: int, warm: int) -> None:
    bench = Bench(warm=warm)
    if warm:
        bench.pool.prepare(SPEC)
        await settle()
    bench.backend.plan = [fail(ThrottledError("slow down"))] * failures
    task = bench.start()
    await settle(turns)
    task.cancel()
    done = (await asyncio.gather(task, return_exceptions=True))[0]
    await settle(60)
    if isinstance(done, asyncio.CancelledError) and not warm:
        assert bench.backend.live == {}
    await bench.close()


async def test_a_deadline_names_the_budget_node_and_leaves_nothing() -> None:
    bench = Bench()
    gate = asyncio.Event()
    bench.backend.plan = [hold(gate)]
    with pytest.raises(BudgetExceeded, match=r"no sandbox for episode e1 within 0\.01 s") as caught:
        await bench.pool.acquire(SPEC, episode_id="e1", timeout=0.01)
    assert caught.value.node == "create"
    gate.set()
    await bench.close()


async def test_an_abandoned_create_is_itself_given_up_in_the_end() -> None:
    bench = Bench(times=PoolTimes(abandoned_create=0.01))
    bench.backend.plan = [hold(asyncio.Event())]
    task = bench.start()
    await settle()
    task.cancel()
    await bench.close()
    assert task.done()
    assert bench.backend.under_way == 0


async def test_a_backend_that_cancels_itself_is_an_error_and_no_cancellation() -> None:
    """One vendor's SDK cancels the task that calls it; the episode must not look cancelled for it."""
    bench = Bench()

    def cancel_caller(spec: SandboxSpec) -> None:
        bench.backend.make(spec)
        raise asyncio.CancelledError

    bench.backend.plan = [cancel_caller]
    with pytest.raises(SandboxError, match="the backend gave up by itself"):
        await bench.pool.acquire(SPEC, episode_id="e1")
    await bench.close()


async def test_releasing_is_retried_in_the_background() -> None:
    bench = Bench()
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    bench.backend.delete_errors = [OSError("unreachable"), OSError("unreachable")]
    await bench.pool.release(sandbox)
    await settle()
    assert bench.backend.live == {}
    assert bench.pool.stats()["sandbox/delete_retries"] == 2
    await bench.close()


async def test_release_cancelled_still_deletes() -> None:
    bench = Bench()
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    task = asyncio.create_task(bench.pool.release(sandbox))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert bench.backend.live == {}
    await bench.close()


async def test_a_sandbox_that_cannot_be_deleted_is_reported_loudly(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    bench.backend.delete_errors = [OSError("unreachable") for _ in range(99)]
    await bench.pool.release(sandbox)
    await bench.pool.aclose()
    assert bench.pool.stats()["sandbox/leaked"] == 1
    assert bench.journal.events()[-1] == "lease_lost"
    (shout,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert f"sandbox {sandbox.id} of run demo could not be deleted for 120 s" in shout
    assert "`rollhook sandboxes reap demo`" in shout
    assert 120 <= bench.time.now - 1000.0 < 160


async def test_a_delete_that_hangs_is_given_up_and_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(times=PoolTimes(delete=0.01))
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")

    async def hangs(sandbox_id: str) -> None:
        await asyncio.Event().wait()

    bench.backend.delete = hangs
    await asyncio.wait_for(bench.pool.release(sandbox), 20)
    await asyncio.wait_for(bench.pool.aclose(), 20)
    assert "could not be deleted for 0.01 s (no answer within 0.01 s) and may still cost money" in caplog.text


async def test_a_sandbox_is_never_used_by_two_episodes() -> None:
    bench = Bench()
    ids = []
    for number in range(20):
        sandbox = await bench.pool.acquire(SPEC, episode_id=f"e{number}")
        ids.append(sandbox.id)
        await bench.pool.release(sandbox)
    assert len(set(ids)) == 20
    assert len(bench.backend.specs) == 20, "creates = episodes that needed one"
    await bench.close()


async def test_created_ahead_is_used_once_and_made_up_for() -> None:
    bench = Bench(warm=2)
    bench.pool.prepare(SPEC)
    await settle()
    ahead = set(bench.backend.live)
    assert len(ahead) == 2
    ids = []
    for number in range(6):
        sandbox = await bench.pool.acquire(SPEC, episode_id=f"e{number}")
        ids.append(sandbox.id)
        await settle()
        assert len(bench.backend.live) == 3
        await bench.pool.release(sandbox)
    assert set(ids[:2]) == ahead
    assert len(set(ids)) == 6
    assert len(bench.backend.specs) == 8, "six episodes and the two that wait"
    assigned = [data for event, data in bench.journal.entries if event == "lease_assigned"]
    assert [data["episode"] for data in assigned] == [f"e{number}" for number in range(6)]
    await bench.close()


async def test_created_ahead_serves_only_its_own_spec_while_it_is_fresh_and_alive() -> None:
    bench = Bench(warm=1)
    bench.pool.prepare(SPEC)
    await settle()
    assert bench.backend.specs[0].lifetime_seconds == 100.0 + 600.0
    other = await bench.pool.acquire(SandboxSpec(workdir="/elsewhere"), episode_id="e1")
    assert other.spec.workdir == "/elsewhere"
    (ahead,) = [raw for raw in bench.backend.live.values() if raw.id != other.id]
    ahead.dead = True
    fresh = await bench.pool.acquire(SPEC, episode_id="e2")
    assert fresh.id != ahead.id
    await settle()
    (ahead,) = [raw for raw in bench.backend.live.values() if raw.id not in (other.id, fresh.id)]
    bench.time.now += 601
    late = await bench.pool.acquire(SPEC, episode_id="e3")
    assert late.id != ahead.id
    await settle()
    assert ahead.id in bench.backend.deleted
    await bench.close()


async def test_a_failing_warm_up_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(warm=1)
    bench.backend.plan = [fail(SandboxError("no quota"))]
    bench.pool.prepare(SPEC)
    await settle()
    assert "a sandbox could not be created ahead: no quota" in caplog.text
    await bench.close()


async def test_a_warm_up_that_hangs_gives_its_place_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(warm=1, create_concurrency=1, times=PoolTimes(warm=0.01, abandoned_create=0.01))
    bench.backend.plan = [hold(asyncio.Event())]
    bench.pool.prepare(SPEC)
    await settle()
    await asyncio.wait_for(bench.start(), 20)
    assert "a sandbox could not be created ahead: it took more than 0.01 s" in caplog.text
    await bench.close()


async def test_sandboxes_that_need_it_are_kept_alive() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        assert seconds == 60.0
        await ticks.get()

    bench = Bench(sleep=sleep)
    bench.backend.raw = NeedyRaw
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    raw = bench.backend.live[sandbox.id]
    assert isinstance(raw, NeedyRaw)
    for tick in range(3):
        ticks.put_nowait(None)
        await settle()
        assert raw.touches == tick + 1
    await bench.pool.release(sandbox)
    ticks.put_nowait(None)
    await settle()
    assert raw.touches == 3
    await bench.close()


async def test_a_touch_that_fails_is_made_again_but_for_a_dead_sandbox() -> None:
    """Row 88: beats at an interval, on one task however many sandboxes, and an end to them."""
    ticks: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        await ticks.get()

    async def beat() -> None:
        ticks.put_nowait(None)
        await settle()

    bench = Bench(sleep=sleep)
    bench.backend.raw = FaultyRaw
    for number in range(3):
        await bench.pool.acquire(SPEC, episode_id=f"e{number}")
    unwell, dead, well = bench.backend.live.values()
    unwell.errors = [OSError("unreachable")] * 5
    dead.errors = [SandboxDead("it is gone")]
    for _ in range(6):
        await beat()
    assert (unwell.touches, dead.touches, well.touches) == (6, 1, 6)
    before = asyncio.all_tasks()
    assert sum(task.get_name() == "sandbox keepalive" for task in before) == 1
    await bench.close()
    assert not any(task.get_name() == "sandbox keepalive" for task in asyncio.all_tasks())


async def test_one_that_cannot_be_deleted_is_not_kept_alive() -> None:
    """Row 87: the reference's heartbeat keeps a sandbox alive whose close has failed."""
    ticks: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        if seconds == 60.0:
            await ticks.get()
        else:
            await asyncio.sleep(0)

    bench = Bench(sleep=sleep)
    bench.backend.raw = NeedyRaw
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    raw = bench.backend.live[sandbox.id]
    bench.backend.delete_errors = [OSError("unreachable")] * 2
    await bench.pool.release(sandbox)
    ticks.put_nowait(None)
    await settle()
    assert raw.touches == 0
    assert bench.backend.live == {}, "two failed closes are followed by a third"
    await bench.close()


async def test_cancelled_before_its_turn_nothing_is_asked_for_and_nothing_stays() -> None:
    """Row 86: one that waits for a place leaves neither a task nor a lease behind."""
    bench = Bench(create_concurrency=1)
    gate = asyncio.Event()
    bench.backend.plan = [hold(gate)]
    first = bench.start("e1")
    await settle()
    before = asyncio.all_tasks()
    waiting = [bench.start(f"w{number}") for number in range(5)]
    await settle()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await settle()
    assert asyncio.all_tasks() == before
    assert len(bench.backend.specs) == 1
    gate.set()
    await first
    await bench.close()


async def test_a_quota_is_waited_for_beyond_the_tries() -> None:
    bench = Bench(create_retries=2)
    quota = ThrottledError("20 sandboxes at once are all that you may have")
    quota.retry_after, quota.wait = 20.0, True  # type: ignore[attr-defined]
    slow = ThrottledError("slow down")
    bench.backend.plan = [fail(quota)] * 30 + [fail(slow)] * 2
    sandbox = await bench.pool.acquire(SPEC, episode_id="e1")
    assert bench.time.now >= 1000.0 + 30 * 20.0
    bench.backend.plan = [fail(quota)] * 5 + [fail(slow)] * 3
    with pytest.raises(SandboxError, match="no sandbox after 8 tries: ThrottledError: slow down"):
        await bench.pool.acquire(SPEC, episode_id="e2")
    await bench.pool.release(sandbox)
    await bench.close()


class Rationed(ScriptedBackend):
    """A provider that allows `most` sandboxes at once; counts the most that there were."""

    most = 20
    most_live = 0

    def make(self, spec: SandboxSpec) -> Any:
        if len(self.live) >= self.most:
            quota = ThrottledError("that is all that you may have at once")
            quota.retry_after, quota.wait = 1.0, True  # type: ignore[attr-defined]
            raise quota
        raw = super().make(spec)
        self.most_live = max(self.most_live, len(self.live))
        return raw


async def test_200_episodes_within_a_quota_of_20_all_finish() -> None:
    bench = Bench(backend=Rationed(), create_concurrency=32, create_retries=0)

    async def episode(number: int) -> None:
        sandbox = await bench.pool.acquire(SPEC, episode_id=f"e{number}")
        await bench.time.sleep(5.0)
        await settle(number % 7)
        await bench.pool.release(sandbox)

    await asyncio.gather(*(episode(number) for number in range(200)))
    assert bench.backend.most_live == 20
    assert bench.pool.stats()["sandbox/create_failures"] == 0
    await bench.close()


async def test_sandboxes_that_do_not_need_it_cost_nothing() -> None:
    bench = Bench()
    await bench.pool.acquire(SPEC, episode_id="e1")
    await settle()
    assert bench.time.slept == []
    await bench.close()


async def test_sandbox_seconds_are_accounted() -> None:
    bench = Bench()
    first = await bench.pool.acquire(SPEC, episode_id="e1")
    bench.time.now += 10
    second = await bench.pool.acquire(SPEC, episode_id="e2")
    bench.time.now += 5
    assert bench.pool.stats()["sandbox/seconds"] == 20
    await bench.pool.release(first)
    bench.time.now += 100
    await bench.pool.release(second)
    assert bench.pool.stats()["sandbox/seconds"] == 15 + 105
    await bench.close()


async def test_cost_counts_what_lives_and_what_has_lived() -> None:
    bench = Bench(backend=Priced())
    assert "sandbox/cost" not in bench.pool.stats()
    first = await bench.pool.acquire(SandboxSpec(cpus=2.0), episode_id="e1")
    second = await bench.pool.acquire(SandboxSpec(cpus=0.5), episode_id="e2")
    bench.time.now += 10
    assert bench.pool.stats()["sandbox/cost"] == 25.0
    await bench.pool.release(first)
    bench.time.now += 10
    assert bench.pool.stats()["sandbox/cost"] == 30.0
    (lease, other) = [data for event, data in bench.journal.entries if event == "lease"]
    assert (lease["price"], other["price"]) == (2.0, 0.5)
    await bench.pool.release(second)
    await bench.close()


async def test_a_cost_that_is_not_wholly_known_is_not_told() -> None:
    bench = Bench(backend=Priced())
    await bench.pool.acquire(SandboxSpec(cpus=2.0), episode_id="e1")
    unknown = await bench.pool.acquire(SandboxSpec(), episode_id="e2")
    for _ in range(2):
        stats = bench.pool.stats()
        assert "sandbox/cost" not in stats
        assert stats["sandbox/unpriced"] == 1
        await bench.pool.release(unknown)
    await bench.close()


async def test_closing_deletes_everything_and_refuses_more() -> None:
    bench = Bench(warm=1, create_concurrency=2)
    await bench.pool.acquire(SPEC, episode_id="used")
    gate = asyncio.Event()
    bench.backend.plan = [hold(gate)] * 2
    under_way = [bench.start(f"e{number}") for number in range(4)]
    await settle()
    closing = asyncio.create_task(bench.close())
    await settle()
    gate.set()
    await closing
    await bench.pool.aclose()
    for task in under_way:
        with pytest.raises(SandboxError, match="pool was closed"):
            await task
    with pytest.raises(SandboxError, match="pool is closed"):
        await bench.pool.acquire(SPEC, episode_id="late")
