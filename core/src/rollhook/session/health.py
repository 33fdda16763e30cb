"""The health of the engines: probed now and then, several times before it is believed to have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.session.workers import Entry, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollhook.engine.server_info import RankLoad

log = logging.getLogger(__name__)


class Probed(Protocol):
    """What is asked of an engine client; `rollhook.engine.client.EngineClient` is one."""

    async def health(self, worker: Worker) -> bool:
        """Return whether the engine is healthy."""

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the version in service, None when it is none of ours."""

    async def load(self, worker: Worker) -> Sequence[RankLoad]:
        """Return the load of each rank."""


class Health:
    """Asks engines for their health, each base URL once however many ranks it has.

    `down_after` probes in a row that fail take an engine's workers out, `up_after` that go well bring them
    back. Where `versions` matter, a worker that is out or not at the table's weight version is well only if
    it serves that.
    """

    def __init__(
        self,
        table: WorkerTable,
        client: Probed,
        *,
        down_after: int = 3,
        up_after: int = 2,
        versions: bool = True,
    ) -> None:
        self._table = table
        self._client = client
        self._down_after = down_after
        self._up_after = up_after
        self._versions = versions
        self._asking: dict[str, asyncio.Task[bool]] = {}
        self._probing_ill: asyncio.Task[None] | None = None
        self._silent: set[str] = set()

    async def probe(self, urls: Iterable[str] | None = None) -> None:
        """Ask these engines, or all, and note what they say."""
        await asyncio.gather(*(self._probe(url) for url in (self._table.urls if urls is None else urls)))

    async def probe_ill(self) -> None:
        """Ask the engines of workers that are out, once for all who want to know at the same time."""
        if self._probing_ill is None or self._probing_ill.done():
            ill = dict.fromkeys(entry.worker.url for entry in self._table if not entry.healthy)
            self._probing_ill = asyncio.ensure_future(self.probe(ill))
        await asyncio.shield(self._probing_ill)

    async def doubt(self, entry: Entry) -> None:
        """Ask the engine of a worker that failed a request; ill, it is out at once with all its ranks."""
        task = self._asking.get(entry.worker.url)
        if task is None:
            task = asyncio.ensure_future(self._client.health(Worker(entry.worker.url)))
            self._asking[entry.worker.url] = task
            task.add_done_callback(lambda _: self._asking.pop(entry.worker.url))
        if not await asyncio.shield(task):
            for rank in self._table.of(entry.worker.url):
                self._put_out(rank)

    def trust(self, url: str) -> None:
        """Let one probe that goes well bring back an engine that was started anew."""
        for entry in self._table.of(url):
            entry.up = self._up_after - 1

    async def close(self) -> None:
        """End the probes that nobody waits for any more."""
        asking = [*self._asking.values(), *([self._probing_ill] if self._probing_ill is not None else [])]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def ask_loads(self) -> None:
        """Note how many requests wait at the engines that tell it."""
        await asyncio.gather(*(self._ask_load(url) for url in self._table.urls if url not in self._silent))

    async def watch(
        self, interval: float, sleep: Callable[[float], Awaitable[None]], paused: Callable[[], bool]
    ) -> None:
        """Probe all engines every `interval` seconds but while `paused`; runs until it is cancelled."""
        while True:
            await sleep(interval)
            if not paused():
                await self.probe()

    async def watch_loads(self, interval: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Ask for loads every `interval` seconds; runs until it is cancelled."""
        while True:
            await sleep(interval)
            await self.ask_loads()

    async def _probe(self, url: str) -> None:
        well = await self._client.health(Worker(url))
        if well and self._versions and any(map(self._must_tell, self._table.of(url))):
            well = await self._serves_current(url)
        for entry in self._table.of(url):
            entry.up, entry.down = (entry.up + 1, 0) if well else (0, entry.down + 1)
            if well:
                self._bring_back(entry)
            elif entry.healthy and entry.down >= self._down_after:
                self._put_out(entry)

    def _must_tell(self, entry: Entry) -> bool:
        return not entry.healthy or entry.version != self._table.version

    async def _serves_current(self, url: str) -> bool:
        version = self._table.version
        try:
            served = await self._client.weight_version(Worker(url))
        except EngineError as error:
            log.warning("engine %s is healthy but gives no version: %s", url, error)
            return False
        return served == version == self._table.version

    def _bring_back(self, entry: Entry) -> None:
        if not entry.healthy and entry.up < self._up_after:
            return
        if not entry.healthy:
            entry.healthy, entry.failures = True, 0
            entry.breaker.answered()
        entry.version = self._table.version

    def _put_out(self, entry: Entry) -> None:
        if entry.healthy:
            log.warning("engine worker %s is out: it is not healthy", entry.worker)
        entry.healthy, entry.up = False, 0

    async def _ask_load(self, url: str) -> None:
        try:
            loads = {load.dp_rank: load.waiting for load in await self._client.load(Worker(url))}
        except EngineError as error:
            loads = {}
            if error.kind == "user":  # it has no such endpoint
                self._silent.add(url)
        for entry in self._table.of(url):
            rank = entry.worker.dp_rank
            entry.queued = (sum(loads.values()) if loads else None) if rank is None else loads.get(rank)
