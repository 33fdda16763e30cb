"""What a new attempt takes over: prompts that no surviving step has taken, and their finished episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollhook.environment import Task
from rollhook.episode_store import read_records, read_samples
from rollhook.errors import RunError
from rollhook.records import EpisodeRecord, Group
from rollhook.runtime.batch import Prompt, failed
from rollhook.runtime.producer import member

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import RunDir
    from rollhook.runtime.lineage import Lineage

FindTask = Callable[[str, str], Task | None]


def owned_prompts(
    lineage: Lineage, run: RunDir, recipe: Recipe, find: FindTask
) -> list[tuple[Prompt, Group]]:
    """Return the prompts to be owned again, oldest first, each with the episodes that may still train.

    An episode may when each of its tokens is of a version of this lineage that is not too old. Blocks on the
    disk. RunError when a prompt's task is gone.
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
    kept = _reusable(lineage, run, recipe, {group_id: group for group_id, (_, group) in owned.items()})
    for sample in read_samples(run.episodes, kept) if kept else ():
        owned[sample.group_id][1].samples.append(sample)
    return list(owned.values())


def _reusable(lineage: Lineage, run: RunDir, recipe: Recipe, groups: dict[str, Group]) -> set[str]:
    """Put the records of episodes that may still train into their groups; return their ids."""
    if not groups:
        return set()
    limit = recipe.rollout.max_staleness
    kept: dict[tuple[str, int], str] = {}
    for record in read_records(run.episodes):
        group = groups.get(record.group_id)
        if group is None or record.purpose != "train" or failed(record):
            continue
        place = record.group_id, member(record.episode_id)
        if place not in kept and _fresh(record, lineage, limit):
            kept[place] = record.episode_id
            group.records.append(record)
    return set(kept.values())


def _fresh(record: EpisodeRecord, lineage: Lineage, limit: int) -> bool:
    known = [lineage.versions.get(version) for version in record.versions or ()]
    return all(step is not None and lineage.newest_base - step <= limit for step in known)
