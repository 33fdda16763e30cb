"""The directory that a run's weights start from."""

from __future__ import annotations

import json
from pathlib import Path

from rollhook.errors import UsageError

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "seq_length")


def is_path(name: str) -> bool:
    """Return whether a model's name is a directory here, or can be nothing else."""
    return name.startswith((".", "/", "~")) or Path(name).is_dir()


def local_model(name: str) -> Path:
    """Return the directory of pretrained weights. Raises UsageError when it is not there."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(f"model.path: there is no directory {name}")
    return path


def context_length(model_dir: Path) -> int:
    """Return the tokens that a model can attend to, from its config.json."""
    config = json.loads((model_dir / "config.json").read_text())
    for key in _LENGTH_KEYS:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise UsageError(f"{model_dir / 'config.json'} names no context length; set model.context_length")
