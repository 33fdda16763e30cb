"""An engine that is SGLang, for training and evaluation on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook.recipe.problem import Problem
from rollhook_sglang.checks import problems
from rollhook_sglang.config import SGLangConfig

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe


@hookimpl
def rollhook_engines() -> list[Component]:
    """Supply the engine."""
    return [
        Component(
            "sglang",
            SGLangConfig,
            "rollhook_sglang.engine:SGLangEngine",
            "SGLang's servers on GPUs: one or several, each on one node or across nodes",
        )
    ]


@hookimpl
def rollhook_check(recipe: Recipe) -> list[Problem]:
    """Find releases that are not supported, and what the SGLang of this machine lacks."""
    if recipe.engine is None or recipe.engine.use != "sglang":
        return []
    try:
        config = SGLangConfig(**recipe.engine.keys)
    except ValueError:  # the keys are checked, and told, elsewhere
        return []
    return [*problems(config)]
