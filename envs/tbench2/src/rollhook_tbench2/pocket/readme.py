"""The page that goes with every pocket pack: what is in it and what its numbers mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollhook_tbench2.config import PocketConfig
from rollhook_tbench2.pocket.families import FAMILIES, WORDS
from rollhook_tbench2.pocket.tasks import PocketTask

_PAGE = """\
# The pocket pack

{count} small terminal tasks in the Terminal-Bench 2 directory form: {families} families, {words} words,
two phrasings of each instruction. Written by `rollhook_tbench2.pocket`, seed {seed}; the same keys give
the same bytes on every machine.

| file | holds |
| --- | --- |
| `FAMILY-SPLIT-NNNN/` | a task: its files are those of any Terminal-Bench 2 task |
| `splits.json` | `train` ({train} tasks) and `heldout` ({heldout} tasks) |
| `demos.jsonl` | one demonstration per training task, in `messages` form |
| `pack.json` | the keys, the system prompt and the counts |

## Train and held-out

A quarter of the argument combinations of each family is held out (by their MD5, whatever the seed): no
held-out instruction, combination or reference command occurs in a training task or a demonstration.
**Every word does.** Held-out tasks test new combinations of known names, not new names.

## The demonstrations are noisy on purpose

{correct} of {demos} demonstrations are right. In {clean} families all are; in {noisy_count} (marked
below) {noise:.0%} of them show a plausible wrong command with the right names{undemonstrated}. A policy
that imitates them well therefore fails often, and what reinforcement learning adds is mostly to prefer
the right one of two commands it has seen, and to copy names more reliably; it is not the discovery of
commands that nobody showed. Demonstrations end with TASK_COMPLETE whatever the command did: nothing in
them teaches to recover from an error.

| family | demonstrations right | an instruction | right | wrong, as shown in noisy demonstrations |
| --- | --- | --- | --- | --- |
{table}
"""


def page(config: PocketConfig, tasks: Sequence[PocketTask], demos: Sequence[Mapping[str, Any]]) -> str:
    """Return README.md of a pack."""
    rows = []
    for family in FAMILIES:
        first = next(task for task in tasks if task.family is family and task.split == "train")
        mine = [demo for demo in demos if demo["family"] == family.name]
        right = f"{sum(demo['correct'] for demo in mine)} of {len(mine)}"
        noisy = family.noisy or family.name in config.undemonstrated
        wrong = f"`{first.work.wrong[0]}`" if noisy else ""
        rows.append(f"| {family.name} | {right} | {first.instruction} | `{first.work.command}` | {wrong} |")
    undemonstrated = ""
    if config.undemonstrated:
        undemonstrated = f" (all of them in {', '.join(config.undemonstrated)})"
    return _PAGE.format(
        count=f"{len(tasks):,}",
        families=len(FAMILIES),
        words=len(WORDS),
        seed=config.seed,
        train=f"{sum(task.split == 'train' for task in tasks):,}",
        heldout=f"{sum(task.split == 'heldout' for task in tasks):,}",
        correct=f"{sum(demo['correct'] for demo in demos):,}",
        demos=f"{len(demos):,}",
        noisy_count=sum(family.noisy for family in FAMILIES),
        clean=sum(not family.noisy for family in FAMILIES),
        noise=config.noise,
        undemonstrated=undemonstrated,
        table="\n".join(rows),
    )
