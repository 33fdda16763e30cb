"""Training with verl: its job is rendered, its episodes are ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook_verl.config import VerlConfig

if TYPE_CHECKING:
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe


@hookimpl
def rollhook_trainers() -> list[Component]:
    """Supply the trainer."""
    return [
        Component(
            "verl",
            VerlConfig,
            "rollhook_verl.trainer:VerlTrainer",
            "verl: PPO and GRPO on our episodes, SFT on messages, on one node of GPUs or many",
        )
    ]


@hookimpl
def rollhook_check(recipe: Recipe) -> list[Problem]:
    """Report what verl could not run."""
    if recipe.trainer is None or recipe.trainer.use != "verl":
        return []
    from rollhook_verl.checks import problems

    return list(problems(recipe))
