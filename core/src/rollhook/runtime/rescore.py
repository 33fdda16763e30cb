"""Running the verifiers of a run again: its recorded commands in fresh sandboxes, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollhook.engine import SamplingParams
from rollhook.episode_store import read_records
from rollhook.errors import UsageError
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.recorded_session import RecordedPolicy
from rollhook.runtime.rollout_worker import distinct
from rollhook.runtime.rows import Rows

if TYPE_CHECKING:
    from rollhook.environment import Environment, Task
    from rollhook.records import EpisodeRecord
    from rollhook.rundir import Attempt, RunDir
    from rollhook.runtime.parts import Parts

RESULTS = "rescore.jsonl"


@dataclass(frozen=True)
class Rescored:
    """One row of the results: the recorded reward (`old`), and what the verifier says now (`new`).

    `new` is None where it says nothing, for the reason in `why`. `observed` says how what the agent was told
    compares with the record: `same`, `numbers` (all but the numbers is the same), `text`, or empty.
    """

    run: str
    episode_id: str
    task_id: str
    environment: str
    purpose: str
    old: float | None
    new: float | None
    observed: str
    why: str
    seconds: float

    @property
    def same(self) -> bool:
        """Whether there is a reward, and it is the recorded one."""
        return self.new is not None and self.new == self.old

    @property
    def changed(self) -> bool:
        """Whether the verifier says something else now."""
        return self.new is not None and self.new != self.old


class Results(Rows[Rescored]):
    """The rows of a rescoring by episode; a resumed one runs those without a verdict again.

    Raises UsageError when the rows are of another run.
    """

    def __init__(self, path: Path, run: RunDir) -> None:
        super().__init__(path, Rescored, key=lambda row: row.episode_id, keep=lambda row: row.new is not None)
        for other in {row.run for row in self.kept.values()} - {run.run_id}:
            self.close()
            raise UsageError(f"{path} has rows of run {other}, not of {run.run_id}")


@dataclass(frozen=True)
class Choice:
    """The episodes to rescore, in the order in which they finished, and how many have nothing to compare."""

    episode_ids: Sequence[str]
    unverified: int


def choose(
    run: RunDir,
    *,
    purposes: Collection[str],
    episodes: Collection[str] = (),
    groups: Collection[str] | None = None,
    limit: int | None = None,
) -> Choice:
    """Choose among a run's episodes those whose verifier ran, or failed; of more than `limit`, evenly spread.

    `groups` None: all. Raises UsageError for an unknown episode and when none is left.
    """
    chosen, seen, unverified = [], set(), 0
    for record in read_records(run.episodes):
        seen.add(record.episode_id)
        if episodes and record.episode_id not in episodes:
            continue
        if record.purpose not in purposes or (groups is not None and record.group_id not in groups):
            continue
        if _was_verified(record):
            chosen.append(record.episode_id)
        else:
            unverified += 1
    if unknown := sorted(set(episodes) - seen):
        raise UsageError(f"run {run.run_id} has no episode {unknown[0]}")
    if not chosen:
        raise UsageError(f"run {run.run_id} has no such episode whose verifier ran")
    if limit is not None and limit < len(chosen):
        chosen = [chosen[number * len(chosen) // limit] for number in range(limit)]
    return Choice(chosen, unverified)


class Rescorer:
    """Runs recorded episodes again, many at once, on the same runner as training; a context manager.

    `changed_tasks`: a task whose content is another now is run all the same.
    """

    def __init__(self, run: RunDir, parts: Parts, attempt: Attempt, *, changed_tasks: bool = False) -> None:
        self._run = run
        self._parts = parts
        self._attempt = attempt
        self._changed_tasks = changed_tasks
        self._stack = AsyncExitStack()
        self._policy = RecordedPolicy()
        self._runners: dict[str, EpisodeRunner] = {}
        self._tasks: dict[tuple[str, str], list[Task]] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(
        self, episode_ids: Collection[str], concurrency: int, finished: Callable[[Rescored], None]
    ) -> None:
        """Rescore these episodes; `finished` gets each row as it is there."""
        wanted = frozenset(episode_ids)
        records = (record for record in read_records(self._run.episodes) if record.episode_id in wanted)
        reading = asyncio.Lock()

        async def worker() -> None:
            while True:
                async with reading:
                    record = await asyncio.to_thread(_next, records)
                if record is None:
                    return
                finished(await self._rescore(record))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(wanted))):
                group.create_task(worker())

    async def _open(self) -> None:
        recipe = self._parts.recipe
        if not recipe.environment:
            raise UsageError(f"run {self._run.run_id} has no environment, so it judged nothing")
        pool = await self._parts.open_pool(self._attempt, self._stack)
        capabilities = pool.backend.capabilities if pool is not None else frozenset()
        agent = self._parts.build_agent()
        self._stack.push_async_callback(agent.aclose)
        names = distinct([use.use for use in recipe.environment])
        for number, (name, use) in enumerate(zip(names, recipe.environment, strict=True)):
            environment: Environment = self._parts.build("environment", use, f"environment.{number}")
            self._stack.push_async_callback(environment.aclose)
            if problems := await asyncio.to_thread(environment.problems, capabilities):
                raise UsageError(f"environment {name} cannot run here: {'; '.join(problems)}")
            for task in await asyncio.to_thread(environment.tasks, None):
                self._tasks.setdefault((name, task.id), []).append(task)
            self._runners[name] = EpisodeRunner(
                name=name,
                environment=environment,
                agent=agent,
                pool=pool,
                policy=self._policy,
                limits=recipe.budgets,
                outcome_policy=recipe.outcomes,
                context=self._parts.context(f"environment.{name}"),
            )

    async def _rescore(self, record: EpisodeRecord) -> Rescored:
        task, why = self._task(record)
        if task is None:
            return self._row(record, None, "", why, 0.0)
        request = EpisodeRequest(
            record.episode_id, record.group_id, task, record.seed, SamplingParams(), record.purpose
        )
        self._policy.expect(record)
        found = (await self._runners[record.environment].run(request)).record
        session = self._policy.take(record.episode_id)
        outcome = found.outcome
        why = outcome.cause and f"{outcome.boundary}: {outcome.cause}"
        if session.unused and not why:
            why = f"the agent stopped {session.unused} turns before the recorded one"
        reward = outcome.reward if outcome.kind == "scored" else None
        return self._row(record, reward, session.observed, why, found.timings.get("total", 0.0))

    def _task(self, record: EpisodeRecord) -> tuple[Task | None, str]:
        """Return the task of an episode, or why there is none."""
        tasks = self._tasks.get((record.environment, record.task_id), [])
        if not tasks:
            return None, f"environment {record.environment} has no task {record.task_id} now"
        same = [task for task in tasks if task.digest == record.task_digest]
        if not same and not self._changed_tasks:
            then, now = record.task_digest[:12], tasks[0].digest[:12]
            return None, f"task {record.task_id} is another now (recorded {then}, here {now})"
        task = (same or tasks)[0]
        return (task, "") if task.problem is None else (None, f"task {task.id} cannot run: {task.problem}")

    def _row(
        self, record: EpisodeRecord, new: float | None, observed: str, why: str, seconds: float
    ) -> Rescored:
        return Rescored(
            run=self._run.run_id,
            episode_id=record.episode_id,
            task_id=record.task_id,
            environment=record.environment,
            purpose=record.purpose,
            old=record.outcome.reward,
            new=new,
            observed=observed,
            why=why,
            seconds=round(seconds, 3),
        )


def counts(rows: Sequence[Rescored]) -> Mapping[str, int]:
    """Return how many verdicts are the same, went up or down, came or are missing, by name."""
    return {
        "same": sum(row.same for row in rows),
        "up": sum(row.changed and row.old is not None and (row.new or 0) > row.old for row in rows),
        "down": sum(row.changed and row.old is not None and (row.new or 0) < row.old for row in rows),
        "new": sum(row.changed and row.old is None for row in rows),
        "missing": sum(row.new is None for row in rows),
    }


def _was_verified(record: EpisodeRecord) -> bool:
    """Whether a verifier ran to its end, or failed; the others have nothing to compare."""
    return record.outcome.kind == "scored" or record.outcome.boundary == "verifier"


def _next(records: Iterator[EpisodeRecord]) -> EpisodeRecord | None:
    return next(records, None)
