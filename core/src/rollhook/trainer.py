"""Trainers: native ones, which the cluster places on one process per rank, and frameworks that host us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollhook.component import BuildContext

if TYPE_CHECKING:
    from rollhook.launcher import Probe
    from rollhook.recipe.schema import Recipe
    from rollhook.records import Sample

#: what becomes of a recipe's key under a framework that hosts us: `run` by us in the bridge, `rendered` into
#: the framework's own settings, or `refused` by `check`
Treatment = Literal["run", "rendered", "refused"]


class NativeTrainer(ABC):
    """Owns weights and optimizer. Synchronous: it runs in a process of its own, one call at a time.

    A config that has `gpus` says with it how many of the cluster's GPUs the process takes, whole or a share.

    Weight directories are Hugging Face layouts: `config.json`, `model.safetensors`, tokenizer files.
    """

    hosted: ClassVar[bool] = False
    #: weights are made here from `model.init` when a recipe asks for it
    can_initialise: ClassVar[bool] = False

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def needs_rollouts(cls, config: Any) -> bool:
        """Return whether `step` trains on episodes (True) or on data of its own (False, e.g. SFT)."""
        return True

    @classmethod
    def initialise_model(cls, model: Mapping[str, Any], directory: Path, seed: int) -> None:
        """Write a fresh model and tokenizer, as the recipe's `model` keys say, to `directory`."""
        raise NotImplementedError

    @classmethod
    def fetch_model(cls, name: str) -> Path:
        """Return the directory of pretrained weights that a name, not a path, stands for.

        Raises UsageError when there are none, or none can be fetched here.
        """
        from rollhook.errors import UsageError

        raise UsageError(f"model.path: there is no directory {name}")

    @abstractmethod
    def setup(self, model_dir: Path, *, total_steps: int, seed: int) -> None:
        """Load weights and make the optimizer. Called once, before anything else."""

    @abstractmethod
    def step(self, groups: Sequence[Sequence[Sample]], step: int) -> dict[str, float]:
        """Do training step `step` (0-based) on a batch of groups and return metrics.

        `groups` is empty for a trainer that brings its own data. Metric names start with `train/`; those of
        times end with `_seconds` or `_per_second`. The same batch on the same state gives the same metrics,
        or a replay cannot vouch for a run.
        """

    @abstractmethod
    def publish(self, directory: Path) -> None:
        """Write the current weights into an empty directory, every file fsynced; no marker."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write all that the next step depends on into an empty directory, every file fsynced.

        Weights are there as `publish` writes them; optimizer, schedule and data position beside them.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what `save` wrote: the next step gives what it would have given."""

    def close(self) -> None:
        """Release memory; safe to call twice."""


@dataclass(frozen=True)
class Place:
    """What a hosted framework's job gets: nodes of so many GPUs, and the run's directory as they see it."""

    nodes: int
    gpus_per_node: int
    run_dir: str


@dataclass(frozen=True)
class Rendered:
    """The framework's job: a bash script that is run once on the driver's node, with RAY_ADDRESS set.

    `env` is literal; `files` are delivered beside the script (`$ROLLHOOK_JOB_FILES`), where the recipe's
    lock is `recipe.lock.yaml`.
    """

    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    probes: Sequence[Probe] = ()


class HostedTrainer(ABC):
    """A framework that owns the training loop and the engines; its bridge calls us for episodes.

    The bridge, in a process of the framework, uses `rollhook.runtime.hosted.HostedEpisodes`.
    """

    hosted: ClassVar[bool] = True
    can_initialise: ClassVar[bool] = False
    #: recipe key, or the section that it is in -> treatment; the longest that fits counts, and one fits each
    #: key
    treatment: ClassVar[Mapping[str, Treatment]]

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def needs_rollouts(cls, config: Any) -> bool:
        """Return whether it trains on episodes (True) or on data of its own (False, e.g. SFT)."""
        return True

    @classmethod
    def treats(cls, key: str) -> Treatment:
        """Return what becomes of a recipe's key. Raises KeyError for one that the table lacks."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            found = cls.treatment.get(".".join(parts[:length]))
            if found is not None:
                return found
        raise KeyError(key)

    @abstractmethod
    def render(self, recipe: Recipe, engine: Sequence[str], place: Place) -> Rendered:
        """Return the job: pure, complete, without a secret.

        `engine` is the command line of the recipe's engine without what the framework sets itself
        (`rollhook.engine.base.Engine.options`); empty where the recipe has no engine.
        """
