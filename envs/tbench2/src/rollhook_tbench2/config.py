"""The keys of `environment: {use: tbench2, ...}` and of the pocket pack."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from rollhook.component import Config


class PocketConfig(Config):
    """Keys of the pocket pack; another value gives another pack, cached beside the first."""

    seed: Annotated[
        NonNegativeInt, Field(description="seed of the draws; the split does not depend on it")
    ] = 0
    train_per_family: Annotated[PositiveInt, Field(description="training tasks in each of 13 families")] = 200
    heldout_per_family: Annotated[PositiveInt, Field(description="held-out tasks in each of 13 families")] = (
        32
    )
    noise: Annotated[
        float,
        Field(ge=0, le=1, description="fraction of wrong demonstrations in the eight noisy families"),
    ] = 0.6
    undemonstrated: Annotated[
        list[str], Field(description="families that are only ever demonstrated wrongly")
    ] = []


class TBench2Config(Config):
    """Keys of environment tbench2."""
