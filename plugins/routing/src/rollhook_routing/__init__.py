"""Router policies: round_robin, random, min_load and sticky."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl


class RoundRobinConfig(Config):
    """round_robin has no keys."""


class RandomConfig(Config):
    """random has no keys; it draws from the run's seed."""


class MinLoadConfig(Config):
    """min_load has no keys; ties fall by the run's seed."""


class StickyConfig(Config):
    """Keys of sticky."""

    ttl: Annotated[PositiveFloat, Field(description="seconds after which an idle session is forgotten")] = (
        14400.0
    )
    max_sessions: Annotated[
        PositiveInt, Field(description="sessions remembered; beyond it the longest idle one is forgotten")
    ] = 65536


@hookimpl
def rollhook_router_policies() -> list[Component]:
    """Supply the four policies."""
    module = "rollhook_routing.policies"
    return [
        Component("round_robin", RoundRobinConfig, f"{module}:RoundRobin", "each worker in turn"),
        Component("random", RandomConfig, f"{module}:Random", "a seeded random worker"),
        Component("min_load", MinLoadConfig, f"{module}:MinLoad", "the worker with the least to do"),
        Component("sticky", StickyConfig, f"{module}:Sticky", "the worker that a session had before"),
    ]
