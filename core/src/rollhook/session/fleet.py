"""The engine workers behind a policy: which of them serves a session, and which are well enough to."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from dataclasses import dataclass

from rollhook.errors import EngineError
from rollhook.router import RouteRequest, Worker
from rollhook.routing import Chain
from rollhook.session.turn import Generator, Limits
from rollhook.session.workers import Entry, Gate, WorkerTable

log = logging.getLogger(__name__)


@dataclass
class Route:
    """Where a session's requests go; owned by the fleet."""

    request: RouteRequest
    worker: Worker | None = None
    entry: Entry | None = None


class Fleet:
    """Chooses a session's worker once and keeps it while that is on offer; looks after those that are ill.

    Every session that is open counts on its worker until it leaves. `revive` starts the server of a worker
    anew, where it can; it is called when no worker is left. While `gate` is closed nothing is started anew.
    """

    def __init__(
        self,
        router: Chain,
        client: Generator,
        gate: Gate,
        *,
        seed: int = 0,
        limits: Limits | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        revive: Callable[[Worker], Awaitable[bool]] | None = None,
    ) -> None:
        self.table = WorkerTable()
        self._router = router
        self._client = client
        self._gate = gate
        self._limits = limits or Limits()
        self._now = now
        self._sleep = sleep
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

    def set_draining(self, worker: Worker, draining: bool = True) -> None:
        """Keep new turns away from a worker; those under way finish there."""
        if (entry := self.table.get(worker)) is not None:
            entry.draining = draining

    def enter(self, request: RouteRequest) -> Route:
        """Choose the worker of a new session (its first turn chooses when none is on offer now)."""
        route = Route(request)
        self._choose(route, ())
        return route

    def leave(self, route: Route) -> None:
        """Forget a session: its worker's count and what the router policies know of it."""
        self._router.closed(route.request.session_id)
        self._assign(route, None)

    async def worker(self, route: Route, failed: set[Worker], faults: int) -> Entry:
        """Return a worker for the next try, waiting while none is on offer or all of them have failed.

        `failed` holds those that failed this request, and is cleared once all have. Raises EngineError when
        no worker is on offer within the limits.
        """
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

    async def failed(self, entry: Entry, error: EngineError) -> None:
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

    async def check_health(self) -> None:
        """Ask the workers that are out for their health; those that serve the current version come back."""
        await asyncio.gather(*(self._revive(entry) for entry in self.table if not entry.healthy))

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Run something in the background; `close` waits for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Finish what runs in the background; safe to call twice."""
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait({self._mending})
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _choose(self, route: Route, failed: Container[Worker]) -> Entry | None:
        """Return the entry of the session's worker, choosing one when it has none or its own has left."""
        offered = self.table.offered()
        candidates = [entry for entry in offered if entry.worker not in failed] or offered
        for entry in candidates:
            if entry.worker == route.worker:
                return entry
        worker = self._router.pick(route.request, [self.table.load(entry) for entry in candidates])
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
            self.later(self.check_health())

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
