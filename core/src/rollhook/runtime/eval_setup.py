"""What an evaluation by `rollhook eval` needs before it runs: a checked recipe, a directory, weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.durable import write_atomic
from rollhook.errors import RunError, UsageError
from rollhook.recipe.check import compose
from rollhook.recipe.lock import digest, write_lock
from rollhook.recipe.match import ALL
from rollhook.rundir import RunDir
from rollhook.runtime.endpoint import asks_endpoint
from rollhook.runtime.model import is_path, local_model
from rollhook.runtime.results import finished_run

if TYPE_CHECKING:
    from rollhook.plugins import Plugins
    from rollhook.recipe.load import Loaded
    from rollhook.recipe.schema import Recipe
    from rollhook.runtime.progress import Display


def checked(source: str, overrides: Sequence[str]) -> tuple[Loaded, Plugins]:
    """Return a recipe that can be evaluated here. Raises RecipeError with all that is wrong with it."""
    loaded, plugins = compose(source, overrides, evaluating=True)
    recipe = loaded.recipe
    if recipe.checkpoint.load_from is not None or asks_endpoint(recipe, plugins):
        return loaded, plugins  # with weights from elsewhere, or none, nothing is needed
    if results := _results_of_needs(loaded):
        loaded, plugins = compose(source, overrides, needs_results=results, evaluating=True)
    return loaded, plugins


def create(loaded: Loaded, plugins: Plugins, run_id: str | None) -> RunDir:
    """Make the directory of a new evaluation, with its recipe and lock."""
    recipe = loaded.recipe
    run = RunDir.create(Path(recipe.storage.root).expanduser(), f"eval-{recipe.name}", run_id=run_id)
    write_atomic(run.recipe_path, loaded.text.encode())
    write_lock(run.lock_path, loaded, plugins)
    return run


def resume(reference: str, display: Display) -> tuple[Loaded, Plugins, RunDir]:
    """Return what an evaluation was begun with. Raises RunError for a run that is none."""
    run = RunDir.find(reference)
    run.check_verb("eval")
    if not run.lock_path.is_file() or not run.attempts():
        raise RunError(f"run {run.run_id} is no run of `rollhook eval`, so this verb cannot resume it")
    loaded, plugins = compose(run.lock_path, evaluating=True, allow_changed=[ALL])
    for remark in loaded.remarks:
        display.say(f"Lock: {remark}")
    return loaded, plugins, run


def weights(recipe: Recipe, plugins: Plugins) -> Path:
    """Return the directory of the weights to evaluate. Raises UsageError when they are not there."""
    name = recipe.checkpoint.load_from or (recipe.model and recipe.model.path)
    assert name, "the rules of recipes have seen to that"
    if is_path(name) or recipe.trainer is None:
        return local_model(name)
    found: Path = plugins.load_class("trainer", recipe.trainer.use).fetch_model(name)
    return found


def _results_of_needs(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """Return the results of the finished runs that a recipe needs; none are run, for that trains."""
    recipe, results = loaded.recipe, {}
    root = Path(recipe.storage.root).expanduser().resolve()
    for alias, need in recipe.needs.items():
        needed, plugins = compose(need.recipe, [*need.overrides, f"storage.root={json.dumps(str(root))}"])
        found = finished_run(root, digest(needed, plugins))
        if found is None:
            raise UsageError(
                f"needs.{alias} ({need.recipe}) has not run below {root}, and eval trains nothing: "
                "run it first, or give weights with --checkpoint"
            )
        results[alias] = {"checkpoint": found.checkpoint, "run_id": found.run_id}
    return results
