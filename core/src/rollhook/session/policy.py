"""The policy as the runtime sees it: sessions on one side, engine workers on the other."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollhook.engine.base import Generation, GenerationRequest, SamplingParams
from rollhook.engine.weights import update_workers
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.router import RouteRequest, Worker
from rollhook.routing import Chain
from rollhook.session.common import SessionExistsError
from rollhook.session.render import Renderer
from rollhook.session.session import Route, Session
from rollhook.session.turn import Clock, Generator, Limits, Turn
from rollhook.session.workers import Entry, Gate, WorkerTable, load_of

log = logging.getLogger(__name__)


class PolicyClient:
    """Opens sessions, routes them to workers, and asks the engines for tokens.

    Every session that is open counts on its worker until it closes. A turn whose worker fails is asked
    again from another one, which is safe because nothing was committed. Around a weight update
    `pause` makes requests wait, off the agent's clock. `revive` starts the server of a worker anew, where
    it can; it is called when no worker is left.
    """

    def __init__(
        self,
        renderer: Renderer,
        router: Chain,
        client: Generator,
        *,
        context_length: int,
        seed: int = 0,
        limits: Limits | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        revive: Callable[[Worker], Awaitable[bool]] | None = None,
    ) -> None:
        self.renderer = renderer
        self.context_length = context_length
        self.table = WorkerTable()
        self.sessions: dict[str, Session] = {}
        self._router = router
        self._client = client
        self._limits = limits or Limits()
        self._now = now
        self._sleep = sleep
        self._gate = Gate(now)
        self._next_version: int | None = None
        self._jitter = random.Random(seed)  # noqa: S311 - spreads retries
        self._checked = now()
        self._background: set[asyncio.Task[None]] = set()
        self._revive_server = revive
        self._mending: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The current weight version."""
        return self.table.version

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Say which workers exist, all healthy and serving `version`; others leave the routing."""
        self.table.set_workers(workers, version)
        self._router.workers_changed(self.table.workers)

    def set_version(self, version: int, failed: Container[Worker] = ()) -> None:
        """Say that all workers serve `version` now, but for the failed ones, which leave the routing."""
        self.table.set_version(version, failed)

    def set_draining(self, worker: Worker, draining: bool = True) -> None:
        """Keep new turns away from a worker; those under way finish there."""
        if (entry := self.table.get(worker)) is not None:
            entry.draining = draining

    def pause(self, next_version: int | None = None) -> None:
        """Make new requests wait; `next_version` is what the engines may serve from now on."""
        self._next_version = next_version
        self._gate.pause()

    def resume(self) -> None:
        """Let requests through again."""
        self._next_version = None
        self._gate.resume()

    async def update_weights(self, path: Path, version: int, mode: str = "in_place") -> dict[Worker, str]:
        """Bring all engines to a version while requests wait; return the workers that failed, and why."""
        self.pause(version)
        try:
            failed = await update_workers(self._client, self.table.workers, path, version, mode)
            self.set_version(version, failed)
        finally:
            self.resume()
        return failed

    def open(
        self,
        session_id: str,
        *,
        task_id: str = "",
        sampling: SamplingParams | None = None,
        max_seq_len: int,
        reply_tokens: int,
        turns: int,
        seed: int | None = None,
        clock: Clock | None = None,
        prefix_ids: Sequence[int] = (),
    ) -> Session:
        """Open a session and choose its worker (the first turn chooses when none is on offer now).

        `max_seq_len` bounds prompt and replies together, `reply_tokens` one reply, `turns` the replies.
        `sampling.max_new_tokens` and `.stop_token_ids` are set per turn. Raises SessionExistsError for an id
        that is open.
        """
        if session_id in self.sessions:
            raise SessionExistsError(f"session {session_id!r} is open already")
        request = RouteRequest(session_id, task_id, prefix_ids, max_seq_len)
        session = Session(
            self,
            Route(request),
            sampling=replace(sampling or SamplingParams(), stop_token_ids=self.renderer.stop_token_ids),
            max_seq_len=min(max_seq_len, self.context_length),
            reply_tokens=reply_tokens,
            turns=turns,
            seed=seed,
            clock=clock,
        )
        self.sessions[session_id] = session
        self._choose(session.route, ())
        return session

    async def generate(
        self, route: Route, ids: Sequence[int], sampling: SamplingParams, clock: Clock | None
    ) -> Turn:
        """Ask the session's worker for one completion, and others when it fails.

        Charges the clock with the token time of the generation that is returned, and raises
        BudgetExceeded, the request aborted, when the clock runs out before. Raises EngineError when
        the request is refused, or no worker has answered within the limits.
        """
        started = self._now()
        failed: set[Worker] = set()
        error: EngineError | None = None
        tries = faults = 0
        while faults < self._limits.attempts:
            tries += 1
            await self._wait_open()
            entry = await self._worker(route, failed, faults)
            before = entry.version
            asked, paused, pauses = self._now(), self._gate.seconds(), self._gate.pauses
            request = GenerationRequest(f"{route.request.session_id}-{uuid4().hex[:12]}", ids, sampling)
            entry.tokens_in_flight += (tokens := len(ids) + sampling.max_new_tokens)
            try:
                generation = await self._ask(entry, request, clock)
            except EngineError as failure:
                if failure.kind == "user":
                    raise
                error = failure
                faults += 1
                failed.add(entry.worker)
                await self._failed(entry, failure)
                continue
            finally:
                entry.tokens_in_flight -= tokens
            entry.failures = 0
            active = self._now() - asked - (self._gate.seconds() - paused)
            spent = max(0.0, active - (generation.queue_seconds or 0.0))
            if generation.finish_reason == "abort":
                error = EngineError(f"{entry.worker.url} aborted the request", kind="retryable")
                self._charge_cut(clock, spent)
                faults += self._gate.pauses == pauses  # a weight update may abort as often as it likes
                continue
            if clock is not None:
                clock.charge("tokens", spent)
            after = entry.version if self._next_version is None else max(entry.version, self._next_version)
            engine = self._now() - asked
            total = self._now() - started
            return Turn(generation, before, after, spent, engine, max(0.0, total - spent), tries)
        raise EngineError(f"no answer after {tries} tries: {error}", kind="infrastructure") from error

    def waits_for(self, route: Route) -> str:
        """Return what a request of a session waits for now, in words."""
        if self._gate.paused:
            return "a weight update"
        if route.entry is None or route.worker is None:
            return "an engine that is healthy"
        rank = "" if route.worker.dp_rank is None else f" (rank {route.worker.dp_rank})"
        queued = f", where requests queue for {q:.1f} s" if (q := route.entry.queue_seconds) >= 0.1 else ""
        return f"tokens of {route.worker.url}{rank}{queued}"

    def leave(self, route: Route) -> None:
        """Forget a session: its worker's count and what the router policies know of it."""
        self.sessions.pop(route.request.session_id, None)
        self._router.closed(route.request.session_id)
        self._assign(route, None)

    def abort_later(self, worker: Worker, rid: str) -> None:
        """Abort a request at its engine without waiting."""
        self._later(self._abort(worker, rid))

    async def check_health(self) -> None:
        """Ask the workers that are out for their health; those that serve the current version come back."""
        await asyncio.gather(*(self._revive(entry) for entry in self.table if not entry.healthy))

    async def close(self) -> None:
        """Close every session and finish what runs in the background; safe to call twice."""
        for session in list(self.sessions.values()):
            await session.close()
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait({self._mending})
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    # -- routing

    def _choose(self, route: Route, failed: Container[Worker]) -> Entry | None:
        """Return the entry of the session's worker, choosing one when it has none or its own has left."""
        offered = self.table.offered()
        candidates = [entry for entry in offered if entry.worker not in failed] or offered
        for entry in candidates:
            if entry.worker == route.worker:
                return entry
        worker = self._router.pick(route.request, [load_of(entry) for entry in candidates])
        if worker is None:
            return None
        self._assign(route, worker)
        self._router.assigned(route.request, worker)
        return self.table.get(worker)

    def _assign(self, route: Route, worker: Worker | None) -> None:
        if (old := route.entry) is not None:
            old.open_sessions -= 1
        route.entry = self.table.get(worker)
        route.worker = worker
        if route.entry is not None:
            route.entry.open_sessions += 1

    async def _worker(self, route: Route, failed: set[Worker], faults: int) -> Entry:
        """Return a worker for the next try, waiting while none is on offer or all of them have failed."""
        deadline = self._now() + self._limits.no_worker
        pause = self._limits.backoff
        self._look_after_the_ill()
        while True:
            offered = self.table.offered()
            if offered and all(entry.worker in failed for entry in offered):
                await self._sleep(pause * 2 ** (faults - 1) * self._jitter.uniform(0.8, 1.2))
                failed.clear()
            if (entry := self._choose(route, failed)) is not None:
                return entry
            if self._now() >= deadline:
                raise EngineError(
                    f"none of the {len(self.table.workers)} engine workers is healthy at weight version"
                    f" {self.version}; see the engines' logs",
                    kind="infrastructure",
                )
            await self.check_health()
            if not self.table.offered():
                await self._mend()
            if not self.table.offered():
                await self._sleep(pause * self._jitter.uniform(0.8, 1.2))
                pause = min(2 * pause, 10.0)

    async def _mend(self) -> None:
        """Have the servers of ill workers started anew, once for all who wait for a worker."""
        if self._revive_server is None or self._gate.paused:
            return
        if self._mending is None or self._mending.done():
            self._mending = asyncio.ensure_future(self._start_anew(self._revive_server))
        await asyncio.shield(self._mending)

    async def _start_anew(self, revive: Callable[[Worker], Awaitable[bool]]) -> None:
        ill = {entry.worker.url: entry.worker for entry in self.table if not entry.healthy}
        for worker in ill.values():
            log.warning("no engine is left, so the one at %s is started anew", worker.url)
            await revive(Worker(worker.url))
        await self.check_health()

    def _look_after_the_ill(self) -> None:
        """Ask workers that are out for their health now and then, beside the requests."""
        due = self._checked + self._limits.health_interval
        if self._now() >= due and any(not entry.healthy for entry in self.table):
            self._checked = self._now()
            self._later(self.check_health())

    async def _failed(self, entry: Entry, error: EngineError) -> None:
        """Take a worker that failed a request out of the routing unless it says that it is well."""
        entry.failures += 1
        level = logging.WARNING if entry.failures == 1 else logging.DEBUG
        log.log(level, "engine worker %s failed a request: %s", entry.worker.url, error)
        if entry.probe is None:
            entry.probe = asyncio.ensure_future(self._client.health(entry.worker))
        try:
            well = await asyncio.shield(entry.probe)
        finally:
            entry.probe = None
        if not well:
            entry.healthy = False

    async def _revive(self, entry: Entry) -> None:
        if not await self._client.health(entry.worker):
            return
        try:
            served = await self._client.weight_version(entry.worker)
        except EngineError as error:
            log.warning("engine worker %s is healthy but gives no version: %s", entry.worker, error)
            return
        if served == self.version:
            entry.version, entry.healthy, entry.failures = self.version, True, 0

    # -- one request

    async def _wait_open(self) -> None:
        try:
            await self._gate.wait(self._limits.pause)
        except TimeoutError:
            raise EngineError(
                f"the weight update did not finish within {self._limits.pause:g} s", kind="infrastructure"
            ) from None

    async def _ask(self, entry: Entry, request: GenerationRequest, clock: Clock | None) -> Generation:
        """Send one request and wait for it as long as the clock allows.

        An engine that does not answer the abort either is at fault: EngineError.
        """
        asked = self._now()
        task = asyncio.ensure_future(self._client.generate(entry.worker, request))
        try:
            if not await self._within(task, clock, allowance=2 * entry.queue_seconds):
                await self._abort(entry.worker, request.rid)
                await asyncio.wait({task}, timeout=self._limits.abort)
                if not task.done():
                    raise EngineError(
                        f"{entry.worker.url} did not end an aborted request within {self._limits.abort:g} s",
                        kind="retryable",
                    )
            generation = task.result()
        finally:
            if not task.done():
                task.cancel()
                self.abort_later(entry.worker, request.rid)
        entry.queue_seconds = min(generation.queue_seconds or 0.0, self._now() - asked)
        return generation

    async def _within(self, task: asyncio.Task[Generation], clock: Clock | None, allowance: float) -> bool:
        """Return True when the task is done, False when the clock and the allowance have run out.

        Seconds of a pause do not count.
        """
        if clock is None:
            await asyncio.wait({task})
            return True
        started, paused = self._now(), self._gate.seconds()
        limit = clock.remaining + allowance
        while not task.done():
            if self._gate.paused:
                await self._gate.open_or_done(task)
                continue
            left = limit - (self._now() - started - (self._gate.seconds() - paused))
            if left <= 0:
                return False
            await asyncio.wait({task}, timeout=left)
        return True

    def _charge_cut(self, clock: Clock | None, spent: float) -> None:
        """After an aborted generation: raise BudgetExceeded if its token time used up the agent's clock."""
        if clock is None or spent < clock.remaining:
            return
        clock.charge("tokens", spent + 1e-6)
        clock.check()
        raise BudgetExceeded("the agent's clock ran out during a reply", node="agent")

    async def _abort(self, worker: Worker, rid: str) -> None:
        try:
            await self._client.abort(worker, rid)
        except EngineError as error:
            log.warning("request %s could not be aborted: %s", rid, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
