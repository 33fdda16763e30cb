"""The process around a native trainer: builds it from plain data and passes calls on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext
from rollhook.records import Sample
from rollhook.trainer import NativeTrainer


def load_dotted(path: str) -> Any:
    """Return the object that `module:Name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


class TrainerHost:
    """Placed by the cluster; arguments are picklable, paths are on the shared file system."""

    def __init__(self, load: str, config: Any, scratch: str, cache: str, seed: int) -> None:
        self._class: type[NativeTrainer] = load_dotted(load)
        logger = logging.getLogger("rollhook.trainer")
        self._trainer = self._class(config, BuildContext(logger, Path(scratch), Path(cache), seed))

    def initialise_model(self, model: Mapping[str, Any], directory: str, seed: int) -> None:
        """Write a fresh model."""
        self._class.initialise_model(model, Path(directory), seed)

    def fetch_model(self, name: str) -> str:
        """Return where a named model's weights are."""
        return str(self._class.fetch_model(name))

    def setup(self, model_dir: str, total_steps: int, seed: int) -> None:
        """Load weights and make the optimizer."""
        self._trainer.setup(Path(model_dir), total_steps=total_steps, seed=seed)

    def step(self, groups: Sequence[Sequence[Sample]], step: int) -> dict[str, float]:
        """Do one training step."""
        metrics: dict[str, float] = self._trainer.step(groups, step)
        return metrics

    def publish(self, directory: str) -> None:
        """Write the weights."""
        self._trainer.publish(Path(directory))

    def save(self, directory: str) -> None:
        """Write a checkpoint's contents."""
        self._trainer.save(Path(directory))

    def load(self, directory: str) -> None:
        """Restore a checkpoint's contents."""
        self._trainer.load(Path(directory))

    def close(self) -> None:
        """Release memory."""
        self._trainer.close()
