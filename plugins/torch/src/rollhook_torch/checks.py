"""What `rollhook check` finds out about a recipe that generates or trains here; torch is not imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rollhook.recipe.problem import Problem

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe

#: what the drivers make where there is a GPU that torch calls cuda: of NVIDIA, of AMD, in WSL
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what the recipe asks of transformers or torch that they, or this machine, do not have."""
    yield from _temperature(recipe)
    yield from _ranks(recipe)
    for key, use, name in (("engine", recipe.engine, "transformers"), ("trainer", recipe.trainer, "torch")):
        device = str(use.keys.get("device", "auto")) if use is not None and use.use == name else "auto"
        if device.startswith("cuda") and (reason := no_gpu()):
            yield Problem(
                f"{key}.device", f"is {device}, but {reason}", hint=f"set {key}.device=auto", scope="site"
            )


def no_gpu(devices: Path = Path("/dev")) -> str:
    """Return why torch will see no GPU on this machine; empty where there may be one."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(name, "0").strip() in ("", "-1"):
            return f"{name} hides all GPUs here"
    if not any(True for pattern in _DEVICES for _ in devices.glob(pattern)):
        return "this machine has no GPU"
    return ""


def _ranks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.engine is not None and recipe.engine.use == "transformers" and recipe.router.dp_aware == "on":
        yield Problem(
            "router.dp_aware",
            "is on, but engine transformers has no data-parallel ranks",
            hint="set router.dp_aware=auto; engine.processes starts several engines",
        )


def _temperature(recipe: Recipe) -> Iterator[Problem]:
    """Yield a trainer whose distribution is not the one that was sampled from."""
    trainer = recipe.trainer
    if trainer is None or trainer.use != "torch" or trainer.keys.get("algorithm", "grpo") != "grpo":
        return
    sampled, trained = recipe.rollout.sampling.temperature, trainer.keys.get("temperature", 1.0)
    if sampled != trained:
        yield Problem(
            "trainer.temperature",
            f"is {trained}, but episodes are sampled at rollout.sampling.temperature {sampled}",
            allowed="both the same: log-probabilities are compared token by token",
            hint="set trainer.temperature=${rollout.sampling.temperature}",
        )
