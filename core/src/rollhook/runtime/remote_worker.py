"""A rollout worker process as the driver sees it, from its start to its end or death."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollhook.errors import RollhookError
from rollhook.failures import one_line
from rollhook.router import Worker
from rollhook.runtime.live import LiveEpisode
from rollhook.runtime.mirror import reflect
from rollhook.runtime.peer import Peer
from rollhook.runtime.worker_host import Seen, WorkerSpec

if TYPE_CHECKING:
    from rollhook.cluster import Cluster, Remote
    from rollhook.runtime.episode import EpisodeRequest, EpisodeResult

logger = logging.getLogger(__name__)

#: seconds that one poll waits for something to be said
POLL_SECONDS = 0.2
#: seconds without a sign of life after which a worker counts as dead
SILENCE = 120.0


class WorkerLostError(RollhookError):
    """A rollout worker process died, or said nothing for so long that it counts as dead."""

    boundary = "worker"


class RemoteWorker:
    """One process, and what it has told; made with `start`.

    `running` are the episodes that it has, by id; `loads` what its sessions put on each engine worker;
    `routing` the figures of its routing up to the newest weight update;
    `leases` the open leases of its sandboxes by nonce, each as the journal has it, with `sandbox_id` once
    that is known. `lost` is why it is gone, None while it lives.
    """

    def __init__(self, spec: WorkerSpec, remote: Remote, handlers: Mapping[str, Callable[..., Any]]) -> None:
        self.number = spec.number
        self.running: dict[str, LiveEpisode] = {}
        self.loads: dict[Worker, tuple[int, int]] = {}
        self.seen = Seen({}, (), {})
        self.routing: dict[str, float] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.url = ""
        self.lost: WorkerLostError | None = None
        self.gone = asyncio.Event()
        self._remote = remote
        own: dict[str, Callable[..., Any]] = {"loads": self._take_loads, "seen": self.show, "log": self._log}
        bound = {name: functools.partial(handler, self) for name, handler in handlers.items()}
        self.peer = Peer("the driver", {**own, **bound}, spec.log)
        self._attending = asyncio.ensure_future(self._attend())

    @classmethod
    async def start(
        cls, cluster: Cluster, spec: WorkerSpec, handlers: Mapping[str, Callable[..., Any]]
    ) -> RemoteWorker:
        """Start a process and let it build what needs no weights; `handlers` get the worker first.

        Raises what the building raises, WorkerLostError when the process dies.
        """
        target = "rollhook.runtime.worker_host:WorkerHost"
        name = f"rollout-worker-{spec.number}"
        remote = await cluster.place(target, spec, name=name, log=spec.log, calls=3)
        worker = cls(spec, remote, handlers)
        try:
            await worker.peer.ask("prepare")
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def run(self, environment: str, request: EpisodeRequest, live: LiveEpisode) -> EpisodeResult:
        """Run an episode there and return its result. What `live.cancel` ends is ended there, in order.

        Raises WorkerLostError when the worker is gone before there is a result.
        """
        self.running[request.episode_id] = live
        asking = asyncio.ensure_future(self.peer.ask("run", environment, request))
        told = False
        try:
            while True:
                try:
                    result: EpisodeResult = await asyncio.shield(asking)
                    return result
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if told or not live.cancelled or task is None or task.uncancel() > 0:
                        raise
                    told = True
                    self.peer.tell("cancel", request.episode_id, live.cancelled)
        finally:
            asking.cancel()
            del self.running[request.episode_id]

    def show(self, seen: Seen) -> None:
        """Let the live episodes here show what they do there."""
        self.seen = seen
        for name, state in seen.episodes.items():
            if (live := self.running.get(name)) is not None:
                reflect(live, state, time.monotonic())

    def note_lease(self, event: str, data: Mapping[str, Any]) -> None:
        """Remember what the worker's sandboxes are, for the day when it is lost."""
        nonce = data.get("nonce", "")
        if event == "lease":
            self.leases[nonce] = dict(data)
        elif event == "lease_created" and nonce in self.leases:
            self.leases[nonce]["sandbox_id"] = data["sandbox_id"]
        elif event in ("lease_released", "lease_lost"):
            self.leases.pop(nonce, None)

    async def stop(self, why: str = "was stopped") -> None:
        """End the process at once; safe to call twice."""
        self._lose(why)
        await asyncio.wait({self._attending})
        await self._remote.stop()

    # -- carrying messages

    async def _attend(self) -> None:
        """Carry messages both ways until the worker is lost."""
        try:
            async with asyncio.TaskGroup() as carriers:
                carriers.create_task(self._receive())
                carriers.create_task(self._send())
        except* RollhookError as errors:
            self._lose(str(errors.exceptions[0]))
        except* TimeoutError:
            self._lose(f"said nothing for {SILENCE:g} s")
        except* Exception as errors:
            logger.exception("what rollout worker %d says cannot be carried", self.number)
            self._lose(one_line(errors.exceptions[0]))

    async def _receive(self) -> None:
        while True:
            async with asyncio.timeout(SILENCE):
                messages = await self._remote.call("poll", POLL_SECONDS)
            self.peer.take(messages)

    async def _send(self) -> None:
        while True:
            messages = await self.peer.outgoing()
            async with asyncio.timeout(SILENCE):
                await self._remote.call("send", messages)

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = WorkerLostError(f"rollout worker {self.number}: {why}")
            self.peer.lose(self.lost)
            self.gone.set()
            self._attending.cancel()

    # -- what it tells

    def _take_loads(self, loads: Mapping[Worker, tuple[int, int]]) -> None:
        self.loads = dict(loads)

    def _log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "rollout worker %d: %s", self.number, text)
