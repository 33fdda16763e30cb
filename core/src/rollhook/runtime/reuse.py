"""What a new attempt takes over: prompts that no surviving step has taken, and their finished episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollhook.environment import Task
from rollhook.episode_store import read_records, read_samples
from rollhook.errors import RunError
from rollhook.records import EpisodeRecord, Group
from rollhook.runtime.batch import Prompt, failed
from rollhook.runtime.making import member

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import RunDir
    from rollhook.runtime.lineage import Lineage

FindTask = Callable[[str, str], Task | None]


def owned_prompts(
    lineage: Lineage, run: RunDir, recipe: Recipe, find: FindTask
) -> tuple[list[tuple[Prompt, Group]], dict[str, str]]:
    """Return the prompts to be owned again, oldest first, each with the episodes that may still train.

    An episode may when each of its tokens is of a version of this lineage that is not too old; of the others
    the reason, `lineage` or `stale`, is returned by id. Blocks on the disk. RunError when a task is gone.
    """
    size, taken = recipe.rollout.group_size, lineage.consumed
    owned: dict[str, tuple[Prompt, Group]] = {}
    for group_id, drawn in sorted(lineage.prompts.items()):
        if group_id in taken:
            continue
        task = find(drawn["environment"], drawn["task_id"])
        if task is None:
            raise RunError(
                f"run {run.run_id} drew task {drawn['task_id']} of environment {drawn['environment']}, which "
                "is not there any more; bring the tasks back as they were, or start a new run"
            )
        prompt = Prompt(group_id, task, drawn["environment"])
        owned[group_id] = prompt, prompt.group(size)
    groups = {group_id: group for group_id, (_, group) in owned.items()}
    refused: dict[str, str] = {}
    if groups:
        limit = recipe.rollout.max_staleness
        kept = _put_records(lineage, run, math.inf if limit is None else limit, groups, refused)
        for sample in read_samples(run.episodes, kept) if kept else ():
            groups[sample.group_id].samples.append(sample)
    return list(owned.values()), refused


def _put_records(
    lineage: Lineage, run: RunDir, limit: float, groups: dict[str, Group], refused: dict[str, str]
) -> set[str]:
    """Put the records of episodes that may still train into their groups; return their ids."""
    kept: dict[tuple[str, int], str] = {}
    for record in read_records(run.episodes):
        group = groups.get(record.group_id)
        if group is None or record.purpose != "train" or failed(record):
            continue
        place = record.group_id, member(record.episode_id)
        if place in kept:
            continue
        if reason := _unfit(record, lineage, limit):
            refused[record.episode_id] = reason
        else:
            kept[place] = record.episode_id
            group.records.append(record)
    return set(kept.values())


def _unfit(record: EpisodeRecord, lineage: Lineage, limit: float) -> str:
    """Return why an episode may not train any more; empty when it may."""
    steps = [lineage.versions.get(version) for version in record.versions or ()]
    if any(step is None for step in steps):
        return "lineage"
    return "stale" if any(lineage.newest_base - step > limit for step in steps if step is not None) else ""
