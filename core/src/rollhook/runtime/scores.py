"""What an evaluation found, task by task and under which conditions; as a file, and as rows of estimates."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollhook.durable import check_schema, to_json, write_atomic
from rollhook.errors import RunError
from rollhook.records import EpisodeRecord
from rollhook.runtime.evaluate import Evaluation, judged, passed
from rollhook.runtime.statistics import CONFIDENCE, Interval, Rate, mean_pass_at_k

SCHEMA_VERSION = 1
NAME = "evaluation.json"


@dataclass(frozen=True)
class TaskScore:
    """One task: `c` of `n` judged samples passed; `errors` more gave no verdict."""

    environment: str
    task_id: str
    digest: str
    family: str
    n: int
    c: int
    errors: int

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError for what cannot be: this is read from files too."""
        names = (self.environment, self.task_id, self.digest, self.family)
        if not all(isinstance(name, str) for name in names) or not 0 <= self.c <= self.n or self.errors < 0:
            raise ValueError(f"{self} cannot be")


@dataclass(frozen=True)
class Row:
    """A family of tasks, or all of them (`family` None): what is estimated by k."""

    family: str | None
    tasks: int
    episodes: int
    errors: int
    pass_at: Mapping[int, Interval]


@dataclass
class Scores:
    """One evaluation. `mode` is `sampled` or `greedy`; `conditions` are what must be equal to compare it.

    `about` says what was evaluated: recipe, its digest, weights, engine, seed.
    """

    run_id: str
    mode: str
    tasks: list[TaskScore]
    conditions: dict[str, Any]
    step: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """How people call it."""
        return self.run_id if self.step is None else f"{self.run_id} at step {self.step}"

    @property
    def samples(self) -> int:
        """The most judged samples that any task has."""
        return max((task.n for task in self.tasks), default=0)

    def rows(self, ks: Sequence[int]) -> list[Row]:
        """Return a row for each family and, last, one for all tasks."""
        families = by_family(self.tasks)
        rows = [_row(name, tasks, ks) for name, tasks in families.items()] if len(families) > 1 else []
        return [*rows, _row(None, self.tasks, ks)]


def by_family(tasks: Sequence[TaskScore]) -> dict[str, list[TaskScore]]:
    """Return the tasks by family, sorted; with several environments a family's name starts with its own."""
    several = len({task.environment for task in tasks}) > 1
    found: dict[str, list[TaskScore]] = {}
    for task in sorted(tasks, key=lambda task: (task.environment, task.family)):
        name = f"{task.environment}/{task.family}" if several else task.family
        found.setdefault(name, []).append(task)
    return found


def score(episodes: Iterable[tuple[Hashable, EpisodeRecord]]) -> list[TaskScore]:
    """Count by task. Episodes of one key are tries of one sample: a judged one counts, else an error."""
    last: dict[Hashable, EpisodeRecord] = {}
    for key, record in episodes:
        if key not in last or not judged(last[key]):
            last[key] = record
    tasks: dict[tuple[str, str, str, str], list[int]] = {}
    for record in last.values():
        name = (record.environment, record.task_id, record.task_digest, record.family)
        counts = tasks.setdefault(name, [0, 0, 0])
        counts[0] += judged(record)
        counts[1] += passed(record)
        counts[2] += not judged(record)
    return [TaskScore(*name, *counts) for name, counts in sorted(tasks.items())]


def conditions(recipe: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return what of a resolved recipe, plain data, decides how an evaluation samples and judges."""
    environment = recipe["environment"]
    uses = [environment] if isinstance(environment, Mapping) else environment
    sampling = dict(recipe["rollout"]["sampling"])
    return {
        "environment": [use["use"] for use in uses],
        "split": recipe["evaluation"]["split"],
        "agent": recipe["agent"],
        "sampling": {"temperature": 0} if mode == "greedy" else sampling,
        "budgets": recipe["budgets"],
    }


def evaluations(scores: Scores) -> list[Evaluation]:
    """Return the same as evaluations inside a run have it, one per environment: for metrics."""
    names = dict.fromkeys(task.environment for task in scores.tasks)
    found = []
    for name in names:
        tasks = [task for task in scores.tasks if task.environment == name]
        families = {
            family: Rate(sum(t.c for t in members), sum(t.n for t in members), sum(t.errors for t in members))
            for family, members in by_family(tasks).items()
        }
        counts = [(task.n, task.c) for task in tasks]
        shown = name if len(names) > 1 else ""
        found.append(Evaluation(0, scores.mode, families, scores.seconds, shown, counts))
    return found


def write_scores(directory: Path, scores: Scores, ks: Sequence[int]) -> None:
    """Write `evaluation.json` into a run's directory. Raises RunError when that cannot be."""
    data = {
        "schema": SCHEMA_VERSION,
        "run_id": scores.run_id,
        "mode": scores.mode,
        **scores.about,
        "conditions": scores.conditions,
        "seconds": round(scores.seconds, 3),
        "confidence": CONFIDENCE,
        "results": [_plain(row) for row in scores.rows(ks)],
        "tasks": [asdict(task) for task in scores.tasks],
    }
    write_atomic(directory / NAME, to_json(data, indent=True) + b"\n")


def read_scores(path: Path) -> Scores:
    """Return what an `evaluation.json` holds; RunError when it cannot be read or is of a later schema."""
    try:
        data = orjson.loads(path.read_bytes())
        check_schema(data["schema"], SCHEMA_VERSION, path)
        tasks = [TaskScore(**task) for task in data["tasks"]]
        return Scores(data["run_id"], data["mode"], tasks, dict(data["conditions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is no evaluation of Rollhook: {type(error).__name__}: {error}") from error


def _row(family: str | None, tasks: Sequence[TaskScore], ks: Sequence[int]) -> Row:
    counts = [(task.n, task.c) for task in tasks]
    found = {k: estimate for k in ks if (estimate := mean_pass_at_k(counts, k)) is not None}
    return Row(family, len(tasks), sum(t.n for t in tasks), sum(t.errors for t in tasks), found)


def _plain(row: Row) -> dict[str, Any]:
    return asdict(row) | {"pass_at": {str(k): asdict(each) for k, each in row.pass_at.items()}}
