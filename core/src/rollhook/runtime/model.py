"""The directory of a run's weights, and what is read from it beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rollhook.errors import UsageError

if TYPE_CHECKING:
    from rollhook.recipe.schema import Model
    from rollhook.session import Renderer

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


def context_length(model: Model | None, model_dir: Path) -> int:
    """Return the tokens that a model can attend to: as the recipe says, else from its config.json."""
    if model is not None and model.context_length is not None:
        return model.context_length
    config = json.loads((model_dir / "config.json").read_text())
    for key in _LENGTH_KEYS:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise UsageError(f"{model_dir / 'config.json'} names no context length; set model.context_length")


def vocab_size(model_dir: Path) -> int | None:
    """Return the number of tokens that a model has, by its config.json; None where that does not say."""
    file = model_dir / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def renderer(model: Model | None, model_dir: Path) -> Renderer:
    """Return what renders messages for a model; the recipe's tokenizer and template come first."""
    from rollhook.session import Renderer

    if model is None:
        return Renderer(model_dir)
    tokenizer = model.tokenizer if isinstance(model.tokenizer, str) else None
    template = model.chat_template
    return Renderer(
        Path(tokenizer).expanduser() if tokenizer else model_dir,
        Path(template).expanduser().read_text("utf-8") if template else None,
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
        template_variables=model.chat_template_kwargs,
    )
