"""Episodes for a framework that owns the training loop and the engines: what its bridge uses.

The bridge lives in one process of the framework, opens `HostedEpisodes` once and asks for an episode at a
time, with a policy that asks where the framework wants its model asked. Environments, sandboxes,
agents, outcomes, leases and the journal are those of any run: the process claims the run's attempt, and its
heartbeat is that of the episodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollhook.engine import SamplingParams
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RollhookError, UsageError
from rollhook.observers import Observers
from rollhook.recipe.check import check_recipe
from rollhook.recipe.problem import RecipeError
from rollhook.rundir import RunDir
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.live import Live
from rollhook.runtime.live_file import publishing
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollout_worker import build_environments, distinct, sampling_of
from rollhook.runtime.seeds import derive

if TYPE_CHECKING:
    from rollhook.component import BuildContext
    from rollhook.environment import Environment, Task
    from rollhook.plugins import Plugins
    from rollhook.recipe.load import Loaded
    from rollhook.rundir import Attempt, Status
    from rollhook.runtime.episode import EpisodeResult
    from rollhook.session import Policy

logger = logging.getLogger(__name__)
#: what the bridge runs of a recipe; the rest is the framework's, on other nodes too
SECTIONS = ("name", "environment", "agent", "sandbox", "budgets", "outcomes", "trackers", "plugins", "seed")
#: seconds between two writes of finished episodes, so that a crash loses few
FLUSH_SECONDS = 5.0


@dataclass(frozen=True)
class Row:
    """A task as a row of a framework's data set: enough to find it again, and to see that it has changed."""

    environment: str
    task_id: str
    digest: str


class HostedEpisodes:
    """Runs episodes of a recipe in a process of a framework. Made by `open`, ended by `aclose`."""

    def __init__(self, loaded: Loaded, plugins: Plugins, attempt: Attempt) -> None:
        self.recipe = loaded.recipe
        self.attempt = attempt
        self.live = Live()
        self._loaded = loaded
        self._plugins = plugins
        run = attempt.run
        self._parts = Parts(loaded.recipe, plugins, attempt.path, run.run_id, attempt.number)
        self._store = EpisodeStore(run.episodes)
        self._stack = AsyncExitStack()
        self._runners: dict[str, EpisodeRunner] = {}
        self._tasks: dict[tuple[str, str], Task] = {}
        self._tries: Counter[tuple[str, str]] = Counter()
        self._number = 0
        self._status: Status = "failed"

    @classmethod
    async def open(cls, lock: Path, run: Path) -> HostedEpisodes:
        """Claim the run's next attempt and build what episodes need.

        Raises RecipeError for a lock that cannot run here, RunError for a run that another process drives,
        and UsageError for tasks or sandboxes that cannot be had.
        """
        loaded, plugins = await asyncio.to_thread(read_hosted, lock)
        attempt = await asyncio.to_thread(RunDir.find(run).claim)
        made = cls(loaded, plugins, attempt)
        try:
            await made._prepare()
        except BaseException:
            await asyncio.shield(made.aclose())
            raise
        made._status = "succeeded"
        return made

    @classmethod
    async def of_job(cls, framework: str) -> HostedEpisodes:
        """Open those of the job that this process belongs to; RollhookError where it belongs to none."""
        try:
            job, files = os.environ["ROLLHOOK_JOB_DIR"], os.environ["ROLLHOOK_JOB_FILES"]
        except KeyError as error:
            raise RollhookError(
                f"{error.args[0]} is not set: run {framework} by `rollhook run`", kind="user"
            ) from None
        return await cls.open(Path(files, "recipe.lock.yaml"), Path(job).parent.parent)

    async def run(
        self,
        row: Row,
        policy: Policy,
        *,
        group_id: str,
        purpose: Literal["train", "eval"] = "train",
        sampling: SamplingParams | None = None,
    ) -> EpisodeResult:
        """Run one episode of a task with this policy, which stays open, and return its record and samples.

        Every failure becomes the record's outcome; only cancellation passes through. Raises UsageError for a
        task that is not there or is not the one that the row was made of.
        """
        task = self._task(row)
        self._number += 1
        runner = self._runners[row.environment].asking(policy)
        seed = derive(self.recipe.seed, group_id, row.task_id, self._tries[group_id, row.task_id])
        self._tries[group_id, row.task_id] += 1
        request = EpisodeRequest(
            episode_id=f"a{self.attempt.number}-{self._number:06d}",
            group_id=group_id,
            task=task,
            seed=seed,
            sampling=sampling or sampling_of(self.recipe),
            purpose=purpose,
        )
        self.attempt.journal.append(
            "episode_started",
            episode_id=request.episode_id,
            group_id=group_id,
            task_id=task.id,
            seed=seed,
        )
        result = await runner.run(request)
        record = result.record
        self._store.append(record, result.samples if purpose == "train" else ())
        self.attempt.journal.append(
            "episode_finished",
            episode_id=record.episode_id,
            group_id=group_id,
            outcome=record.outcome.kind,
            ended=record.ended,
            reward=record.outcome.reward,
        )
        self._observers.episode(record)
        return result

    def context(self, name: str) -> BuildContext:
        """Return what a component of this run is built with."""
        return self._parts.context(name)

    async def aclose(self) -> None:
        """Release sandboxes and environments, write what is finished, end the attempt; safe to call twice."""
        try:
            await self._stack.aclose()
        finally:
            await asyncio.to_thread(self.attempt.finish, self._status)

    async def _prepare(self) -> None:
        self._stack.callback(self._store.close)
        self._stack.push_async_callback(self._store.commit)
        self._observers = self._observe()
        flushing = asyncio.create_task(self._flush())
        self._stack.callback(flushing.cancel)
        pool = await self._parts.open_pool(self.attempt, self._stack)
        capabilities = pool.backend.capabilities if pool is not None else frozenset()
        environments = await build_environments(self._parts, capabilities, self._stack)
        agent = self._parts.build_agent()
        self._stack.push_async_callback(agent.aclose)
        for (name, environment), use in zip(environments.items(), self.recipe.environment, strict=True):
            await asyncio.to_thread(self._read, name, environment, use.split)
            self._runners[name] = EpisodeRunner(
                name=name,
                environment=environment,
                agent=agent,
                pool=pool,
                policy=None,
                limits=self.recipe.budgets,
                outcome_policy=self.recipe.outcomes,
                context=self._parts.context(f"environment.{name}"),
                live=self.live,
            )
        await self._stack.enter_async_context(publishing(self.attempt.path, self.live, lambda: ()))

    def _observe(self) -> Observers:
        build = self._parts.build
        trackers = {use.use: build("tracker", use, f"trackers.{use.use}") for use in self.recipe.trackers}
        observers = Observers(self._plugins, trackers, dict(self._loaded.resolved))
        self._stack.push_async_callback(asyncio.to_thread, observers.close)
        observers.run_started(self.attempt.run.run_id, self.attempt.number, self.recipe)
        self._stack.callback(lambda: observers.run_finished(self.attempt.run.run_id, self._status))
        return observers

    def _read(self, name: str, environment: Environment, split: str) -> None:
        for task in tasks_of(environment, split, self._heldout()):
            self._tasks[name, task.id] = task

    def _heldout(self) -> str | None:
        return self.recipe.evaluation.split if self.recipe.evaluation.every else None

    def _task(self, row: Row) -> Task:
        task = self._tasks.get((row.environment, row.task_id))
        if task is None:
            raise UsageError(
                f"environment {row.environment} has no task {row.task_id!r} in the recipe's splits"
            )
        if task.digest != row.digest:
            raise UsageError(
                f"task {row.task_id} of environment {row.environment} is not the one that the data set was "
                "made of; make it anew"
            )
        return task

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._store.commit()


def read_hosted(lock: Path) -> tuple[Loaded, Plugins]:
    """Return the recipe of a job and its plugins. Raises RecipeError for what episodes could not run with.

    What else is wrong here, and what has changed since the lock was written, is only logged.
    """
    checked = check_recipe(lock, site="here")
    ours = [each for each in checked.problems if each.key.split(".")[0] in SECTIONS]
    wrong = [each for each in ours if each not in checked.mismatches]
    if wrong or checked.loaded.validated is None:
        raise RecipeError(wrong or checked.problems)
    for problem in checked.problems:
        logger.info("%s", problem)
    return checked.loaded, checked.plugins


def task_rows(lock: Path, scratch: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows of the tasks to train on, and of those held out where the recipe evaluates.

    Blocks; called where no loop runs. Raises RecipeError for a lock that cannot run here, UsageError for a
    split without a task that can run.
    """
    loaded, plugins = read_hosted(lock)
    recipe, train, heldout = loaded.recipe, list[Row](), list[Row]()
    parts = Parts(recipe, plugins, scratch, recipe.name, 0)
    names = distinct([use.use for use in recipe.environment])
    for number, (name, use) in enumerate(zip(names, recipe.environment, strict=True)):
        environment: Environment = parts.build("environment", use, f"environment.{number}")
        try:
            train += _rows(name, environment, use.split)
            if recipe.evaluation.every:
                heldout += _rows(name, environment, recipe.evaluation.split)
        finally:
            asyncio.run(environment.aclose())
    return train, heldout


def _rows(name: str, environment: Environment, split: str) -> list[Row]:
    tasks = tasks_of(environment, split)
    if not tasks:
        raise UsageError(f"environment {name}: split {split!r} has no task that can run")
    return [Row(name, task.id, task.digest) for task in tasks]


def asked_sampling(asked: Mapping[str, Any]) -> SamplingParams:
    """Return how a framework samples, by the names that OpenAI and SGLang give to it."""
    return SamplingParams(asked.get("temperature", 1.0), asked.get("top_p", 1.0), asked.get("top_k", -1))


def tasks_of(environment: Environment, *splits: str | None) -> Sequence[Task]:
    """Return the tasks of these splits that can run, each once."""
    found = [task for split in splits if split is not None for task in environment.tasks(split)]
    return list({task.id: task for task in found if task.problem is None}.values())
