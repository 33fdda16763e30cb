"""The engine workers behind a policy: which of them serves a session, and which are well enough to."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollhook.errors import EngineError
from rollhook.router import RouteRequest, Worker
from rollhook.routing import Chain
from rollhook.session.breaker import Breaker
from rollhook.session.fleet_stats import FleetStats
from rollhook.session.health import Health, Probed
from rollhook.session.turn import Limits
from rollhook.session.workers import NO_VERSION, Entry, Gate, WorkerTable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Route:
    """Where a session's requests go; owned by the fleet."""

    request: RouteRequest
    worker: Worker | None = None
    entry: Entry | None = None
    turns: int = 0


class Fleet:
    """Chooses a session's worker and keeps it while that is on offer; looks after those that are ill.

    A chain that looks at prompts chooses at a session's first turn, another when it is opened. Every session
    that has a worker counts on it until it leaves, also while its agent is busy with tools. `revive` starts
    the server of a worker anew, where it can; it is called when no worker is left. While `gate` is closed
    nothing is started anew. From the first request, or `start`, until `close` the engines are probed.
    """

    def __init__(
        self,
        router: Chain,
        client: Probed,
        gate: Gate,
        *,
        seed: int = 0,
        limits: Limits | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        revive: Callable[[Worker], Awaitable[bool]] | None = None,
    ) -> None:
        self._limits = limits = limits or Limits()
        self.table = WorkerTable(lambda: Breaker(limits.breaker_faults, limits.breaker_seconds, now))
        self.health = Health(self.table, client, down_after=limits.down_after, up_after=limits.up_after)
        self.stats = FleetStats(self.table)
        self._router = router
        self._gate = gate
        self._now = now
        self._sleep = sleep
        self._jitter = random.Random(seed)  # noqa: S311 - spreads retries
        self._background: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._revive_server = revive
        self._mending: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The current weight version."""
        return self.table.version

    # -- the workers

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Say which workers exist, all healthy and serving `version`; others leave the routing."""
        self.table.set_workers(workers, version)
        self._router.workers_changed(self.table.workers)

    def add(self, workers: Sequence[Worker], version: int = NO_VERSION) -> None:
        """Add workers; without the current version they are offered once a probe finds it served there."""
        self.table.add(workers, version)
        self._router.workers_changed(self.table.workers)

    def remove(self, worker: Worker) -> None:
        """Take a worker out, without a rank all of its engine's; what is under way there finishes."""
        self.table.remove({entry.worker for entry in self._entries(worker)})
        self._router.workers_changed(self.table.workers)

    def set_draining(self, worker: Worker, draining: bool = True) -> None:
        """Keep new turns away from a worker, without a rank from all of its engine's."""
        for entry in self._entries(worker):
            entry.draining = draining

    async def idle(self, timeout: float, worker: Worker | None = None) -> bool:
        """Return True once no request is under way (at a worker), False after `timeout` seconds."""
        entries = list(self.table) if worker is None else self._entries(worker)
        try:
            async with asyncio.timeout(timeout):
                while any(entry.requests for entry in entries):
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    # -- sessions

    def enter(self, request: RouteRequest) -> Route:
        """Choose the worker of a new session (its first turn chooses when none is on offer now)."""
        route = Route(request)
        if not self._router.needs_prefix:
            self._choose(route, (), request.prefix_ids)
        return route

    def leave(self, route: Route) -> None:
        """Forget a session: its worker's count and what the router policies know of it."""
        self._assign(route, None)
        self._router.closed(route.request.session_id)

    async def worker(
        self, route: Route, failed: set[Worker], faults: int, prompt: Sequence[int] = ()
    ) -> Entry:
        """Return a worker for the next try of a turn, waiting while none is on offer or all have failed.

        `failed` holds those that failed this request, and is cleared once all have. Raises EngineError when
        no worker is on offer within the limits.
        """
        self.start()
        before = route.worker
        entry = await self._wait_for_one(route, failed, faults, prompt)
        self.stats.sent(route.turns > 0 and faults == 0, before == entry.worker, retry=faults > 0)
        route.turns += faults == 0
        return entry

    @contextmanager
    def sending(self, entry: Entry, tokens: int) -> Iterator[None]:
        """Count a request as under way at a worker while the block lasts; see `Entry.sending`."""
        try:
            with entry.sending(tokens):
                yield
        finally:
            self._ended.set()

    async def failed(self, entry: Entry, error: EngineError) -> None:
        """Take a worker that failed a request out of the routing unless it says that it is well."""
        entry.failures += 1
        level = logging.WARNING if entry.failures == 1 else logging.DEBUG
        log.log(level, "engine worker %s failed a request: %s", entry.worker.url, error)
        await self.health.doubt(entry)

    # -- life

    def start(self) -> None:
        """Probe the engines from now on; safe to call again."""
        if self._watching:
            return
        limits, health = self._limits, self.health
        watches = [
            health.watch(limits.health_interval, self._sleep, lambda: self._gate.paused),
            health.watch_loads(limits.load_interval, self._sleep),
        ]
        self._watching = [asyncio.ensure_future(watch) for watch in watches]
        for task in self._watching:
            task.add_done_callback(_tell_failure)

    async def check_health(self) -> None:
        """Ask the workers that are out for their health; those that serve the current version come back."""
        await self.health.probe_ill()

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Run something in the background; `close` waits for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Finish what runs in the background; safe to call twice."""
        ending = [*self._watching, *([self._mending] if self._mending is not None else [])]
        self._watching = []
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.health.close()
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    # -- choosing

    async def _wait_for_one(
        self, route: Route, failed: set[Worker], faults: int, prompt: Sequence[int]
    ) -> Entry:
        deadline = self._now() + self._limits.no_worker
        pause = self._limits.backoff
        while True:
            offered = self.table.offered()
            if offered and all(entry.worker in failed for entry in offered):
                await self._sleep(pause * 2 ** (faults - 1) * self._jitter.uniform(0.8, 1.2))
                failed.clear()
            if (entry := self._choose(route, failed, prompt)) is not None:
                return entry
            if self._now() >= deadline:
                raise EngineError(
                    f"none of the {len(self.table.workers)} engine workers takes requests:"
                    f" {self.table.why_none() or 'there is none'}; see the engines' logs",
                    kind="infrastructure",
                )
            await self.check_health()
            if not self.table.offered():
                await self._mend()
            if not self.table.offered():
                await self._sleep(pause * self._jitter.uniform(0.8, 1.2))
                pause = min(2 * pause, 10.0)

    def _choose(self, route: Route, failed: Container[Worker], prompt: Sequence[int]) -> Entry | None:
        """Return the entry of the session's worker, choosing one when it has none or its own has left."""
        offered = self.table.offered()
        candidates = [entry for entry in offered if entry.worker not in failed] or offered
        if route.entry in candidates and not self._router.each_turn:
            return route.entry
        request = replace(route.request, worker=route.worker)
        if self._router.needs_prefix:
            request = replace(request, prefix_ids=prompt)
        worker = self._router.pick(request, [self.table.load(entry) for entry in candidates])
        if worker is None:
            return None
        self._assign(route, worker)
        self._router.assigned(request, worker)
        return route.entry

    def _assign(self, route: Route, worker: Worker | None) -> None:
        if (old := route.entry) is not None:
            old.open_sessions -= 1
        route.entry = self.table.get(worker)
        route.worker = worker
        if route.entry is not None:
            route.entry.open_sessions += 1

    def _entries(self, worker: Worker) -> list[Entry]:
        if worker.dp_rank is None:
            return self.table.of(worker.url)
        entry = self.table.get(worker)
        return [] if entry is None else [entry]

    # -- engines that are started anew

    async def _mend(self) -> None:
        """Have the servers of ill workers started anew, once for all who wait for a worker."""
        if self._revive_server is None or self._gate.paused:
            return
        if self._mending is None or self._mending.done():
            self._mending = asyncio.ensure_future(self._start_anew(self._revive_server))
        await asyncio.shield(self._mending)

    async def _start_anew(self, revive: Callable[[Worker], Awaitable[bool]]) -> None:
        ill = dict.fromkeys(entry.worker.url for entry in self.table if not entry.healthy and not entry.up)
        error = None
        for url in ill:
            log.warning("no engine is left, so the one at %s is started anew", url)
            try:
                if await revive(Worker(url)):
                    self.health.trust(url)
            except EngineError as failure:
                error = failure
        await self.check_health()
        if error is not None and not any(entry.healthy or entry.up for entry in self.table):
            raise error


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the engines are not probed any more: %s", error, exc_info=error)
