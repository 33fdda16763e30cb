"""The directory that a run's weights start from."""

from __future__ import annotations

import json
from pathlib import Path

from rollhook.errors import UsageError

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "seq_length")


def local_model(name: str) -> Path:
    """Return the directory of pretrained weights: a path, or a name that the Hugging Face hub knows."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")):
        raise UsageError(f"model.path: there is no directory {name}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"model.path: {name} is not a directory, and huggingface_hub, which might fetch it, is absent"
        ) from None
    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise UsageError(
            f"model.path: {name} is not a directory and could not be fetched: {error}"
        ) from error


def context_length(model_dir: Path) -> int:
    """Return the tokens that a model can attend to, from its config.json."""
    config = json.loads((model_dir / "config.json").read_text())
    for key in _LENGTH_KEYS:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise UsageError(f"{model_dir / 'config.json'} names no context length; set model.context_length")
