"""Word problems with one exact answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl

Family = Literal["sums", "shopping", "sharing", "travel", "ages", "parts", "saving", "work"]
FAMILIES: tuple[Family, ...] = (
    "sums",
    "shopping",
    "sharing",
    "travel",
    "ages",
    "parts",
    "saving",
    "work",
)


class ArithmeticConfig(Config):
    """Keys of `environment: {use: arithmetic}`."""

    count: Annotated[int, Field(ge=20, le=1_000_000, description="problems, of all splits together")] = 4000
    families: Annotated[tuple[Family, ...], Field(min_length=1, description="kinds of problems, in turn")] = (
        FAMILIES
    )
    seed: Annotated[NonNegativeInt, Field(description="other problems for another seed")] = 0
    largest: Annotated[int, Field(ge=3, le=10_000, description="largest number that a problem names")] = 20
    heldout_percent: Annotated[
        int, Field(gt=0, lt=100, description="of all problems, by the hash of their text")
    ] = 10
    system_prompt: Annotated[str, Field(description="first message; empty: none")] = (
        "Solve the problem. End with a line that says `Answer:` and the number."
    )


@hookimpl
def rollhook_environments() -> list[Component]:
    """Supply environment.arithmetic."""
    return [
        Component(
            "arithmetic",
            ArithmeticConfig,
            "rollhook_arithmetic.environment:Arithmetic",
            "word problems with one exact answer, without a sandbox",
        )
    ]
