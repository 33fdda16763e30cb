"""Native trainers: a plain class that the cluster places on one process per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rollhook.component import BuildContext

if TYPE_CHECKING:
    from rollhook.records import Sample


class NativeTrainer(ABC):
    """Owns weights and optimizer. Synchronous: it runs in a process of its own, one call at a time.

    Weight directories are Hugging Face layouts: `config.json`, `model.safetensors`, tokenizer files.
    """

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
