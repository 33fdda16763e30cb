"""Router policies: round_robin, random, min_load, power_of_two, sticky, consistent_hash and prefix_cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl


class RoundRobinConfig(Config):
    """round_robin has no keys."""


class RandomConfig(Config):
    """random has no keys; it draws from the run's seed."""


class MinLoadConfig(Config):
    """min_load has no keys; ties fall by the run's seed."""


class PowerOfTwoConfig(Config):
    """power_of_two has no keys; it draws from the run's seed."""


class StickyConfig(Config):
    """Keys of sticky."""

    ttl: Annotated[PositiveFloat, Field(description="seconds after which an idle session is forgotten")] = (
        14400.0
    )
    max_sessions: Annotated[
        PositiveInt, Field(description="sessions remembered; beyond it the longest idle one is forgotten")
    ] = 65536
    rebalance: Annotated[
        float | None,
        Field(
            ge=0,
            description="when workers join, a session moves to one of them on its next turn if its worker "
            "has more than 1 + this times the mean of open sessions; null: it never moves",
        ),
    ] = 0.25


class ConsistentHashConfig(Config):
    """Keys of consistent_hash."""

    key: Annotated[
        Literal["session", "task"],
        Field(description="what is hashed; the other one where a request lacks it"),
    ] = "session"
    points: Annotated[
        PositiveInt,
        Field(description="points of a worker on the ring; shares of keys differ by about 1/sqrt(points)"),
    ] = 128
    load_factor: Annotated[
        float | None,
        Field(
            ge=1,
            description="no worker gets more than this times the mean of open sessions; null: no bound",
        ),
    ] = None


class PrefixCacheConfig(Config):
    """Keys of prefix_cache."""

    chunk: Annotated[
        PositiveInt, Field(description="tokens that are compared as one; a match is whole chunks")
    ] = 64
    max_chunks: Annotated[
        PositiveInt, Field(description="chunks remembered; beyond it the longest unused are forgotten")
    ] = 65536
    load_factor: Annotated[
        float,
        Field(ge=1, description="no worker gets a new session beyond this times the mean of open sessions"),
    ] = 1.05
    recompute_cost: Annotated[
        float,
        Field(
            ge=0,
            description="tokens in flight at a worker that weigh as much as one prompt token it must compute",
        ),
    ] = 22.0


@hookimpl
def rollhook_router_policies() -> list[Component]:
    """Supply the policies."""
    package = "rollhook_routing"
    return [
        Component("round_robin", RoundRobinConfig, f"{package}.policies:RoundRobin", "each worker in turn"),
        Component("random", RandomConfig, f"{package}.policies:Random", "a seeded random worker"),
        Component(
            "min_load", MinLoadConfig, f"{package}.policies:MinLoad", "the worker with the least to do"
        ),
        Component(
            "power_of_two", PowerOfTwoConfig, f"{package}.policies:PowerOfTwo", "the less loaded of two drawn"
        ),
        Component(
            "sticky", StickyConfig, f"{package}.policies:Sticky", "the worker that a session had before"
        ),
        Component(
            "consistent_hash",
            ConsistentHashConfig,
            f"{package}.ring:ConsistentHash",
            "by a hash of the session or task",
        ),
        Component(
            "prefix_cache",
            PrefixCacheConfig,
            f"{package}.prefix:PrefixCache",
            "the worker with the least to do that knows the prompt's start",
        ),
    ]
