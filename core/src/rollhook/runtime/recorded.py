"""What a run was made of, for verbs that work on it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.errors import RunError, UsageError
from rollhook.recipe.load import read_recipe
from rollhook.recipe.problem import RecipeError

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import RunDir


def recorded_recipe(run: RunDir, *sections: str) -> Recipe:
    """Return the recipe that a run's lock holds.

    Raises RunError when there is no lock, RecipeError when these sections of it cannot be resolved here; the
    others are not judged.
    """
    if not run.lock_path.is_file():
        raise RunError(f"{run.path} has no {run.lock_path.name}, so nothing says what it trained or judged")
    loaded = read_recipe(run.lock_path)
    wrong = [problem for problem in loaded.problems if problem.key.split(".")[0] in sections]
    if wrong:
        raise RecipeError(wrong)
    return loaded.recipe


def step_range(text: str | None, last: int) -> tuple[int, int]:
    """Return first and last step of `A-B` or `A`, counted from 1; None: all of `last` steps."""
    first, dash, end = (text or f"1-{last}").partition("-")
    try:
        begin, stop = int(first), int(end if dash else first)
    except ValueError:
        raise UsageError(f"--steps {text}: write A-B or A, e.g. 3-7") from None
    if not 1 <= begin <= stop:
        raise UsageError(f"--steps {text}: steps count from 1, the smaller one first")
    if stop > last:
        raise UsageError(f"--steps {text}: the run has {last} steps")
    return begin, stop
