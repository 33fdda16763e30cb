"""A transformers engine that speaks SGLang's endpoints, and a trainer for GRPO and SFT, both in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook_torch.config import EngineConfig, TrainerConfig

if TYPE_CHECKING:
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe


@hookimpl
def rollhook_engines() -> list[Component]:
    """Supply the engine."""
    return [
        Component(
            "transformers",
            EngineConfig,
            "rollhook_torch.engine:TransformersEngine",
            "any Hugging Face causal LM on CPU or one GPU, behind SGLang's endpoints",
        )
    ]


@hookimpl
def rollhook_trainers() -> list[Component]:
    """Supply the trainer."""
    return [
        Component(
            "torch",
            TrainerConfig,
            "rollhook_torch.trainer:TorchTrainer",
            "GRPO and SFT with AdamW on CPU or one GPU",
        )
    ]


@hookimpl
def rollhook_check(recipe: Recipe) -> list[Problem]:
    """Report what this engine and this trainer do not have, here or anywhere."""
    from rollhook_torch.checks import problems

    return list(problems(recipe))
