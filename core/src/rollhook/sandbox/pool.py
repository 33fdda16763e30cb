"""The sandbox pool: creates within a throttle, leases before it asks, deletes whatever it made.

A sandbox serves one episode and is then deleted; created ahead is fine, reused is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rollhook.errors import BudgetExceeded, RollhookError, SandboxDead, SandboxError
from rollhook.failpoints import fail
from rollhook.sandbox.accounts import Accounts
from rollhook.sandbox.backend import RawSandbox, SandboxBackend, SandboxSpec
from rollhook.sandbox.deletions import Backoff, Deletions, PoolTimes
from rollhook.sandbox.lease import Lease, LeaseJournal
from rollhook.sandbox.rate import CreateRate
from rollhook.sandbox.sandbox import Sandbox
from rollhook.sandbox.warm import Warm

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
    #: a second of it; None: not known
    price: float | None = None
    #: its provider said so when it was kept alive
    dead: bool = False

    @property
    def lifetime(self) -> float | None:
        """Seconds from its creation on, as its provider was told."""
        return self.raw.spec.lifetime_seconds


@dataclass(eq=False)
class _Try:
    """How far the making of one sandbox has come."""

    lease: Lease
    tries: int = 0
    #: of these, those that a quota refused
    refused: int = 0
    call: asyncio.Task[RawSandbox] | None = None
    #: whether a try may have made a sandbox that nobody has the id of
    strays: bool = False
    #: what it waits for beside the backend, in words
    waits: str = ""


class SandboxPool:
    """Hands out sandboxes of one backend to the episodes of one attempt; one event loop.

    `create_concurrency` creates are under way at most; one that waits to try again holds no place. `rate`
    limits how fast they begin. `create_retries` is the number of further tries of a create that the backend
    calls retryable; a try that a quota refused (`wait` of the error) does not count. A create that may have
    made a sandbox though it failed is looked for by the nonce of its lease, and adopted where the backend
    can. `warm` sandboxes at most are kept created ahead, for the specs that were asked for last.
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
        rate: CreateRate | None = None,
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
        self._rate = rate
        self._times = times or PoolTimes()
        self._warm = Warm[_Live](warm, self._times.warm, clock)
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._backoff = Backoff(self._times, rng or random.Random())  # noqa: S311 - jitter
        self._deletions = Deletions(backend, journal, self._times, self._backoff, clock, sleep)
        self._live: dict[str, _Live] = {}
        self._makers: set[asyncio.Task[_Live]] = set()
        self._tries: set[_Try] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._keepalive: asyncio.Task[None] | None = None
        self._closing = False
        self._accounts = Accounts()
        self._counts, self._seconds = self._accounts.counts, self._accounts.seconds

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
                return state.waits or "its lease"
        return ""

    def prepare(self, spec: SandboxSpec) -> None:
        """Note that this spec is wanted, and create ahead in the background, `warm` sandboxes at most."""
        if self._closing:
            return
        self._warm.asked(spec)
        old = self._warm.expired()
        missing, spare = self._warm.plan()
        for live in [*old, *spare]:
            self._chore(self._retire(live))
        for wanted in missing:
            self._warm.begin(wanted)
            self._chore(self._warm_up(wanted))

    def stats(self) -> dict[str, float]:
        """Return counts and seconds since the start, and what is alive now."""
        alive = [*self._live.values(), *self._warm]
        return {
            **self._accounts.stats(alive, len(self._makers), self._clock()),
            "sandbox/deletes": float(self._deletions.done),
            "sandbox/delete_retries": float(self._deletions.retries),
            "sandbox/leaked": float(self._deletions.leaked),
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
        for live in [*self._live.values(), *self._warm.clear()]:
            self._chore(self._retire(live))
        self._live.clear()
        while self._chores:
            await asyncio.wait(set(self._chores))

    # making

    async def _obtain(self, spec: SandboxSpec, episode: str, box: str) -> _Live:
        """Take one that was created ahead, else make one."""
        while (live := self._warm.take(spec)) is not None:
            try:
                usable = await live.raw.alive()
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
        price = self.backend.price_per_second(spec)
        lease = Lease.new(
            run_id=self._run_id,
            attempt=self._attempt,
            now=self._wall(),
            lifetime=spec.lifetime_seconds,
            episode=episode,
            box=box,
            price=price,
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
        live = _Live(lease, raw, sandbox, self._clock(), state.strays, price)
        if self._keepalive is None and type(raw).touch is not RawSandbox.touch:
            self._keepalive = asyncio.create_task(self._touch_all(), name="sandbox keepalive")
        return live

    async def _try_until_made(self, spec: SandboxSpec, state: _Try) -> RawSandbox:
        while True:
            started = await self._begin(spec, state)
            assert state.call is not None
            try:
                raw = await asyncio.shield(state.call)
            except Exception as error:
                state.call = None
                lost = self.backend.ambiguous(error)
                state.strays = state.strays or lost
                if lost and (adopted := await self._recover(spec, state)) is not None:
                    return adopted
                state.refused += getattr(error, "wait", False)
                if state.tries - state.refused > self._retries or not self.backend.retryable(error):
                    self._counts["failures"] += 1
                    raise _create_failed(error, state.tries) from error
                logger.info("creating a sandbox failed (try %d): %s", state.tries, error)
                pause = self._backoff(state.tries, error)
            else:
                self._counts["creates"] += 1
                self._seconds["create"] += self._clock() - started
                return raw
            self._counts["retries"] += 1
            state.waits = f"another try after {state.tries}"
            await self._sleep(pause)
            if lost and (adopted := await self._recover(spec, state)) is not None:
                return adopted

    async def _begin(self, spec: SandboxSpec, state: _Try) -> float:
        """Begin a try once there is a place and the rate allows it; return when it began."""
        state.waits = "a place among the creates"
        await self._throttle.acquire()
        try:
            if self._rate is not None:
                state.waits = "its turn within sandbox.create_rate"
                await self._rate.wait()
            state.tries += 1
            state.call = asyncio.create_task(self.backend.create(spec))
        except BaseException:
            self._throttle.release()
            raise
        state.call.add_done_callback(lambda _: self._throttle.release())
        return self._clock()

    async def _recover(self, spec: SandboxSpec, state: _Try) -> RawSandbox | None:
        """Look once for a sandbox that a try made without telling, and adopt it; else it is deleted later."""
        if "adopt" not in self.backend.capabilities:
            return None
        state.waits = "the backend, which is asked for a sandbox whose create gave no answer"
        try:
            for sandbox_id in await self._deletions.others(state.lease, None):
                raw = await self.backend.adopt(sandbox_id, spec)
                self._counts["creates"] += 1
                self._counts["adopted"] += 1
                logger.info("sandbox %s, whose create gave no answer, was adopted", sandbox_id)
                return raw
        except Exception as error:  # noqa: BLE001 - another try follows, and what is left is deleted
            logger.info("no sandbox was adopted: %s", error)
        return None

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

    async def _warm_up(self, spec: SandboxSpec) -> None:
        lifetime = spec.lifetime_seconds
        longer = dataclasses.replace(
            spec, lifetime_seconds=None if lifetime is None else lifetime + self._times.warm
        )
        maker = self._spawn_maker(self._make(longer, "", ""))
        most = self._times.warm + (spec.build_seconds or 0.0)
        try:
            async with asyncio.timeout(most):
                live = await asyncio.shield(maker)
        except TimeoutError:
            self._abandon(maker)
            logger.warning("a sandbox could not be created ahead: it took more than %g s", most)
            return
        except RollhookError as error:
            logger.warning("a sandbox could not be created ahead: %s", error)
            return
        except asyncio.CancelledError:
            self._abandon(maker)
            if _being_cancelled():
                raise
            return
        finally:
            self._warm.end(spec)
        if self._closing:
            await self._retire(live)
        else:
            self._warm.add(spec, live)

    # keeping alive

    async def _touch_all(self) -> None:
        while True:
            await self._sleep(self._times.keepalive)
            alive = [live for live in (*self._live.values(), *self._warm) if not live.dead]
            await asyncio.gather(*(self._touch(live) for live in alive))

    async def _touch(self, live: _Live) -> None:
        try:
            async with asyncio.timeout(self._times.keepalive):
                await live.raw.touch()
        except SandboxDead:
            live.dead = True
        except Exception as error:  # noqa: BLE001 - the next one may do
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
        strays = state.strays or (state.call is not None and raw is None)
        await self._deletions.delete(state.lease, raw.id if raw else None, strays)

    async def _retire(self, live: _Live, tried: asyncio.Event | None = None) -> None:
        try:
            try:
                async with asyncio.timeout(self._times.delete):
                    await live.sandbox.close()
            except Exception as error:  # noqa: BLE001 - it is deleted all the same
                logger.info("sandbox %s did not close: %s", live.raw.id, error)
            await self._deletions.delete(live.lease, live.raw.id, live.strays, tried)
            self._accounts.ended(live, self._clock())
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
