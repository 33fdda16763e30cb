"""The process around a rollout worker: hears the driver and tells it what happens, on a loop of its own.

The driver asks for `prepare`, `load`, `open_policy`, `run`, `pause` and `close`, and tells `cancel`,
`resume`, `set_version`, `set_workers`, `came_back`, `drop` and `remote_loads`. The worker tells `journal`,
`loads`, `seen` and `log`, and asks for `journal_durable` and `revive`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollhook.router import Worker
from rollhook.rundir import RunDir
from rollhook.runtime.live import Live
from rollhook.runtime.mirror import EpisodeState, entries, states
from rollhook.runtime.parts import Parts
from rollhook.runtime.peer import Message, Peer
from rollhook.runtime.rollout_worker import RolloutWorker, build_environments
from rollhook.runtime.watchdog import Watchdog
from rollhook.session.workers import Entry

if TYPE_CHECKING:
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Recipe
    from rollhook.runtime.episode import EpisodeRequest, EpisodeResult
    from rollhook.session import PolicyClient

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: seconds between two reports of loads, and two of all that live.json wants
LOADS_INTERVAL, SEEN_INTERVAL = 0.1, 1.0
#: methods of the policy that the driver calls from afar
STEERED = ("resume", "set_version", "set_workers", "came_back", "drop")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class WorkerSpec:
    """What a rollout worker is built from; `number` counts from 1 to `count`, `host` is the driver's.

    Paths are shared.
    """

    number: int
    count: int
    recipe: Recipe
    plugins: Plugins
    scratch: Path
    log: Path
    run_id: str
    attempt: int
    host: str


@dataclass(frozen=True)
class Seen:
    """What a worker process has to show: its live episodes, engine workers, and counts of sandboxes."""

    episodes: Mapping[str, EpisodeState]
    engines: Sequence[Entry]
    sandboxes: Mapping[str, float]


class WorkerHost:
    """Placed by the cluster. `send` and `poll` carry messages; they are called from threads, at once."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._loop = asyncio.new_event_loop()
        self._worker = HostedWorker(spec)
        if not logging.getLogger().handlers:  # in a process of its own
            logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
            logging.getLogger("rollhook").setLevel(logging.INFO)
            logging.getLogger().addHandler(_Tell(self._worker.peer, self._loop))
        self._thread = threading.Thread(target=self._serve, name="rollout worker", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[Message]) -> None:
        """Take what the driver says."""
        self._loop.call_soon_threadsafe(self._worker.peer.take, messages)

    def poll(self, seconds: float) -> list[Message]:
        """Return what there is to say, waiting at most so long; hangs if the loop does."""
        return self._call(self._outgoing(seconds))

    def close(self) -> None:
        """End the loop; what it made should have been closed before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _outgoing(self, seconds: float) -> list[Message]:
        try:
            return await asyncio.wait_for(self._worker.peer.outgoing(), seconds)
        except TimeoutError:
            return []

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())  # Ray's, which children would inherit
        self._loop.run_forever()


class HostedWorker:
    """A rollout worker, steered by messages."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._stack = AsyncExitStack()
        self._live = Live()
        self._worker: RolloutWorker
        self._loads: dict[Worker, tuple[int, int]] = {}
        self.peer = Peer(
            f"rollout worker {spec.number}",
            {
                "prepare": self._prepare,
                "load": self._load,
                "open_policy": self._open_policy,
                "run": self._run,
                "pause": self._pause,
                "close": self._close,
                "cancel": self._cancel,
                "remote_loads": self._take_remote_loads,
                **{name: functools.partial(self._steer, name) for name in STEERED},
            },
            spec.log,
        )

    @property
    def _policy(self) -> PolicyClient:
        assert self._worker.policy is not None
        return self._worker.policy

    async def _prepare(self) -> None:
        """Build what needs no weights: sandbox pool, environments, agent."""
        spec = self._spec
        parts = Parts(spec.recipe, spec.plugins, spec.scratch, spec.run_id, spec.attempt)
        backend = await parts.open_backend(self._stack)
        pool = None
        if backend is not None:
            journal, share = _RemoteJournal(self.peer), (spec.number, spec.count)
            if socket.gethostname() != spec.host:  # the driver has looked at its own
                await parts.reap(backend, RunDir(spec.scratch.parent.parent), journal)
            pool = parts.make_pool(backend, journal, self._stack, share)
        capabilities = backend.capabilities if backend is not None else frozenset()
        environments = await build_environments(parts, capabilities, self._stack)
        self._worker = RolloutWorker(parts, environments, pool, self._live)
        self._stack.push_async_callback(self._worker.aclose)
        self._stack.enter_context(Watchdog(limit=1.0, report=True))
        for work in (self._report_loads(), self._report_seen()):
            task = asyncio.ensure_future(work)
            self._stack.callback(task.cancel)

    async def _load(self, model_dir: Path) -> None:
        await self._worker.load(model_dir)

    async def _open_policy(self, workers: Sequence[Worker], version: int) -> str:
        """Open the policy; return the address of the sessions' HTTP face."""

        async def revive(worker: Worker) -> bool:
            return bool(await self.peer.ask("revive", worker))

        await self._worker.open_policy(workers, version, revive)
        url = self._worker.urls[0]
        logger.info("process %d has its sessions at %s", os.getpid(), url)
        return url

    async def _run(self, environment: str, request: EpisodeRequest) -> EpisodeResult:
        return await self._worker.runners[environment].run(request)

    async def _close(self) -> None:
        """Release everything once the episodes, which the driver has withdrawn, have ended."""
        if ending := [live.task for live in self._live.episodes.values()]:
            await asyncio.wait(ending)
        await self._stack.aclose()

    async def _cancel(self, episode_id: str, reason: str) -> None:
        """End an episode; in a task, as `_run` is, so that this comes after one that was just begun."""
        if (live := self._live.episodes.get(episode_id)) is not None:
            live.cancel(reason)

    def _steer(self, method: str, *args: Any) -> None:
        getattr(self._policy, method)(*args)

    def _take_remote_loads(self, loads: Mapping[Worker, tuple[int, int]]) -> None:
        self._policy.table.set_remote(loads)

    async def _pause(self, next_version: int) -> tuple[Seen, dict[str, float]]:
        """Let new requests wait, and with `router.drain_on_update` end those under way first.

        Returns what is seen then, which holds until `resume` but for episodes that end, and the routing's
        figures since the last pause.
        """
        self._policy.pause(next_version)
        if drain := self._spec.recipe.router.drain_on_update:
            await self._policy.fleet.idle(drain)
        return self._seen(), self._worker.router_stats()

    def _seen(self) -> Seen:
        return Seen(states(self._live), entries(self._worker.table), self._worker.sandbox_stats())

    async def _report_loads(self) -> None:
        while True:
            await asyncio.sleep(LOADS_INTERVAL)
            if self._worker.policy is not None:
                loads = self._worker.policy.table.local_loads()
                if loads != self._loads:
                    self._loads = loads
                    self.peer.tell("loads", loads)

    async def _report_seen(self) -> None:
        while True:
            await asyncio.sleep(SEEN_INTERVAL)
            self.peer.tell("seen", self._seen())


class _RemoteJournal:
    """The driver's journal, as a pool in another process writes its leases into it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def append(self, event: str, /, **data: Any) -> int:
        """Add an entry; its number is not known here."""
        self._peer.tell("journal", event, data)
        return 0

    async def append_durable(self, event: str, /, **data: Any) -> int:
        """Add an entry and return its number once it is durable."""
        return int(await self._peer.ask("journal_durable", event, data))


class _Tell(logging.Handler):
    """Tells the driver of warnings, for whoever watches the run."""

    def __init__(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._peer = peer
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record from any thread."""
        told = (record.name, record.levelno, record.getMessage())
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._peer.tell, "log", *told)
