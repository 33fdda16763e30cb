"""The figures of a run, finished or not, read from its directory: what `rollhook report` shows.

Episodes are read one after the other and not kept but for the few best and worst, so that memory grows with
the number of steps and tasks only.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollhook import journal
from rollhook.episode_store import read_records
from rollhook.errors import RollhookError
from rollhook.metrics_file import read_metrics
from rollhook.records import EpisodeRecord
from rollhook.rundir import AttemptInfo, RunDir
from rollhook.runtime.lineage import Lineage

SCHEMA_VERSION = 1
#: causes of infra errors that are told apart; further ones are counted together
MAX_CAUSES = 200
_EVALUATION = re.compile(
    r"eval/(?:(?P<environment>.+)/)?(?P<figure>pass_rate|pass_at_\d+|stderr|episodes|errors)(?P<greedy>_greedy)?"
)
_FAMILY = re.compile(r"eval_family(?P<greedy>_greedy)?/(?P<label>.+)")
_STEP = re.compile(r"(?:^|-)s(\d{5,})-")
_TRY = re.compile(r"-t([1-9]\d*)$")
#: where the driver's time goes: figure -> metric
DRIVER = {
    "train": "time/train",
    "idle": "time/wait_groups",
    "publish": "time/publish",
    "update": "time/update",
    "checkpoint": "time/checkpoint",
}


@dataclass
class Tally:
    """Counts over episodes; `rejected` are groups by reason."""

    episodes: int = 0
    judged: int = 0
    passed: int = 0
    reward_sum: float = 0.0
    refills: int = 0
    errors: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def pass_rate(self) -> float | None:
        """Share of the episodes with a reward whose reward is at least 1; None without any."""
        return self.passed / self.judged if self.judged else None

    @property
    def reward_mean(self) -> float | None:
        """Mean reward; None without any."""
        return self.reward_sum / self.judged if self.judged else None

    def take(self, record: EpisodeRecord) -> None:
        """Count an episode."""
        self.episodes += 1
        self.refills += record.purpose == "train" and _TRY.search(record.episode_id) is not None
        self.errors += record.outcome.kind == "infra_error"
        reward = record.outcome.reward
        if reward is not None:
            self.judged += 1
            self.passed += reward >= 1.0
            self.reward_sum += reward

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**vars(self), "pass_rate": self.pass_rate, "reward_mean": self.reward_mean}


@dataclass(frozen=True)
class TaskKey:
    """What episodes are counted by."""

    environment: str
    family: str
    task_id: str
    purpose: str


class Extremes:
    """Keeps the newest episode of each of the `count` tasks whose rewards are the greatest (or least)."""

    def __init__(self, count: int, sign: int) -> None:
        self._count = count
        self._sign = sign
        self._kept: dict[str, tuple[float, int, EpisodeRecord]] = {}
        self._seen = 0

    def take(self, record: EpisodeRecord) -> None:
        """Look at an episode that has a reward."""
        assert record.outcome.reward is not None
        self._seen += 1
        key = (self._sign * record.outcome.reward, self._seen, record)
        before = self._kept.get(record.task_id)
        if before is None or before[:2] < key[:2]:
            self._kept[record.task_id] = key
        if len(self._kept) > self._count:
            del self._kept[min(self._kept, key=lambda task: self._kept[task][:2])]

    def records(self) -> list[EpisodeRecord]:
        """Return the episodes, the most extreme first."""
        return [key[2] for key in sorted(self._kept.values(), key=lambda key: key[:2], reverse=True)]


@dataclass
class Figures:
    """All figures of a run; seconds and counts. `problems` say what could not be read."""

    run_id: str
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    episode_seconds: dict[str, float] = field(default_factory=dict)
    driver_seconds: dict[str, float] = field(default_factory=dict)
    sandboxes: dict[str, float] = field(default_factory=dict)
    tasks: dict[TaskKey, Tally] = field(default_factory=dict)
    tokens: int = 0
    superseded: int = 0
    bases: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    best: list[EpisodeRecord] = field(default_factory=list)
    worst: list[EpisodeRecord] = field(default_factory=list)

    @property
    def episodes(self) -> int:
        """Episodes of the surviving lineage."""
        return sum(tally.episodes for tally in self.tasks.values())

    def families(self) -> dict[tuple[str, str, str], Tally]:
        """Return the tallies by environment, family and purpose, sorted."""
        found: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        for key, tally in self.tasks.items():
            whole = found[key.environment, key.family, key.purpose]
            for each in dataclasses.fields(Tally):
                if each.name != "rejected":
                    setattr(whole, each.name, getattr(whole, each.name) + getattr(tally, each.name))
            whole.rejected.update(tally.rejected)
        return dict(sorted(found.items()))

    def data(self) -> dict[str, Any]:
        """Return everything but the transcripts, as `rollhook report --json` prints it."""
        return {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "steps": self.steps,
            "evaluations": self.evaluations,
            "episodes": self.episodes,
            "episodes_superseded": self.superseded,
            "tokens": self.tokens,
            "outcomes": self.outcomes,
            "causes": [
                {"boundary": boundary, "cause": cause, "episodes": count}
                for (boundary, cause), count in self.causes.most_common()
            ],
            "seconds": {"episodes": self.episode_seconds, "driver": self.driver_seconds},
            "sandboxes": self.sandboxes,
            "families": [
                {"environment": environment, "family": family, "purpose": purpose, **tally.data()}
                for (environment, family, purpose), tally in self.families().items()
            ],
            "tasks": [{**dataclasses.asdict(key), **tally.data()} for key, tally in self.tasks.items()],
            "best": [record.episode_id for record in self.best],
            "worst": [record.episode_id for record in self.worst],
            "problems": self.problems,
        }


def read_figures(run: RunDir, *, extremes: int = 4) -> Figures:
    """Read a run's figures, those of the surviving lineage; blocks on the disk.

    What is damaged is left out from there on and said in `problems`.
    """
    figures = Figures(run.run_id)
    lineage = Lineage()
    with _noting(figures.problems):
        lineage = Lineage.read(run)
    figures.bases = dict(lineage.bases)
    with _noting(figures.problems):
        _read_metrics(figures, run, lineage)
    with _noting(figures.problems):
        _read_episodes(figures, run.episodes, lineage, extremes)
    for attempt in run.attempts():
        with _noting(figures.problems):
            _read_rejections(figures, attempt, lineage)
    return figures


def seconds_of(record: EpisodeRecord) -> dict[str, float]:
    """Return where an episode's seconds went; they add up to its total."""
    timings = record.timings
    agent = timings.get("agent", 0.0)
    command, tokens = timings.get("agent/command", 0.0), timings.get("agent/tokens", 0.0)
    wait = min(timings.get("wait/engine", 0.0), max(0.0, agent - command - tokens))
    found = {
        "wait_sandbox": timings.get("create", 0.0),
        "setup": timings.get("setup", 0.0),
        "wait_engine": wait,
        "generate": tokens,
        "tool": command,
        "agent_other": max(0.0, agent - command - tokens - wait),
        "verify": timings.get("verify", 0.0),
        "teardown": timings.get("teardown", 0.0),
    }
    return {**found, "other": max(0.0, timings.get("total", 0.0) - sum(found.values()))}


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Note an error of the block instead of raising it."""
    try:
        yield
    except RollhookError as error:
        if str(error) not in problems:
            problems.append(str(error))


def _read_metrics(figures: Figures, run: RunDir, lineage: Lineage) -> None:
    if not run.metrics_path.exists():
        return
    newest: dict[int, Mapping[str, Any]] = {}
    for row in lineage.surviving(_noting_sandboxes(read_metrics(run.metrics_path), newest)):
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if "time/step" in numbers:
            _take_step(figures, numbers)
        _take_evaluation(figures, numbers)
        _add(figures.driver_seconds, {"evaluate": numbers.get("time/evaluate", 0.0)})
    for row in newest.values():
        names = [name for name in row if name.startswith("sandbox/")]
        counted = [name for name in names if not name.endswith(("_mean", "/live", "/creating"))]
        _add(figures.sandboxes, {name.removeprefix("sandbox/"): row[name] for name in counted})
    if any(row.get("sandbox/creates") and "sandbox/cost" not in row for row in newest.values()):
        figures.sandboxes.pop("cost", None)


def _noting_sandboxes(
    rows: Iterable[Mapping[str, Any]], newest: dict[int, Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Pass rows on, and note the newest of each attempt that counts sandboxes: what was spent stays spent."""
    for row in rows:
        if "sandbox/seconds" in row:
            newest[row["attempt"]] = row
        yield row


def _take_step(figures: Figures, row: Mapping[str, float]) -> None:
    kept = ("rollout/", "outcome/", "groups/", "staleness/", "train/loss", "time/", "step", "attempt")
    figures.steps.append({name: value for name, value in row.items() if name.startswith(kept)})
    figures.tokens += int(row.get("rollout/tokens", 0))
    spent = {figure: row.get(metric, 0.0) for figure, metric in DRIVER.items()}
    _add(figures.driver_seconds, {**spent, "other": max(0.0, row["time/step"] - sum(spent.values()))})


def _take_evaluation(figures: Figures, row: Mapping[str, float]) -> None:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, value in row.items():
        if (match := _EVALUATION.fullmatch(name)) is not None:
            mode = "greedy" if match["greedy"] else "sampled"
            found.setdefault((match["environment"] or "", mode), {"families": {}})[match["figure"]] = value
    for name, value in row.items():
        if (match := _FAMILY.fullmatch(name)) is not None:
            mode, label = "greedy" if match["greedy"] else "sampled", match["label"]
            environment = next((e for e, _ in found if e and label.startswith(f"{e}/")), "")
            if (environment, mode) in found:
                found[environment, mode]["families"][label.removeprefix(f"{environment}/")] = value
    figures.evaluations += [
        {"step": int(row["step"]), "environment": environment, "mode": mode, **numbers}
        for (environment, mode), numbers in found.items()
        if "pass_rate" in numbers
    ]


def _read_episodes(figures: Figures, directory: Path, lineage: Lineage, extremes: int) -> None:
    best, worst = Extremes(extremes, 1), Extremes(extremes, -1)
    survives = _survival(lineage)
    try:
        for record in read_records(directory):
            if not survives(record):
                figures.superseded += 1
                continue
            figures.outcomes[record.outcome.kind] += 1
            _add(figures.episode_seconds, seconds_of(record))
            key = TaskKey(record.environment, record.family, record.task_id, record.purpose)
            figures.tasks.setdefault(key, Tally()).take(record)
            if record.outcome.kind == "infra_error":
                _take_cause(figures, record.outcome.boundary, record.outcome.cause)
            if record.outcome.reward is not None:
                best.take(record)
                worst.take(record)
    finally:
        figures.best, figures.worst = best.records(), worst.records()
        shown = {record.episode_id for record in figures.best}
        figures.worst = [record for record in figures.worst if record.episode_id not in shown]


def _take_cause(figures: Figures, boundary: str, cause: str) -> None:
    """Count a cause; numbers in it, such as ids and seconds, do not make it another."""
    key = (boundary, re.sub(r"\d+(\.\d+)?", "#", cause[:400]))
    if key not in figures.causes and len(figures.causes) >= MAX_CAUSES:
        key = ("", "other causes")
    figures.causes[key] += 1


def _survival(lineage: Lineage) -> Callable[[EpisodeRecord], bool]:
    """Return what tells whether an episode belongs to the surviving lineage.

    It does when a surviving step took it, or when it was made for a step before every later attempt's base.
    """
    if len(lineage.bases) < 2:
        return lambda record: True
    taken = {
        episode
        for batch in lineage.batches.values()
        for group in batch["groups"]
        for episode in group["episodes"]
    }

    def survives(record: EpisodeRecord) -> bool:
        match = _STEP.search(record.episode_id)
        done = int(match[1]) + (record.purpose == "train") if match else 0
        row = {"attempt": record.attempt, "step": done}
        return record.episode_id in taken or bool(list(lineage.surviving([row])))

    return survives


def _read_rejections(figures: Figures, attempt: AttemptInfo, lineage: Lineage) -> None:
    """Add the rejected groups to the tallies of their tasks."""
    if not attempt.journal_path.exists():
        return
    known = {key.task_id: key for key in figures.tasks if key.purpose == "train"}
    rows = (
        {"attempt": attempt.number, "step": entry.data["step"] + 1, "entry": entry.data}
        for entry in journal.read(attempt.journal_path)
        if entry.event == "group_rejected"
    )
    for row in lineage.surviving(rows):
        task_id, reason = row["entry"]["task_id"], row["entry"]["reason"].split(":")[0]
        key = known.get(task_id) or TaskKey("", "", task_id, "train")
        figures.tasks.setdefault(key, Tally()).rejected[reason] += 1
