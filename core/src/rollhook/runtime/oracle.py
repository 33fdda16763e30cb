"""Proving tasks without a model: the reference solution must score 1, doing nothing must score less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollhook.environment import Task
from rollhook.records import EpisodeRecord
from rollhook.rundir import Attempt
from rollhook.runtime.parts import Parts
from rollhook.runtime.rows import Rows
from rollhook.runtime.task_runs import Choose, TaskRuns, all_tasks, each

Mark = Literal["1", "0", "ERR"]
AGENTS = ("oracle", "nop")
RESULTS = "oracle.jsonl"


@dataclass(frozen=True)
class TaskProof:
    """One row of the results: what solution and nothing scored; `why` is empty when `ok`."""

    task_id: str
    digest: str
    family: str
    oracle: Mark
    nop: Mark
    oracle_reward: float | None
    nop_reward: float | None
    ok: bool
    why: str
    seconds: float

    @property
    def final(self) -> bool:
        """Whether a resumed run may keep this row: an error may have been the machine's."""
        return "ERR" not in (self.oracle, self.nop)


class Proofs(TaskRuns):
    """Runs both agents on tasks, many at once, on the same runner as training; a context manager."""

    def __init__(self, parts: Parts, attempt: Attempt, choose: Choose = all_tasks) -> None:
        super().__init__(parts, attempt, AGENTS, choose=choose)

    async def run(
        self, tasks: Sequence[Task], concurrency: int, finished: Callable[[TaskProof], None]
    ) -> None:
        """Prove every task; `finished` gets each proof as it is there."""

        async def prove(task: Task) -> None:
            finished(await self._prove(task))

        await each(tasks, concurrency, prove)

    async def _prove(self, task: Task) -> TaskProof:
        if task.problem is not None:
            return TaskProof(
                task.id, task.digest, task.family, "ERR", "ERR", None, None, False, task.problem, 0.0
            )
        solved = await self.episode("oracle", task)
        idle = await self.episode("nop", task)
        why = _why(solved, idle)
        return TaskProof(
            task_id=task.id,
            digest=task.digest,
            family=task.family,
            oracle=_mark(solved),
            nop=_mark(idle),
            oracle_reward=solved.outcome.reward,
            nop_reward=idle.outcome.reward,
            ok=not why,
            why=why,
            seconds=round(sum(record.timings.get("total", 0.0) for record in (solved, idle)), 3),
        )


class Results(Rows[TaskProof]):
    """The rows of a proof, by task."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TaskProof, key=lambda row: row.task_id, keep=lambda row: row.final)

    def todo(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks without a row of this very content."""
        return [t for t in tasks if t.id not in self.kept or self.kept[t.id].digest != t.digest]


def _mark(record: EpisodeRecord) -> Mark:
    if record.outcome.reward is None:
        return "ERR"
    return "1" if record.outcome.reward == 1 else "0"


def _why(solved: EpisodeRecord, idle: EpisodeRecord) -> str:
    reasons = [
        error for agent, record in (("oracle", solved), ("nop", idle)) if (error := failure(agent, record))
    ]
    if solved.outcome.reward is not None and solved.outcome.reward != 1:
        said = record_output(solved)
        reasons.append(f"the solution scores {solved.outcome.reward:g}" + (f" ({said})" if said else ""))
    if idle.outcome.reward is not None and idle.outcome.reward >= 1:
        reasons.append(f"doing nothing scores {idle.outcome.reward:g}")
    return "; ".join(reasons)


def failure(agent: str, record: EpisodeRecord) -> str:
    """Return why an episode has no reward, or an empty string."""
    if record.outcome.reward is not None:
        return ""
    why = record.outcome.cause or record.outcome.kind
    return f"{agent}: {record.outcome.boundary or record.outcome.kind}: {why}"


def record_output(record: EpisodeRecord) -> str:
    """Return the last line that the verifier printed."""
    lines = str(record.detail.get("output", "")).strip().splitlines()
    return lines[-1][:200] if lines else ""
