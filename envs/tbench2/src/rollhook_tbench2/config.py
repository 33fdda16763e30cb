"""The keys of `environment: {use: tbench2, ...}` and of the pocket pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from rollhook.component import Config
from rollhook.recipe.refs import ComponentRef
from rollhook.recipe.schema import Use
from rollhook.secrets import Secret
from rollhook_tbench2.pocket.families import FAMILIES


class Floor(Config):
    """The least that a sandbox made from an image has, where a task asks for less or says nothing."""

    cpus: Annotated[NonNegativeFloat, Field(description="processors")] = 1.0
    memory_mb: Annotated[NonNegativeInt, Field(description="MiB of memory")] = 2048
    storage_mb: Annotated[NonNegativeInt, Field(description="MiB of disk")] = 10240


class TBench2Config(Config):
    """Keys of environment tbench2: where the tasks are, how they are split, what the agent is told."""

    tasks_dir: Annotated[
        str | None, Field(description="directory of task directories (or one task directory)")
    ] = None
    pack: Annotated[Use | None, ComponentRef("pack"), Field(description="a generated pack, e.g. pocket")] = (
        None
    )
    splits: Annotated[
        Mapping[str, str | tuple[str, ...]],
        Field(description="split name -> task ids, or a file with one id per line; over splits.json"),
    ] = {}
    system_prompt: Annotated[
        str | None,
        Field(description="what the agent is told; default: as pack.json says, else one command per turn"),
    ] = None
    reward_key: Annotated[
        str, Field(description="key of reward.json that is the reward; a single other key counts too")
    ] = "reward"
    host_env: Annotated[
        Mapping[str, Secret],
        Field(description="what `${NAME}` in a task.toml stands for: NAME -> env:NAME or file:PATH"),
    ] = {}
    floor: Annotated[Floor, Field(description="least resources of sandboxes made from images")] = Floor()
    artifact_mb: Annotated[
        PositiveInt, Field(description="MiB of artifacts kept of an episode's phase; more are left out")
    ] = 64

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.tasks_dir is None) == (self.pack is None):
            raise ValueError("give exactly one of tasks_dir (a directory of tasks) and pack (e.g. pocket)")
        return self


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
    ] = 0.7
    undemonstrated: Annotated[
        tuple[str, ...], Field(description="families that are only ever demonstrated wrongly")
    ] = ()

    @field_validator("undemonstrated")
    @classmethod
    def _are_families(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [family.name for family in FAMILIES]
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is not a family; families: {', '.join(known)}")
        return names


class SplitConfig(Config):
    """Keys of pack tbench2: a directory of tasks, and what of it is held out."""

    tasks_dir: Annotated[str, Field(description="directory of task directories, e.g. of terminal-bench-2")]
    heldout: Annotated[
        str | tuple[str, ...] | None,
        Field(description="ids that are held out, or a file with one per line; null: by the hash of the id"),
    ] = None
    heldout_fraction: Annotated[
        float, Field(ge=0, le=1, description="share that is held out by hash; 20 of 89 by default")
    ] = 20 / 89
    system_prompt: Annotated[
        str | None, Field(description="what the agent is told; default: one command per turn")
    ] = None
