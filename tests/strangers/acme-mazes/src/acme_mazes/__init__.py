"""Mazes of Acme: find the shortest way, then walk it."""

from typing import Annotated

from pydantic import Field

from rollhook import Component, Config, hookimpl


class MazesConfig(Config):
    """Keys of `environment: {use: mazes}`."""

    count: Annotated[int, Field(gt=0, le=10_000, description="mazes in each split")] = 200
    sizes: Annotated[tuple[int, ...], Field(min_length=1, description="rows and columns, in turn")] = (
        3,
        4,
        5,
    )


@hookimpl
def rollhook_environments() -> list[Component]:
    """Supply the environment."""
    return [Component("mazes", MazesConfig, "acme_mazes.mazes:Mazes", "find the shortest way, then walk it")]
