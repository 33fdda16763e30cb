"""The rollout side of a run: environments, sandboxes, engines, policy, and the episodes they make."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from rollhook.durable import to_json, write_atomic
from rollhook.engine import Engine, SamplingParams
from rollhook.engine.client import EngineClient
from rollhook.engine.ranks import expand
from rollhook.environment import Environment, Task
from rollhook.errors import EngineError, RollhookError, UsageError, first_of
from rollhook.records import Group
from rollhook.router import Worker
from rollhook.runtime.batch import Batch, Prompt
from rollhook.runtime.draw import Draw, share_out
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
from rollhook.runtime.evaluate import Evaluation, choose, evaluate
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.live import Live
from rollhook.runtime.live_file import publishing
from rollhook.runtime.parts import Parts
from rollhook.runtime.producer import Producer
from rollhook.runtime.reuse import owned_prompts
from rollhook.runtime.rollout_worker import RolloutWorker, build_environments, distinct, sampling_of
from rollhook.runtime.rollout_workers import RolloutWorkers
from rollhook.runtime.seeds import derive
from rollhook.runtime.slots import Slots
from rollhook.session import Policy
from rollhook.session.fleet_stats import worker_names

if TYPE_CHECKING:
    from rollhook.cluster import Cluster
    from rollhook.engine.base import Placement
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import Attempt
    from rollhook.sandbox import SandboxBackend

logger = logging.getLogger(__name__)

Finished = Callable[[EpisodeResult], None]


class Rollouts:
    """What makes episodes in a run; entered once weights exist, left when the run ends.

    They are made in this process or, with `rollout.workers` above 1, in others on `cluster`.

    Parts are released in the reverse order of their making, also after a failed start.
    """

    def __init__(
        self,
        parts: Parts,
        attempt: Attempt,
        finished: Finished,
        draining: Callable[[], bool] = lambda: False,
        cluster: Cluster | None = None,
    ) -> None:
        self._parts = parts
        self._recipe: Recipe = parts.recipe
        self._attempt = attempt
        self._finished = finished
        self._draining = draining
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._cluster = cluster
        self._rollout: RolloutWorker | RolloutWorkers
        self._workers: list[Worker] = []
        self._draws: dict[str, Draw] = {}
        self._tasks: dict[tuple[str, str], list[Task]] = {}
        self._names = distinct([use.use for use in self._recipe.environment])
        self._producer: Producer | None = None
        self.live = Live()
        self._weights: tuple[Path, int] | None = None
        self._reviving = asyncio.Lock()
        self._lost: dict[str, EngineError] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}
        #: what a reader of the results must know of sandboxes and data
        self.descriptions: dict[str, str] = {}

    async def prepare(self) -> None:
        """Build what needs no weights: environments with their tasks, the sandbox pool, the agent.

        Raises UsageError when a split is empty or the sandbox cannot be had here.
        """
        recipe = self._recipe
        backend = await self._parts.open_backend(self._stack)
        if backend is not None:
            await self._parts.reap(backend, self._attempt.run, self._attempt.journal)
            if described := backend.describe():
                self.descriptions["sandbox"] = ", ".join(f"{key} {text}" for key, text in described.items())
        capabilities = backend.capabilities if backend is not None else frozenset()
        environments = await build_environments(self._parts, capabilities, self._stack)
        for (name, environment), use in zip(environments.items(), recipe.environment, strict=True):
            await self._read_tasks(name, environment, use.split, recipe.evaluation.split)
            of = f"{name} " if len(environments) > 1 else ""
            self.descriptions.update({f"{of}{key}": text for key, text in environment.describe().items()})
        self._rollout = self._open_rollout(backend, environments)
        self._stack.push_async_callback(self._rollout.aclose)
        published = publishing(self._attempt.path, self.live, lambda: self._rollout.table)
        await self._stack.enter_async_context(published)

    def _open_rollout(
        self, backend: SandboxBackend | None, environments: Mapping[str, Environment]
    ) -> RolloutWorker | RolloutWorkers:
        """Return what runs the episodes: this process, or `rollout.workers` others, which begin to start."""
        parts, attempt = self._parts, self._attempt
        if self._recipe.rollout.workers == 1:
            pool = parts.make_pool(backend, attempt.journal, self._stack) if backend is not None else None
            return RolloutWorker(parts, environments, pool, self.live)
        assert self._cluster is not None
        workers = RolloutWorkers(
            parts, attempt, self._cluster, environments, backend, self.live, self._say_where
        )
        workers.place()
        return workers

    async def start(self, placement: Placement, model_dir: Path, version: int) -> None:
        """Start the engines with these weights and open the policy."""
        recipe = self._recipe
        if recipe.engine is None:
            raise UsageError("a recipe that asks a policy needs an engine")
        self._engine = self._parts.build("engine", recipe.engine, "engine")
        self._stack.push_async_callback(self._engine.stop)
        self._stack.push_async_callback(self._rollout.aclose)  # sessions end before their engines
        try:
            async with asyncio.TaskGroup() as starting:
                engines = starting.create_task(self._engine.start(placement, model_dir, version))
                starting.create_task(self._rollout.load(model_dir))
        except ExceptionGroup as errors:
            raise first_of(errors) from None
        if described := self._engine.describe():
            self.descriptions["engine"] = ", ".join(f"{key} {text}" for key, text in described.items())
        async with aclosing(EngineClient()) as client:
            self._workers = await expand(client, engines.result(), recipe.router.dp_aware)
        self._weights = (model_dir, version)
        await self._rollout.open_policy(self._workers, version, self._revive)
        self._say_where()

    async def use(self, policy: Policy) -> None:
        """Let the agents of every environment ask this policy, in the process and over HTTP."""
        assert isinstance(self._rollout, RolloutWorker)
        await self._rollout.use(policy)
        self._say_where()

    def held_out(self) -> list[tuple[str, Runner, list[Task]]]:
        """Return each environment's name, runner and tasks of an evaluation, one for each episode."""
        wanted, seed = self._recipe.evaluation, self._recipe.seed
        return [
            (name, runner, choose(self._tasks[name, wanted.split], wanted.episodes, wanted.samples, seed))
            for name, runner in self._rollout.runners.items()
        ]

    async def produce(self, step: int, lineage: Lineage) -> None:
        """Start making groups, with `step` steps done: first of the prompts that earlier attempts left."""
        for name, state in (lineage.draw or {}).items():
            self._draws[name].load(state)
        run = self._attempt.run
        owned, refused = await asyncio.to_thread(owned_prompts, lineage, run, self._recipe, self._task)
        for episode_id, reason in refused.items():
            self._attempt.journal.append("episode_rejected", episode_id=episode_id, reason=reason)
        self._producer = Producer(
            self._rollout.runners,
            self._recipe.rollout,
            steps=self._recipe.steps,
            seed=self._recipe.seed,
            attempt=self._attempt.number,
            draw=self._draw_prompts,
            accept=self._parts.accept_group,
            started=self._journal_start,
            finished=self._finished,
            live=self.live,
            draining=self._draining,
            pressure=self._queue_seconds,
        )
        self._stack.push_async_callback(self._producer.aclose)
        self._producer.start(step, lineage.versions, next_step=lineage.next_step, owned=owned)

    async def batch(self) -> Batch:
        """Return the groups of the next training step once they are there."""
        assert self._producer is not None
        return await self._producer.batch()

    def pause(self) -> None:
        """Start no further group until an evaluation has ended; those under way go on."""
        if self._producer is not None:
            self._producer.pause()

    def observe(self, groups: Sequence[Group]) -> None:
        """Let the draws learn the pass rates of finished groups."""
        for group in groups:
            rewards = group.rewards
            if rewards:
                rate = sum(r >= 1.0 for r in rewards) / len(rewards)
                self._draws[group.environment].observe(group.family, rate)

    async def evaluate(self, step: int, begun: Callable[[str, int], None]) -> list[Evaluation]:
        """Evaluate on the held-out split at training temperature and, if asked, greedily.

        No group is started meanwhile; those under way go on and share the slots.
        """
        self.pause()
        try:
            return await self._evaluate(step, begun)
        finally:
            if self._producer is not None:
                self._producer.resume()

    async def _evaluate(self, step: int, begun: Callable[[str, int], None]) -> list[Evaluation]:
        plans = [sampling_of(self._recipe)]
        if self._recipe.evaluation.greedy:
            plans.append(SamplingParams(temperature=0.0))
        found = []
        for name, runner, tasks in self.held_out():
            for plan in plans:
                begun(f"evaluate ({'greedy' if plan.temperature == 0 else 'sampled'})", len(tasks))
                evaluation = await evaluate(
                    runner,
                    tasks,
                    plan,
                    step=step,
                    attempt=self._attempt.number,
                    seed=derive(self._recipe.seed, "evaluation", step),
                    slots=self._slots(),
                    started=self._journal_start,
                    finished=self._finished,
                    name=name if len(self._names) > 1 else "",
                )
                found.append(evaluation)
        return found

    def _slots(self) -> Slots:
        """Return the slots of an evaluation: those of the training episodes, once there are any."""
        return self._producer.slots if self._producer else Slots(self._recipe.rollout.max_concurrent)

    def _queue_seconds(self) -> float | None:
        """Return how long requests queue at the engines, as a mean over the healthy ones."""
        waits = [entry.queue_seconds for entry in self._rollout.table if entry.healthy]
        return sum(waits) / len(waits) if waits else None

    async def update(self, path: Path, version: int, step: int) -> None:
        """Bring weights with `step` steps to every engine; one that fails is revived or leaves.

        While others have the weights nobody waits for that.
        """
        self._weights = (path, version)
        if self._engine is not None:
            self._engine.published(path, version)
        if self._producer is not None:
            self._producer.publishing(version, step)
        failed = await self._rollout.update_weights(path, version)
        lost = {worker.url for worker in failed}.intersection(self._lost)
        self._lost = {url: self._lost[url] for url in lost}  # the others have come back
        gone = {Worker(worker.url): None for worker in self._workers if worker in failed}
        if len(gone) < len({worker.url for worker in self._workers}):
            for worker in gone:
                if worker.url not in self._returning:
                    self._returning[worker.url] = asyncio.ensure_future(self._bring_back(worker))
        else:
            await self._bring_back_all(list(gone), version)
        if self._producer is not None:
            self._producer.published(version, step)

    async def _bring_back(self, worker: Worker) -> None:
        """Start an engine anew that did not take the weights, or leave it out."""
        try:
            if await self._revive(worker):
                self._rollout.came_back(worker)
                return
        except RollhookError as error:
            logger.error("an engine does not start anew and is left out: %s", error)
        finally:
            del self._returning[worker.url]
        self._workers = [w for w in self._workers if w.url != worker.url]
        self._rollout.drop(worker)

    async def _bring_back_all(self, workers: Sequence[Worker], version: int) -> None:
        """Start the only engines anew, as far as they can be. Raises EngineError when none can."""
        why = EngineError(f"no engine took weight version {version}; their logs are in {self._attempt.logs}")
        for worker in workers:
            try:
                back = await self._revive(worker)
            except EngineError as error:
                logger.error("an engine does not start anew and is left out: %s", error)
                back, why = False, error
            if not back:
                self._workers = [w for w in self._workers if w.url != worker.url]
        if not self._workers:
            raise why
        self._rollout.set_workers(self._workers, version)

    async def _revive(self, worker: Worker) -> bool:
        """Start the server of a worker anew with the newest weights; False where the engine cannot do that.

        Raises EngineError when it does not start, and is not tried again then.
        """
        assert self._engine is not None
        assert self._weights is not None
        async with self._reviving:
            if worker.url in self._lost:
                raise self._lost[worker.url]
            try:
                return await self._engine.revive(worker, *self._weights)
            except EngineError as error:
                self._lost[worker.url] = error
                raise

    def worker_names(self) -> dict[str, str]:
        """Return where the engine workers are, by the name that each has in the metrics."""
        return {
            name: entry.worker.url + ("" if entry.worker.dp_rank is None else f" rank {entry.worker.dp_rank}")
            for name, entry in worker_names(self._rollout.table).items()
        }

    def sandbox_stats(self) -> dict[str, float]:
        """Return the pool's counts, as metrics."""
        return self._rollout.sandbox_stats()

    def router_stats(self) -> dict[str, float]:
        """Return the routing's figures since this was called last, as metrics."""
        return self._rollout.router_stats()

    async def aclose(self) -> None:
        """Release everything: engines, sandboxes, environments."""
        returning = list(self._returning.values())
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, return_exceptions=True)
        await self._stack.aclose()

    def _say_where(self) -> None:
        """Write the addresses of the sessions' HTTP faces, one per process, into `gateway.json`."""
        urls = self._rollout.urls
        address = {"schema": 1, "url": urls[0] if urls else None, "urls": urls}
        write_atomic(self._attempt.path / "gateway.json", to_json(address) + b"\n")

    async def _read_tasks(self, name: str, environment: Environment, train: str, heldout: str) -> None:
        splits = {train} | ({heldout} if self._recipe.evaluation.every else set())
        for split in splits:
            tasks = await asyncio.to_thread(environment.tasks, split)
            usable = [task for task in tasks if task.problem is None]
            if not usable:
                first = next((task.problem for task in tasks if task.problem), "it is empty")
                raise UsageError(f"environment {name}: split {split!r} has no task that can run: {first}")
            if len(usable) < len(tasks):
                logger.warning(
                    "environment %s: %d of %d tasks of split %s cannot run; `rollhook tasks list` says why",
                    name, len(tasks) - len(usable), len(tasks), split,
                )  # fmt: skip
            self._tasks[name, split] = usable
        rollout = self._recipe.rollout
        self._draws[name] = Draw(
            self._tasks[name, train],
            how=rollout.draw,
            floor=rollout.draw_floor,
            seed=derive(self._recipe.seed, "tasks", name),
        )

    def _journal_start(self, request: EpisodeRequest) -> None:
        self._attempt.journal.append(
            "episode_started",
            episode_id=request.episode_id,
            group_id=request.group_id,
            task_id=request.task.id,
            seed=request.seed,
        )

    async def _draw_prompts(self, step: int) -> list[Prompt]:
        """Draw a nominal step's prompts; of several environments, by weight. On disk when this returns."""
        before = [self._draws[name].drawn for name in self._names]
        weights = [use.weight for use in self._recipe.environment]
        counts = share_out(self._recipe.rollout.batch_groups, weights, before)
        drawn = [
            (task, name)
            for name, wanted in zip(self._names, counts, strict=True)
            for task in self._draws[name].take(wanted, step)
        ]
        prompts = [Prompt(f"s{step:05d}-g{n:03d}", task, name) for n, (task, name) in enumerate(drawn)]
        await self._attempt.journal.append_durable(
            "prompts",
            step=step,
            prompts=[
                {"group_id": each.group_id, "task_id": each.task.id, "environment": each.environment}
                for each in prompts
            ],
            draw={name: draw.state() for name, draw in self._draws.items()},
        )
        return prompts

    def _task(self, name: str, task_id: str) -> Task | None:
        """Return a training task by id; None when the environment has it no more."""
        number = self._names.index(name) if name in self._names else -1
        split = self._recipe.environment[number].split
        return next((task for task in self._tasks.get((name, split), ()) if task.id == task_id), None)
