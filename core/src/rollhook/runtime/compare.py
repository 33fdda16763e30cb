"""Two evaluations side by side: differences over the tasks of both, with intervals and a paired test."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollhook.episode_store import read_records
from rollhook.errors import RunError, UsageError
from rollhook.records import EpisodeRecord
from rollhook.rundir import RunDir
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.scores import NAME, Scores, TaskScore, by_family, conditions, read_scores, score
from rollhook.runtime.statistics import Difference, Interval, mean_pass_at_k, paired

SCHEMA_VERSION = 1
#: an episode of an evaluation inside a run: attempt, step, environment, mode, number, try
_IN_RUN = re.compile(r"a(\d+)-s(\d+)-(?:(.+)-)?(sampled|greedy)-(\d+)-t(\d+)")
_NAMED = 5


@dataclass(frozen=True)
class Line:
    """A family, or all tasks (`family` None): pass@1 of each over the common tasks, and the difference."""

    family: str | None
    a: Interval
    b: Interval
    difference: Difference


@dataclass
class Comparison:
    """B against A over the `tasks` that both have; `warnings` say by name what is not alike."""

    a: str
    b: str
    mode: str
    tasks: int
    lines: list[Line]
    warnings: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def find_scores(reference: str) -> list[Scores]:
    """Return the evaluations behind a run id, a run's directory or an evaluation's file, oldest first.

    A run that trained has one for each mode and step of its surviving lineage. Raises RunError when there is
    none.
    """
    path = Path(reference).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file, no error for a name that no file can have
        return [read_scores(path)]
    run = RunDir.find(reference)
    if (run.path / NAME).is_file():
        return [read_scores(run.path / NAME)]
    found = list(_of_run(run))
    if not found:
        raise RunError(
            f"run {run.run_id} has no evaluation: one by `rollhook eval` writes {NAME} when it has ended "
            "(go on with --resume), a training run needs evaluation.every"
        )
    return found


def compare_first_and_last(reference: str) -> list[Comparison]:
    """Compare the first evaluation of a run that trained with its last, mode by mode."""
    found = find_scores(reference)
    pairs = []
    for mode in dict.fromkeys(each.mode for each in found):
        of_mode = [each for each in found if each.mode == mode]
        if len(of_mode) > 1:
            pairs.append(compare(of_mode[0], of_mode[-1]))
    if not pairs:
        raise UsageError(f"{reference} has no two evaluations of one mode; name another to compare it with")
    return pairs


def compare_two(a: str, b: str) -> list[Comparison]:
    """Compare the newest evaluations of two references, in each mode that both have."""
    before = {each.mode: each for each in find_scores(a)}
    after = {each.mode: each for each in find_scores(b)}
    modes = [mode for mode in before if mode in after]
    if modes:
        return [compare(before[mode], after[mode]) for mode in modes]
    return [compare(list(before.values())[-1], list(after.values())[-1])]


def compare(a: Scores, b: Scores) -> Comparison:
    """Compare over the tasks with a verdict in both whose content is the same.

    Raises RunError when there is none.
    """
    before = {(task.environment, task.task_id): task for task in a.tasks}
    after = {(task.environment, task.task_id): task for task in b.tasks}
    shared = [key for key in before if key in after]
    common = [
        (before[key], after[key])
        for key in shared
        if before[key].digest == after[key].digest and before[key].n and after[key].n
    ]
    if not common:
        raise RunError(f"{a.label} and {b.label} have no task in common that both have judged")
    families = by_family([task for task, _ in common])
    partner = {(task.environment, task.task_id): other for task, other in common}
    lines = [
        _line(name, [(task, partner[task.environment, task.task_id]) for task in tasks])
        for name, tasks in families.items()
        if len(families) > 1
    ]
    mode = a.mode if a.mode == b.mode else f"{a.mode} / {b.mode}"
    warnings = [*_different(a, b), *_unpaired(before, after)]
    return Comparison(a.label, b.label, mode, len(common), [*lines, _line(None, common)], warnings)


def _line(family: str | None, pairs: Sequence[tuple[TaskScore, TaskScore]]) -> Line:
    a = mean_pass_at_k([(task.n, task.c) for task, _ in pairs], 1)
    b = mean_pass_at_k([(task.n, task.c) for _, task in pairs], 1)
    difference = paired([((x.n, x.c), (y.n, y.c)) for x, y in pairs])
    assert a is not None
    assert b is not None
    assert difference is not None
    return Line(family, a, b, difference)


def _different(a: Scores, b: Scores) -> Iterator[str]:
    """Yield the conditions that differ, with both values."""
    before, after = dict(_leaves(a.conditions)), dict(_leaves(b.conditions))
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"{key} differs: {before.get(key)!r} in {a.label}, {after.get(key)!r} in {b.label}"
    if a.samples != b.samples:
        yield f"samples per task differ: {a.samples} in {a.label}, {b.samples} in {b.label}"


def _unpaired(
    before: Mapping[tuple[str, str], TaskScore], after: Mapping[tuple[str, str], TaskScore]
) -> Iterator[str]:
    shared = [key for key in before if key in after]
    changed = [key[1] for key in shared if before[key].digest != after[key].digest]
    if changed:
        yield f"{len(changed)} tasks have changed (their digests differ) and are left out: {_names(changed)}"
    silent = [key[1] for key in shared if not before[key].n or not after[key].n]
    if silent:
        yield f"{len(silent)} tasks have no verdict on one side and are left out: {_names(silent)}"
    for word, here, there in (("first", before, after), ("second", after, before)):
        alone = [key[1] for key in here if key not in there]
        if alone:
            yield f"{len(alone)} tasks are in the {word} only and are left out: {_names(alone)}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _of_run(run: RunDir) -> Iterator[Scores]:
    """Yield the evaluations of a run that trained: the surviving ones, by step."""
    rows = (row for record in read_records(run.episodes) if (row := _place(record)) is not None)
    episodes: dict[tuple[int, str], dict[int, list[tuple[Hashable, EpisodeRecord]]]] = {}
    for place in Lineage.read(run).surviving(rows):
        attempts = episodes.setdefault((place["step"], place["mode"]), {})
        attempts.setdefault(place["attempt"], []).append((place["sample"], place["record"]))
    if not episodes:
        return
    recipe = _recipe(run)
    for step, mode in sorted(episodes):
        attempts = episodes[step, mode]
        newest = attempts[max(attempts)]
        yield Scores(run.run_id, mode, score(newest), conditions(recipe, mode), step)


def _place(record: EpisodeRecord) -> dict[str, Any] | None:
    """Return where in a run that trained an episode was evaluated; None for another kind of episode."""
    found = _IN_RUN.fullmatch(record.episode_id) if record.purpose == "eval" else None
    if found is None:
        return None
    attempt, step, environment, mode, number, _ = found.groups()
    sample = (environment, number)
    return {
        "attempt": int(attempt),
        "step": int(step),
        "mode": mode,
        "sample": sample,
        "record": record,
    }


def _recipe(run: RunDir) -> Mapping[str, Any]:
    import yaml

    try:
        recipe: Mapping[str, Any] = yaml.safe_load(run.lock_path.read_bytes())["recipe"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise RunError(f"{run.lock_path} cannot be read: {' '.join(str(error).split())}") from error
    return recipe
