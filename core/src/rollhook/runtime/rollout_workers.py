"""Rollout worker processes: episodes are shared out among them, and those of one that dies run elsewhere."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook import budgets
from rollhook.engine.client import EngineClient
from rollhook.engine.weights import update_workers
from rollhook.errors import EngineError, RollhookError, RunError
from rollhook.records import EpisodeRecord, Outcome
from rollhook.router import Worker
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
from rollhook.runtime.live import Live, LiveEpisode
from rollhook.runtime.mirror import begin_anew, merged, total_loads, total_stats
from rollhook.runtime.orphans import Orphans
from rollhook.runtime.remote_worker import RemoteWorker, WorkerLostError
from rollhook.runtime.worker_host import LOADS_INTERVAL, WorkerSpec

if TYPE_CHECKING:
    from rollhook.cluster import Cluster
    from rollhook.rundir import Attempt
    from rollhook.runtime.parts import Parts
    from rollhook.runtime.rollout_worker import Revive
    from rollhook.sandbox import SandboxBackend
    from rollhook.session.workers import Entry

logger = logging.getLogger(__name__)

#: deaths in a row of a worker, each within `STEADY` seconds of its start, after which it is given up
MOST_DEATHS = 5
STEADY = 600.0
#: seconds before the second start after a death; they double from start to start
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: runs of one episode that end with the death of its worker, after which it counts as failed
MOST_RUNS = 3


class RolloutWorkers:
    """`rollout.workers` processes, and a runner for each environment that shares episodes out among them.

    A worker that dies is replaced; its sandboxes are deleted here, its episodes begin anew elsewhere under
    their ids. `moved` is called when the addresses in `urls` have changed.
    """

    def __init__(
        self,
        parts: Parts,
        attempt: Attempt,
        cluster: Cluster,
        environments: Iterable[str],
        backend: SandboxBackend | None,
        live: Live,
        moved: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._recipe = parts.recipe
        self._attempt = attempt
        self._cluster = cluster
        self._moved = moved
        self._orphans = None
        if backend is not None:
            self._orphans = Orphans(backend, attempt.journal, attempt.run.run_id, attempt.number)
        self.live = live
        self.runners: dict[str, Runner] = {name: _RemoteRunner(self, name) for name in environments}
        self._count = self._recipe.rollout.workers
        self._workers: list[RemoteWorker] = []
        self._starting: list[asyncio.Task[RemoteWorker]] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._given_up = 0
        self._changed = asyncio.Event()
        #: held while workers are told of engines, so that none joins with what was true before
        self._telling = asyncio.Lock()
        self._reviving = asyncio.Lock()
        self._client = EngineClient()
        self._model_dir: Path
        self._engines: tuple[list[Worker], int] = ([], 0)
        self._revive: Revive
        #: the last sandbox stats of workers that are gone
        self._past: list[dict[str, float]] = []

    def place(self) -> None:
        """Begin to start the processes; `load` waits for them."""
        numbers = range(1, self._count + 1)
        self._starting = [asyncio.ensure_future(self._start(number)) for number in numbers]

    async def load(self, model_dir: Path) -> None:
        """Let the workers read what renders messages for a model; raises what kept one from starting."""
        self._model_dir = model_dir
        for starting in self._starting:
            self._workers.append(await starting)
        await asyncio.gather(*(worker.peer.ask("load", model_dir) for worker in self._workers))

    async def open_policy(self, workers: Sequence[Worker], version: int, revive: Revive) -> None:
        """Let each worker open its policy; one that dies from then on is replaced."""
        self._engines, self._revive = (list(workers), version), revive
        for worker in self._workers:
            worker.url = await worker.peer.ask("open_policy", *self._engines)
            self._in_background(self._keep(worker))
        self._in_background(self._exchange_loads())
        self._moved()

    @property
    def urls(self) -> list[str]:
        """The addresses of the sessions' HTTP faces, one for each worker that lives."""
        return [worker.url for worker in self._workers if worker.url]

    @property
    def table(self) -> Iterable[Entry]:
        """The engine workers, as all processes together see them."""
        return merged(worker.seen.engines for worker in self._workers)

    async def update_weights(self, path: Path, version: int) -> dict[Worker, str]:
        """Bring all engines to a version while requests wait; return the workers that failed, and why.

        Raises EngineError for a version that does not follow the current one.
        """
        async with self._telling:
            engines, current = self._engines
            if version <= current:
                raise EngineError(f"weight version {version} does not follow {current}, which is served")
            try:
                await self._pause(version)
                mode = self._recipe.rollout.pause_mode
                out = {entry.worker for entry in self.table if not entry.healthy}
                failed = await update_workers(self._client, engines, path, version, mode, out=out)
                self._engines = (engines, version)
                self._tell("set_version", version, list(failed))
            finally:
                self._tell("resume")
        return failed

    async def _pause(self, version: int) -> None:
        """Close every worker's gate; what their episodes are doing is seen here then as it is there."""

        async def pause(worker: RemoteWorker) -> None:
            try:
                seen, worker.routing = await worker.peer.ask("pause", version)
                worker.show(seen)
            except WorkerLostError as error:
                logger.debug("%s while it was paused", error)  # its keeper says so

        await asyncio.gather(*map(pause, list(self._workers)))

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Say which engine workers exist, all healthy and serving `version`."""
        self._engines = (list(workers), version)
        self._tell("set_workers", *self._engines)

    def came_back(self, worker: Worker) -> None:
        """Let all look at once at an engine that was started anew."""
        self._tell("came_back", worker)

    def drop(self, worker: Worker) -> None:
        """Take an engine out for good, with all its ranks."""
        engines, version = self._engines
        self._engines = ([each for each in engines if each.url != worker.url], version)
        self._tell("drop", worker)

    def sandbox_stats(self) -> dict[str, float]:
        """Return the counts of all pools together, as metrics."""
        return total_stats([*self._past, *(worker.seen.sandboxes for worker in self._workers)])

    def router_stats(self) -> dict[str, float]:
        """Return the routing's figures between the two newest weight updates, as metrics."""
        each = [worker.routing for worker in self._workers]
        counts = ("router/retries", "router/breaker_openings")
        names = dict.fromkeys(name for figures in each for name in figures)
        found = {name: [figures[name] for figures in each if name in figures] for name in names}
        return {n: sum(v) if n in counts else sum(v) / len(v) for n, v in found.items()}

    async def free(self) -> RemoteWorker:
        """Return the worker with the fewest episodes, waiting while there is none.

        Raises RunError once all have been given up, and what keeps others from being started.
        """
        while not self._workers:
            for keeper in self._keepers:
                if keeper.done() and not keeper.cancelled() and (error := keeper.exception()) is not None:
                    raise error
            if self._given_up == self._count:
                raise RunError(
                    f"every rollout worker died {MOST_DEATHS} times in a row; their logs are in "
                    f"{self._attempt.logs}"
                )
            self._changed.clear()
            await self._changed.wait()
        return min(self._workers, key=lambda worker: (len(worker.running), worker.number))

    def unrun(self, name: str, request: EpisodeRequest, outcome: Outcome) -> EpisodeResult:
        """Return the result of an episode that no worker has brought to its end."""
        task = request.task
        record = EpisodeRecord(
            episode_id=request.episode_id,
            run_id=self._attempt.run.run_id,
            attempt=self._attempt.number,
            purpose=request.purpose,
            group_id=request.group_id,
            task_id=task.id,
            task_digest=task.digest,
            environment=name,
            family=task.family,
            seed=request.seed,
            ended="cancelled" if outcome.kind == "cancelled" else "infra",
            outcome=outcome,
            reward=None,
            started_at=time.time(),
        )
        return EpisodeResult(record)

    def limit(self, request: EpisodeRequest) -> float:
        """Return the seconds that an episode may take in all."""
        own = self._recipe.budgets
        return budgets.resolve(own, request.task.limits).episode + own.slack

    async def aclose(self) -> None:
        """Let every worker release what it has, then end it; safe to call twice."""
        tasks = [*self._keepers, *self._starting]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        started = [t.result() for t in self._starting if not t.cancelled() and t.exception() is None]
        workers = [*self._workers, *(worker for worker in started if worker not in self._workers)]
        self._keepers, self._starting, self._workers = [], [], []
        await asyncio.gather(*map(self._end, workers))
        if self._orphans is not None:
            await self._orphans.aclose()
        await self._client.aclose()

    async def _end(self, worker: RemoteWorker) -> None:
        try:
            await worker.peer.ask("close")
        except RollhookError as error:
            logger.warning("%s", error)
        await worker.stop()
        if self._orphans is not None:
            self._orphans.take(worker.leases.values())

    # -- workers that come and go

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        keeper = asyncio.ensure_future(work)
        keeper.add_done_callback(lambda _: self._changed.set())
        self._keepers.append(keeper)

    async def _start(self, number: int) -> RemoteWorker:
        spec = WorkerSpec(
            number,
            self._count,
            self._recipe,
            self._parts.plugins,
            self._attempt.path,
            self._attempt.logs / f"rollout-worker-{number}.log",
            self._attempt.run.run_id,
            self._attempt.number,
            socket.gethostname(),
        )
        handlers: dict[str, Callable[..., Any]] = {
            "journal": self._note,
            "journal_durable": self._note_durably,
            "revive": self._revive_once,
        }
        return await RemoteWorker.start(self._cluster, spec, handlers)

    async def _keep(self, worker: RemoteWorker) -> None:
        """Wait for a worker's death and start another in its place, again and again."""
        number, deaths, began = worker.number, 0, time.monotonic()
        lives: RemoteWorker | None = worker
        while True:
            if lives is not None:
                await lives.gone.wait()
                why: RollhookError | None = lives.lost
                await self._bury(lives)
            deaths = 1 if time.monotonic() - began > STEADY else deaths + 1
            if deaths >= MOST_DEATHS:
                logger.error("%s; it is given up after %d deaths in a row", why, deaths)
                self._given_up += 1
                self._changed.set()
                return
            logger.warning("%s; its episodes are run again, and it is started anew", why)
            await asyncio.sleep(min(FIRST_PAUSE * 2.0 ** (deaths - 1), LONGEST_PAUSE))
            began, lives = time.monotonic(), None
            try:
                lives = await self._start(number)
                await self._join(lives)
            except RollhookError as error:
                why = error
                if lives is not None:
                    await lives.stop(str(error))

    async def _join(self, worker: RemoteWorker) -> None:
        """Let a worker that was started anew have its share."""
        await worker.peer.ask("load", self._model_dir)
        async with self._telling:
            engines = self._engines
            worker.url = await worker.peer.ask("open_policy", *engines)
            self._workers.append(worker)
            if engines != self._engines:
                worker.peer.tell("set_workers", *self._engines)
        self._changed.set()
        self._moved()

    async def _bury(self, worker: RemoteWorker) -> None:
        """Take a worker that is gone out of all books, and have its sandboxes deleted."""
        if worker in self._workers:
            self._workers.remove(worker)
        episodes, lost = list(worker.running), str(worker.lost)
        self._attempt.journal.append("worker_lost", worker=worker.number, reason=lost, episodes=episodes)
        await worker.stop()
        self._past.append({**worker.seen.sandboxes, "sandbox/live": 0.0, "sandbox/creating": 0.0})
        if self._orphans is not None:
            self._orphans.take(worker.leases.values())
        self._moved()

    def _tell(self, what: str, *args: Any) -> None:
        for worker in self._workers:
            worker.peer.tell(what, *args)

    async def _exchange_loads(self) -> None:
        """Tell each worker what the others put on the engines; with its own interval this takes 0.2 s."""
        told: dict[RemoteWorker, Mapping[Worker, tuple[int, int]]] = {}
        while True:
            await asyncio.sleep(LOADS_INTERVAL)
            for worker in self._workers:
                others = total_loads(other.loads for other in self._workers if other is not worker)
                if others != told.get(worker, {}):
                    told[worker] = others
                    worker.peer.tell("remote_loads", others)

    # -- what workers tell and ask for

    def _note(self, worker: RemoteWorker, event: str, data: Mapping[str, Any]) -> int:
        worker.note_lease(event, data)
        return self._attempt.journal.append(event, **data)

    async def _note_durably(self, worker: RemoteWorker, event: str, data: Mapping[str, Any]) -> int:
        worker.note_lease(event, data)
        return await self._attempt.journal.append_durable(event, **data)

    async def _revive_once(self, _: RemoteWorker, worker: Worker) -> bool:
        """Have an engine's server started anew, once for all who find it dead."""
        async with self._reviving:
            try:
                well = await self._client.health(worker)
                if well and await self._client.weight_version(worker) == self._engines[1]:
                    return True
            except EngineError as error:
                logger.debug("%s", error)
            return await self._revive(worker)


class _RemoteRunner:
    """Runs episodes of one environment on the workers."""

    def __init__(self, workers: RolloutWorkers, name: str) -> None:
        self._workers = workers
        self._name = name

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Run one episode on the worker that has the fewest, and anew on another when that one dies.

        Raises RunError when no worker is left.
        """
        workers, name, cause = self._workers, self._name, ""
        with workers.live.running(request, workers.limit(request)) as live:
            for _ in range(MOST_RUNS):
                worker = await self._free(live)
                if worker is None:
                    return workers.unrun(name, request, Outcome("cancelled", cause=live.cancelled))
                try:
                    return await worker.run(name, request, live)
                except WorkerLostError as error:
                    cause = str(error)
                    begin_anew(live, time.monotonic())
        cause = f"it was run {MOST_RUNS} times and its worker died each time ({cause})"
        return workers.unrun(name, request, Outcome("infra_error", boundary="worker", cause=cause))

    async def _free(self, live: LiveEpisode) -> RemoteWorker | None:
        """Return a worker; None when the episode is cancelled before it has one."""
        try:
            worker = await self._workers.free()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not live.cancelled or task is None or task.uncancel() > 0:
                raise
        return None if live.cancelled else worker
