"""Model directories in the Hugging Face layout: read, read into a living model, and write durably."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollhook.errors import TrainerError

#: what belongs to the tokenizer and is carried along as it is
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)


def choose_device(name: str) -> torch.device:
    """Return the device that a configuration names. Raises TrainerError for a GPU that torch does not see."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TrainerError(f"device {name}: torch sees no such GPU here; cpu or auto works")
    return device


def load_model(directory: Path, dtype: str, device: torch.device) -> Any:
    """Return the causal LM of a directory. Raises TrainerError where there is none that can be read."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype))
    except (OSError, ValueError, SafetensorError, KeyError) as error:
        raise TrainerError(f"{directory} holds no causal LM that transformers can load: {error}") from error
    return model.to(device).eval()


def load_into(model: Any, directory: Path) -> None:
    """Copy the weights of a directory into a model of the same shape; all of them or none.

    Raises ValueError that says which tensors are missing, unknown or of another shape.
    """
    tensors = read_tensors(directory)
    state = model.state_dict()
    if not tensors.keys() <= state.keys():
        # a layout that transformers converts while loading
        device, dtype = next(iter(state.values())).device, str(next(model.parameters()).dtype).split(".")[1]
        tensors = load_model(directory, dtype, device).state_dict()
    tied = set(
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    )
    missing = [name for name in state if name not in tensors and name not in tied]
    wrong = [n for n, t in tensors.items() if n in state and t.shape != state[n].shape]
    unknown = [name for name in tensors if name not in state]
    if missing or wrong or unknown:
        raise ValueError(
            f"the weights in {directory} do not fit the model: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, of another shape {wrong[:3]}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory's safetensors, sharded or not. Raises ValueError."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors.update(read_file(directory / name))
    return tensors


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one safetensors file. Raises ValueError."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def save_model(model: Any, directory: Path, tokenizer_from: Path) -> None:
    """Write config, safetensors and the tokenizer's files of another directory; nothing is fsynced yet."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(directory))
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, directory / name)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors to one safetensors file."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
