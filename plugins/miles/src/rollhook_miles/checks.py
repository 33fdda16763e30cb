"""What `rollhook check` says about a recipe that miles is to train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe
from rollhook_miles.config import MilesConfig
from rollhook_miles.memory import GB, estimate

#: inference GPUs come in such numbers: eight make one server of the low-latency shape, or two of the balanced
#: one
ROLLOUT_GPUS = 8
#: miles renders and parses by family, and refuses engines that parse otherwise: (reasoning, tools)
FAMILIES = {"glm47": ("glm45", "glm47")}


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is wrong; keys that do not fit their types are told elsewhere."""
    assert recipe.trainer is not None
    try:
        config = MilesConfig(**recipe.trainer.keys)
    except ValueError:
        return
    yield from _cluster(recipe, config)
    yield from _ranks(config)
    yield from _streaming(config)
    yield from _engine(recipe, config)
    yield from _session(recipe, config)


def _cluster(recipe: Recipe, config: MilesConfig) -> Iterator[Problem]:
    keys, p = recipe.launcher.keys, config.parallel
    nodes, gpus = keys.get("nodes"), keys.get("gpus_per_node")
    least = -(-ROLLOUT_GPUS // p.gpus_per_node) if config.replay is None else 0
    if isinstance(gpus, int) and gpus != p.gpus_per_node:
        yield Problem(
            "launcher.gpus_per_node",
            f"{gpus} GPUs a node, but trainer.parallel.gpus_per_node is {p.gpus_per_node}",
            hint=f"set launcher.gpus_per_node={p.gpus_per_node}",
        )
    if not isinstance(nodes, int):
        return
    if nodes < p.nodes + least:
        what = (
            "to train"
            if config.replay is not None
            else f"to train and {least} for {ROLLOUT_GPUS} rollout GPUs"
        )
        yield Problem(
            "launcher.nodes",
            f"{nodes} nodes are too few: {p.nodes} are needed {what}, so at least {p.nodes + least}",
            hint=f"set launcher.nodes={p.nodes + least}",
        )
    elif config.replay is None and (rest := (nodes - p.nodes) * p.gpus_per_node) % ROLLOUT_GPUS:
        yield Problem(
            "launcher.nodes",
            f"{nodes} nodes leave {rest} GPUs for inference, which is no multiple of {ROLLOUT_GPUS}",
            hint=f"set launcher.nodes={nodes + 1}",
        )


def _ranks(config: MilesConfig) -> Iterator[Problem]:
    p = config.parallel
    ranks = p.nodes * p.gpus_per_node
    for name, product in (
        ("tensor x pipeline x context", p.tensor * p.pipeline * p.context),
        ("expert x expert_tensor x pipeline", p.expert * p.expert_tensor * p.pipeline),
    ):
        if ranks % product:
            yield Problem(
                "trainer.parallel", f"{name} is {product}, which does not divide the {ranks} GPUs that train"
            )


def _streaming(config: MilesConfig) -> Iterator[Problem]:
    found = estimate(config)
    if found is None or config.memory.stream_optimizer_to is not None:
        return
    if found.must_stream:
        yield Problem(
            "trainer.memory.stream_optimizer_to",
            f"is null, and a rank's optimizer state, {found.state / GB:.0f} GB, does not fit a GPU of "
            f"{found.gpu / GB:.0f} GB beside {found.resident / GB:.0f} GB of weights and gradients: with "
            f"{found.data_parallel} data-parallel rank(s) it is not sharded enough",
            hint="name a node-local directory, or train on more nodes",
        )


def _engine(recipe: Recipe, config: MilesConfig) -> Iterator[Problem]:
    if recipe.engine is None:
        if config.replay is None:
            yield Problem(
                "engine", "is missing: miles starts its engines by it", hint="engine: {use: sglang}"
            )
        return
    keys = recipe.engine.keys
    reasoning, tools = FAMILIES.get(config.tito_model, (None, None))
    for key, wanted in (("reasoning_parser", reasoning), ("tool_call_parser", tools)):
        given = keys.get(key)
        if wanted is not None and given is not None and given != wanted:
            yield Problem(
                f"engine.{key}",
                f"{given!r} does not go with trainer.tito_model {config.tito_model}",
                hint=f"set engine.{key}={wanted}",
            )
    attention: Any = keys.get("dp_attention") or keys.get("profile") == "balanced"
    if attention and recipe.router.dp_aware == "off":
        yield Problem(
            "router.dp_aware",
            "off hides the ranks of an engine with dp_attention: requests would pile up on one of them",
            hint="set router.dp_aware=auto",
        )


def _session(recipe: Recipe, config: MilesConfig) -> Iterator[Problem]:
    if recipe.rollout.pause_mode == "abort":
        yield Problem(
            "rollout.pause_mode",
            "abort breaks replies of miles' session server, which refuses it",
            hint="set rollout.pause_mode=in_place",
        )
    if recipe.sandbox is not None and config.replay is None:
        limit = recipe.sandbox.keys.get("max_sandboxes")
        if isinstance(limit, int) and limit < recipe.rollout.max_concurrent:
            yield Problem(
                "sandbox.max_sandboxes",
                f"{limit} is less than rollout.max_concurrent, {recipe.rollout.max_concurrent} episodes",
            )
