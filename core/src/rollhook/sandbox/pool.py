"""The sandbox pool: creates within a throttle, leases before it asks, deletes whatever it made.

A sandbox serves one episode and is then deleted; created ahead is fine, reused is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rollhook.durable import to_json
from rollhook.errors import BudgetExceeded, RollhookError, SandboxError
from rollhook.failpoints import fail
from rollhook.sandbox.backend import RawSandbox, SandboxBackend, SandboxSpec
from rollhook.sandbox.deletions import Backoff, Deletions, PoolTimes
from rollhook.sandbox.lease import Lease, LeaseJournal
from rollhook.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """A sandbox of this pool from creation to deletion."""

    lease: Lease
    raw: RawSandbox
    sandbox: Sandbox
    created: float
    #: whether an earlier try under the same lease may have left a second sandbox
    strays: bool


@dataclass(eq=False)
class _Try:
    """How far the making of one sandbox has come."""

    lease: Lease
    tries: int = 0
    call: asyncio.Task[RawSandbox] | None = None


class SandboxPool:
    """Hands out sandboxes of one backend to the episodes of one attempt; one event loop.

    `create_concurrency` creates are under way at most; one that waits to try again holds no place.
    `create_retries` is the number of further tries of a create that the backend calls retryable.
    `warm` sandboxes are kept created ahead for the spec that was asked for last.
    """

    def __init__(  # noqa: PLR0913 - the last five are for tests
        self,
        backend: SandboxBackend,
        *,
        run_id: str,
        attempt: int,
        journal: LeaseJournal,
        create_concurrency: int = 4,
        create_retries: int = 8,
        warm: int = 0,
        times: PoolTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.backend = backend
        self._run_id = run_id
        self._attempt = attempt
        self._journal = journal
        self._throttle = asyncio.Semaphore(create_concurrency)
        self._retries = create_retries
        self._warm_wanted = warm
        self._times = times or PoolTimes()
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._backoff = Backoff(self._times, rng or random.Random())  # noqa: S311 - jitter
        self._deletions = Deletions(backend, journal, self._times, self._backoff, clock, sleep)
        self._live: dict[str, _Live] = {}
        self._warm: dict[bytes, deque[_Live]] = {}
        self._warming = 0
        self._makers: set[asyncio.Task[_Live]] = set()
        self._tries: set[_Try] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._keepalive: asyncio.Task[None] | None = None
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def acquire(
        self, spec: SandboxSpec, *, episode_id: str, box: str = "main", timeout: float | None = None
    ) -> Sandbox:
        """Return a fresh sandbox for this episode.

        Cancelled at any moment, it leaves nothing behind: what was being created is deleted in the
        background. Raises BudgetExceeded(node="create") after `timeout` seconds, SandboxError when the
        backend cannot make one, RunError when the lease cannot be written.
        """
        started = self._clock()
        maker = self._spawn_maker(self._obtain(spec, episode_id, box))
        try:
            async with asyncio.timeout(timeout):
                live = await asyncio.shield(maker)
        except TimeoutError:
            self._abandon(maker)
            raise BudgetExceeded(
                f"no sandbox for episode {episode_id} within {timeout:g} s ({self._situation()})",
                node="create",
            ) from None
        except asyncio.CancelledError:
            self._abandon(maker)
            if maker.cancelled() and not _being_cancelled():
                who = "the sandbox pool was closed" if self._closing else "the backend gave up by itself"
                raise SandboxError(f"{who} while a sandbox was being made") from None
            raise
        self._live[live.sandbox.id] = live
        self._counts["acquired"] += 1
        self._seconds["wait"] += self._clock() - started
        self.prepare(spec)
        return live.sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Close and delete a sandbox of this pool; returns after the first try, others follow by themselves.

        Safe to call twice and to cancel.
        """
        live = self._live.pop(sandbox.id, None)
        if live is not None:
            tried = asyncio.Event()
            self._chore(self._retire(live, tried))
            await tried.wait()

    def waits_for(self, episode_id: str) -> str:
        """Return what an episode's sandbox waits for, in words; empty when none is being made for it."""
        for state in self._tries:
            if state.lease.episode == episode_id:
                if state.call is not None:
                    return f"the backend, which makes a sandbox (try {state.tries})"
                return f"another try after {state.tries}" if state.tries else "a place among the creates"
        return ""

    def prepare(self, spec: SandboxSpec) -> None:
        """Create ahead, in the background, until `warm` sandboxes wait for an episode."""
        waiting = sum(len(queue) for queue in self._warm.values()) + self._warming
        for _ in range(0 if self._closing else self._warm_wanted - waiting):
            self._warming += 1
            self._chore(self._warm_up(spec))

    def stats(self) -> dict[str, float]:
        """Return counts and seconds since the start, and what is alive now."""
        alive = [*self._live.values(), *itertools.chain(*self._warm.values())]
        now = self._clock()
        counts, seconds = self._counts, self._seconds
        return {
            "sandbox/live": float(len(alive)),
            "sandbox/creating": float(len(self._makers)),
            "sandbox/acquired": float(counts["acquired"]),
            "sandbox/creates": float(counts["creates"]),
            "sandbox/create_retries": float(counts["retries"]),
            "sandbox/create_failures": float(counts["failures"]),
            "sandbox/deletes": float(self._deletions.done),
            "sandbox/delete_retries": float(self._deletions.retries),
            "sandbox/leaked": float(self._deletions.leaked),
            "sandbox/seconds": seconds["alive"] + sum(now - live.created for live in alive),
            "sandbox/create_seconds_mean": seconds["create"] / max(1, counts["creates"]),
            "sandbox/wait_seconds_mean": seconds["wait"] / max(1, counts["acquired"]),
        }

    async def aclose(self) -> None:
        """Delete everything that this pool made; further acquires are refused. Safe to call twice.

        Takes as long as abandoned creates and retried deletes take, within `PoolTimes`.
        """
        self._closing = True
        for maker in list(self._makers):
            maker.cancel()
        if self._makers:
            await asyncio.wait(self._makers)
        if self._keepalive is not None:
            self._keepalive.cancel()
            await asyncio.wait({self._keepalive})
        for live in [*self._live.values(), *itertools.chain(*self._warm.values())]:
            self._chore(self._retire(live))
        self._live.clear()
        self._warm.clear()
        while self._chores:
            await asyncio.wait(set(self._chores))

    # making

    async def _obtain(self, spec: SandboxSpec, episode: str, box: str) -> _Live:
        """Take one that was created ahead, else make one."""
        while self._warm and (live := self._take_warm(spec)) is not None:
            try:
                usable = self._clock() - live.created < self._times.warm and await live.raw.alive()
            except RollhookError as error:
                logger.info("sandbox %s, created ahead, does not answer: %s", live.raw.id, error)
                usable = False
            except BaseException:
                self._chore(self._retire(live))
                raise
            if usable:
                self._journal.append("lease_assigned", nonce=live.lease.nonce, episode=episode, box=box)
                return live
            self._chore(self._retire(live))
        return await self._make(spec, episode, box)

    async def _make(self, spec: SandboxSpec, episode: str, box: str) -> _Live:
        """Create a sandbox under a new lease, trying again where the backend says that it may help."""
        if self._closing:
            raise SandboxError("the sandbox pool is closed")
        lease = Lease.new(
            run_id=self._run_id,
            attempt=self._attempt,
            now=self._wall(),
            lifetime=spec.lifetime_seconds,
            episode=episode,
            box=box,
        )
        labelled = dataclasses.replace(spec, labels={**spec.labels, **lease.labels()})
        state = _Try(lease)
        self._tries.add(state)
        try:
            await self._journal.append_durable("lease", **lease.data())
            fail("sandbox.before_create")
            raw = await self._try_until_made(labelled, state)
            fail("sandbox.after_create")
            self._journal.append("lease_created", nonce=lease.nonce, sandbox_id=raw.id)
            sandbox = Sandbox(raw, capabilities=self.backend.capabilities)
        except BaseException:
            self._chore(self._clear(state))
            raise
        finally:
            self._tries.discard(state)
        live = _Live(lease, raw, sandbox, self._clock(), strays=state.tries > 1)
        if self._keepalive is None and type(raw).touch is not RawSandbox.touch:
            self._keepalive = asyncio.create_task(self._touch_all(), name="sandbox keepalive")
        return live

    async def _try_until_made(self, spec: SandboxSpec, state: _Try) -> RawSandbox:
        while True:
            await self._throttle.acquire()
            state.tries += 1
            started = self._clock()
            state.call = asyncio.create_task(self.backend.create(spec))
            state.call.add_done_callback(lambda _: self._throttle.release())
            try:
                raw = await asyncio.shield(state.call)
            except Exception as error:
                state.call = None
                if state.tries > self._retries or not self.backend.retryable(error):
                    self._counts["failures"] += 1
                    raise _create_failed(error, state.tries) from error
                logger.info("creating a sandbox failed (try %d): %s", state.tries, error)
                pause = self._backoff(state.tries, error)
            else:
                self._counts["creates"] += 1
                self._seconds["create"] += self._clock() - started
                return raw
            self._counts["retries"] += 1
            await self._sleep(pause)

    def _spawn_maker(self, making: Coroutine[Any, Any, _Live]) -> asyncio.Task[_Live]:
        maker = asyncio.create_task(making)
        self._makers.add(maker)
        maker.add_done_callback(self._makers.discard)
        return maker

    def _abandon(self, maker: asyncio.Task[_Live]) -> None:
        """Nobody waits for this one any more: stop it, and delete what it has made or is making."""
        if not maker.done():
            maker.cancel()
        elif not maker.cancelled() and maker.exception() is None:
            self._chore(self._retire(maker.result()))

    def _situation(self) -> str:
        counts = self._counts
        return (
            f"being made: {len(self._makers)}, alive: {len(self._live)}, "
            f"made so far: {counts['creates']}, tried again: {counts['retries']}"
        )

    # created ahead

    def _take_warm(self, spec: SandboxSpec) -> _Live | None:
        queue = self._warm.get(_key(spec))
        return queue.popleft() if queue else None

    async def _warm_up(self, spec: SandboxSpec) -> None:
        lifetime = spec.lifetime_seconds
        longer = dataclasses.replace(
            spec, lifetime_seconds=None if lifetime is None else lifetime + self._times.warm
        )
        maker = self._spawn_maker(self._make(longer, "", ""))
        try:
            live = await maker
        except RollhookError as error:
            logger.warning("a sandbox could not be created ahead: %s", error)
            return
        except asyncio.CancelledError:
            self._abandon(maker)
            if _being_cancelled():
                raise
            return
        finally:
            self._warming -= 1
        if self._closing:
            await self._retire(live)
        else:
            self._warm.setdefault(_key(spec), deque()).append(live)

    # keeping alive

    async def _touch_all(self) -> None:
        while True:
            await self._sleep(self._times.keepalive)
            alive = [*self._live.values(), *itertools.chain(*self._warm.values())]
            await asyncio.gather(*(self._touch(live) for live in alive))

    async def _touch(self, live: _Live) -> None:
        try:
            async with asyncio.timeout(self._times.keepalive):
                await live.raw.touch()
        except Exception as error:  # noqa: BLE001 - a dead one is found out by its episode
            logger.info("sandbox %s could not be kept alive: %s", live.raw.id, error)

    # deleting

    async def _clear(self, state: _Try) -> None:
        """Delete whatever an unfinished create left or still brings."""
        raw = None
        if state.call is not None:
            await asyncio.wait({state.call}, timeout=self._times.abandoned_create)
            if not state.call.done():
                state.call.cancel()
                await asyncio.wait({state.call}, timeout=self._times.delete)
            raw = _made(state.call)
        strays = state.tries > 1 or (state.tries == 1 and raw is None)
        await self._deletions.delete(state.lease, raw.id if raw else None, strays)

    async def _retire(self, live: _Live, tried: asyncio.Event | None = None) -> None:
        try:
            try:
                async with asyncio.timeout(self._times.delete):
                    await live.sandbox.close()
            except Exception as error:  # noqa: BLE001 - it is deleted all the same
                logger.info("sandbox %s did not close: %s", live.raw.id, error)
            await self._deletions.delete(live.lease, live.raw.id, live.strays, tried)
            self._seconds["alive"] += self._clock() - live.created
        finally:
            if tried is not None:
                tried.set()

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a chore of the sandbox pool failed", exc_info=error)


def _create_failed(error: Exception, tries: int) -> Exception:
    if tries == 1 and isinstance(error, RollhookError):
        return error
    kind = error.kind if isinstance(error, RollhookError) else None
    return SandboxError(f"no sandbox after {tries} tries: {type(error).__name__}: {error}", kind=kind)


def _made(call: asyncio.Task[RawSandbox]) -> RawSandbox | None:
    """Return what an abandoned create has made; None when it failed or still hangs: what it left is swept."""
    if not call.done() or call.cancelled():
        return None
    if (error := call.exception()) is not None:
        logger.info("an abandoned create failed: %s", error)
        return None
    return call.result()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _key(spec: SandboxSpec) -> bytes:
    return to_json({**vars(spec), "env": dict(spec.env), "labels": None})
