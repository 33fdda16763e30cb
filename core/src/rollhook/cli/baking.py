"""The work of `rollhook sandboxes bake`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rollhook import plugins as loader
from rollhook.cli.attempts import EXIT_STOPPED
from rollhook.cli.output import as_json
from rollhook.errors import UsageError
from rollhook.packs import cache_directory
from rollhook.recipe.load import load_recipe
from rollhook.recipe.names import component_names
from rollhook.recipe.schema import Recipe, SandboxUse
from rollhook.recipe.sources import shipped_recipes
from rollhook.runtime.baking import Baked, Wanted, bake_all, wanted_by
from rollhook.runtime.parts import Parts
from rollhook.runtime.progress import Display
from rollhook.runtime.rollout_worker import build_environments
from rollhook.runtime.stopping import stopping
from rollhook.runtime.task_runs import proof_recipe, task_source
from rollhook.terminal import one_line

#: with more lines than this, those of failures stand at the end again
_SHOWN = 20

if TYPE_CHECKING:
    from rollhook.environment import Environment, Task


def bake(
    source: str,
    overrides: Sequence[str],
    use: SandboxUse | None,
    environment: str,
    split: str | None,
    only: Sequence[str] | None,
    concurrency: int,
    json: bool,
) -> int:
    """Bake, say how it went, and return the exit code."""
    display = Display()
    display.take_logs()
    recipe, splits = _recipe(source, overrides, use, environment)
    try:
        with display.running():
            rows, refused = asyncio.run(
                _bake(recipe, splits if split is None else [split], only, concurrency, display)
            )
    except (KeyboardInterrupt, asyncio.CancelledError):
        display.say("Stopped; the same command goes on: what was made is not made again.")
        return EXIT_STOPPED
    failed = [row for row in rows if row.error]
    if json:
        as_json({"baked": [dataclasses.asdict(row) for row in rows], "without_a_sandbox": refused})
    for row in failed if len(rows) > _SHOWN else []:
        display.say(f"FAILED: {row.image} of {_tasks_of(row)}: {row.error}")
    for task, why in refused.items():
        display.say(f"FAILED: task {task}: {one_line(why)}")
    display.say(f"{len(rows) - len(failed)} baked, {len(failed) + len(refused)} failed")
    return 1 if failed or refused else 0


def _recipe(
    source: str, overrides: Sequence[str], use: SandboxUse | None, environment: str
) -> tuple[Recipe, list[str | None]]:
    """Return what to bake for, and the splits of it that are used (None: all)."""
    if source.endswith((".yaml", ".yml")) or source in shipped_recipes():
        recipe = load_recipe(source, overrides).recipe
        if use is not None:
            recipe = recipe.model_copy(update={"sandbox": use})
        if recipe.sandbox is None or not recipe.environment:
            raise UsageError(f"recipe {source} has no sandbox or no environment, so there is nothing to bake")
        evaluation = [recipe.evaluation.split] if recipe.evaluation.every else []
        return recipe, [*dict.fromkeys([*(each.split for each in recipe.environment), *evaluation])]
    if overrides:
        raise UsageError(f"{overrides[0]}: overrides go with a recipe, and {source} is none")
    if use is None:
        raise UsageError(f"{source} names no sandbox backend: add --backend NAME, or bake a recipe")
    sandbox = {"use": use.use, **use.model_dump(exclude={"use"}, exclude_unset=True)}
    return proof_recipe(task_source(source, environment, {}), sandbox), [None]


async def _bake(
    recipe: Recipe,
    splits: Sequence[str | None],
    only: Sequence[str] | None,
    concurrency: int,
    display: Display,
) -> tuple[list[Baked], Mapping[str, str]]:
    assert recipe.sandbox is not None
    names = [name for name in component_names(recipe) if name[0] in ("environment", "sandbox", "pack")]
    parts = Parts(recipe, loader.load(names), cache_directory(), "", 0)
    async with AsyncExitStack() as stack:
        backend = await parts.open_backend(stack)
        assert backend is not None
        environments = await build_environments(parts, backend.capabilities, stack)
        wanted: dict[str, Wanted] = {}
        refused: dict[str, str] = {}
        for environment in environments.values():
            tasks = await asyncio.to_thread(_tasks, environment, splits, only)
            found, no = await asyncio.to_thread(wanted_by, environment, tasks, parts.context("environment"))
            for each in found:
                wanted.setdefault(each.key, Wanted(each.key, each.spec)).tasks.extend(each.tasks)
            refused |= no
        if not wanted and not refused:
            raise UsageError("there is no task to bake for")

        def finished(row: Baked) -> None:
            display.advance()
            said = f"FAILED: {row.error}" if row.error else row.name or "nothing to make"
            display.say(f"{row.image} of {_tasks_of(row)}: {said} ({row.seconds:.1f} s)")

        with stopping(display):
            display.begin("bake", len(wanted))
            retries = recipe.sandbox.create_retries
            rows = await bake_all(
                backend, list(wanted.values()), concurrency=concurrency, retries=retries, finished=finished
            )
    return rows, refused


def _tasks(environment: Environment, splits: Sequence[str | None], only: Sequence[str] | None) -> list[Task]:
    found = {task.id: task for split in splits for task in environment.tasks(split)}
    if not only:
        return list(found.values())
    return [task for task in found.values() if any(fnmatchcase(task.id, pattern) for pattern in only)]


def _tasks_of(row: Baked) -> str:
    first = ", ".join(row.tasks[:3])
    return one_line(first if len(row.tasks) <= 3 else f"{first} and {len(row.tasks) - 3} more")
