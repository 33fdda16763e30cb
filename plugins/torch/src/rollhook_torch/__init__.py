"""A transformers engine that speaks SGLang's endpoints, and a trainer for GRPO and SFT, both in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook.recipe.problem import Problem
from rollhook_torch.config import EngineConfig, TrainerConfig

if TYPE_CHECKING:
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
    """Report a trainer whose distribution is not the one that was sampled from."""
    trainer = recipe.trainer
    if trainer is None or trainer.use != "torch" or trainer.keys.get("algorithm", "grpo") != "grpo":
        return []
    sampled, trained = recipe.rollout.sampling.temperature, trainer.keys.get("temperature", 1.0)
    if sampled == trained:
        return []
    return [
        Problem(
            "trainer.temperature",
            f"is {trained}, but episodes are sampled at rollout.sampling.temperature {sampled}",
            allowed="both the same: log-probabilities are compared token by token",
            hint="set trainer.temperature=${rollout.sampling.temperature}",
        )
    ]
