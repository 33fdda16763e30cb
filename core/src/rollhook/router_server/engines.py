"""The engines behind the router: registered, expanded to their ranks, and let go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from rollhook.engine.client import EngineClient
from rollhook.engine.server_info import ServerInfo, dp_rank_field
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.router_server.names import worker_name
from rollhook.router_server.pool import Pool

log = logging.getLogger(__name__)

DpAware = Literal["auto", "on", "off"]


@dataclass
class Engine:
    """A server, or one rank of it, as it was registered: what it says of itself, and how it stands."""

    worker: Worker
    info: ServerInfo = field(default_factory=ServerInfo)
    state: Literal["pending", "ready", "failed"] = "pending"
    problem: str = ""
    joining: asyncio.Task[None] | None = None


class Engines:
    """Registers engines in the background: one is routable once it is healthy and has told its ranks.

    `dp_aware`: `auto` makes a worker of each rank where an engine has several, `on` of each rank of every
    engine, which must say how many they are, `off` leaves the choice of a rank to the engine. An engine that
    is not healthy within `startup` seconds is given up until it is registered again.
    """

    def __init__(
        self,
        pool: Pool,
        client: EngineClient,
        *,
        dp_aware: DpAware = "auto",
        startup: float = 1800.0,
        poll: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._client = client
        self._dp_aware = dp_aware
        self._startup = startup
        self._poll = poll
        self._sleep = sleep
        self._now = now
        self._registered: dict[Worker, Engine] = {}

    @property
    def urls(self) -> list[str]:
        """The base URLs of all engines, each once whatever its ranks."""
        registered = (worker.url for worker in self._registered)
        return list(dict.fromkeys([*self._pool.table.urls, *registered]))

    def of(self, worker: Worker) -> Engine | None:
        """Return the registration that a worker comes from, None without one."""
        return self._registered.get(worker) or self._registered.get(Worker(worker.url))

    def rank_field(self, worker: Worker) -> str:
        """Return the body's field for the rank, which depends on the engine's release."""
        engine = self.of(worker)
        return dp_rank_field(engine.info.version if engine else "")

    def register(self, worker: Worker) -> Engine:
        """Register an engine, or one rank of it; again: ask it anew what it is."""
        engine = self._registered.setdefault(worker, Engine(worker))
        if engine.joining is None or engine.joining.done():
            engine.state, engine.problem = "pending", ""
            engine.joining = asyncio.ensure_future(self._join(engine))
        return engine

    def remove(self, worker: Worker) -> None:
        """Take a worker out, an engine with all its ranks; what is under way there goes on."""
        for other in list(self._registered):
            if other == worker or (worker.dp_rank is None and other.url == worker.url):
                joining = self._registered.pop(other).joining
                if joining is not None:
                    joining.cancel()
                log.info("engine %s left", worker_name(other))
        self._pool.remove(worker)

    async def close(self) -> None:
        """Give up registrations that are pending."""
        tasks = [engine.joining for engine in self._registered.values() if engine.joining is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, engine: Engine) -> None:
        deadline, said = self._now() + self._startup, ""
        while not await self._ready(engine):
            if self._now() >= deadline:
                engine.state = "failed"
                log.error("engine %s is given up: %s", worker_name(engine.worker), engine.problem)
                return
            if engine.problem != said:
                log.info("engine %s is waited for: %s", worker_name(engine.worker), engine.problem)
                said = engine.problem
            await self._sleep(self._poll)
        workers = self._workers(engine)
        engine.state, engine.problem = "ready", ""
        self._pool.add(workers)
        log.info("engine %s joined as %s", engine.worker.url, ", ".join(map(worker_name, workers)))

    async def _ready(self, engine: Engine) -> bool:
        """Return whether an engine is healthy and has said what it is."""
        if not await self._client.health(engine.worker):
            engine.problem = f"{engine.worker.url}/health does not answer with 200"
            return False
        try:
            engine.info = await self._client.server_info(engine.worker)
        except EngineError as error:
            engine.problem = str(error)
            # other servers of OpenAI's API have no such endpoint, and no ranks
            return error.kind == "user" and self._dp_aware != "on"
        return True

    def _workers(self, engine: Engine) -> list[Worker]:
        url = engine.worker.url
        if engine.worker.dp_rank is not None or self._dp_aware == "off":
            return [engine.worker]
        if self._dp_aware == "on":
            return [Worker(url, rank) for rank in range(engine.info.dp_size)]
        return engine.info.workers(url)
