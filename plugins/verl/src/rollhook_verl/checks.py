"""What `rollhook check` says about a recipe that verl is to train."""

from __future__ import annotations

from collections.abc import Iterator

from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe
from rollhook_verl.config import VerlConfig


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is wrong; keys that do not fit their types are told elsewhere."""
    assert recipe.trainer is not None
    try:
        config = VerlConfig(**recipe.trainer.keys)
    except ValueError:
        return
    gpus = recipe.launcher.keys.get("gpus_per_node", 0)
    if recipe.launcher.use != "local" and not gpus:
        yield Problem(
            "launcher.gpus_per_node",
            "is 0, and verl counts the GPUs of each node (trainer.n_gpus_per_node)",
            hint="set launcher.gpus_per_node=8",
        )
    if recipe.model is None or recipe.model.path is None:
        yield Problem("model.path", "is missing: verl trains weights that exist")
    if config.algorithm == "sft":
        return
    if recipe.engine is None or recipe.engine.use != "sglang":
        yield Problem(
            "engine", "verl serves with SGLang here, so the recipe names it", hint="engine: {use: sglang}"
        )
    if config.prompt_tokens >= recipe.budgets.max_seq_len:
        yield Problem(
            "trainer.prompt_tokens",
            f"{config.prompt_tokens} leave nothing of a session of budgets.max_seq_len, "
            f"{recipe.budgets.max_seq_len} tokens",
        )
    if config.algorithm == "grpo" and recipe.rollout.group_size == 1:
        yield Problem(
            "rollout.group_size", "1 gives GRPO nothing to compare", hint="set rollout.group_size=8"
        )
    mini, batch = config.mini_batch_groups, recipe.rollout.batch_groups
    if mini is not None and batch % mini:
        yield Problem("trainer.mini_batch_groups", f"{mini} does not divide rollout.batch_groups, {batch}")
