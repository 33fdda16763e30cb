"""A policy behind an endpoint of somebody else's: no weights, no Ray, no tokenizer."""

from __future__ import annotations

from contextlib import AsyncExitStack

from rollhook.engine.messages import MessageEngine
from rollhook.plugins import Plugins
from rollhook.recipe.schema import Recipe
from rollhook.runtime.parts import Parts
from rollhook.runtime.seeds import derive
from rollhook.session import MessagePolicy


def asks_endpoint(recipe: Recipe, plugins: Plugins) -> bool:
    """Return whether the recipe's engine takes messages, so that `open_endpoint` opens the policy."""
    use = recipe.engine
    return use is not None and not plugins.load_class("engine", use.use).gives_tokens


async def open_endpoint(parts: Parts, stack: AsyncExitStack) -> MessagePolicy:
    """Connect the recipe's engine and return the policy over it; both are closed with the stack.

    Raises EngineError, one sentence, when the endpoint cannot be used.
    """
    recipe = parts.recipe
    assert recipe.engine is not None
    engine: MessageEngine = parts.build("engine", recipe.engine, "engine")
    stack.push_async_callback(engine.stop)
    await engine.start()
    stated = recipe.model.context_length if recipe.model else None
    policy = MessagePolicy(engine, context_length=stated, seed=derive(recipe.seed, "policy"))
    stack.push_async_callback(policy.close)
    return policy
