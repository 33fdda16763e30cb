"""Training with miles: its job is rendered, its episodes are ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook_miles.config import MilesConfig

if TYPE_CHECKING:
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe


@hookimpl
def rollhook_trainers() -> list[Component]:
    """Supply the trainer."""
    return [
        Component(
            "miles",
            MilesConfig,
            "rollhook_miles.trainer:MilesTrainer",
            "miles with Megatron and SGLang, fully asynchronous; its episodes are ours",
        )
    ]


@hookimpl
def rollhook_check(recipe: Recipe) -> list[Problem]:
    """Report what miles could not run."""
    if recipe.trainer is None or recipe.trainer.use != "miles":
        return []
    from rollhook_miles.checks import problems

    return list(problems(recipe))
