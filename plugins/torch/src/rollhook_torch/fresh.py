"""Fresh models: seeded weights of a named architecture and a tokenizer trained on a corpus."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollhook.errors import TrainerError
from rollhook_torch.rows import read_rows
from rollhook_torch.weights import TOKENIZER_FILES

START, END = "<|im_start|>", "<|im_end|>"
PAD = "<|endoftext|>"
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\\n' }}{% endfor %}"
    '{{ \'Call: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set called = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{ '<tool_call>' + called | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def initialise(model: Mapping[str, Any], directory: Path, seed: int) -> None:
    """Write a model and its tokenizer as the keys of `model` say.

    Weights are drawn with `torch.manual_seed(seed)`, standard deviation `init.std` (default
    1/sqrt(hidden size)). Raises TrainerError with the key that is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = model.get("tokenizer")
    template = model.get("chat_template")
    template_text = Path(template).expanduser().read_text("utf-8") if template else None
    if isinstance(tokenizer, Mapping):
        corpus = Path(tokenizer["train"]).expanduser()
        train_tokenizer(corpus, int(tokenizer.get("vocab_size", 768)), directory, template_text)
    elif isinstance(tokenizer, str):
        copy_tokenizer(Path(tokenizer).expanduser(), directory, template_text)
    else:
        raise TrainerError(
            "model.tokenizer is missing: a fresh model needs one, a path or {train: CORPUS}", kind="user"
        )
    config = _config(model, directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = AutoModelForCausalLM.from_config(config)
    fresh.generation_config.eos_token_id = config.eos_token_id
    fresh.generation_config.pad_token_id = config.pad_token_id
    fresh.save_pretrained(str(directory))


def train_tokenizer(corpus: Path, vocab_size: int, directory: Path, chat_template: str | None = None) -> None:
    """Train a byte-level BPE (GPT-2's regex) on rows of `messages` or `text`; ChatML template by default."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": chat_template or CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def copy_tokenizer(source: Path, directory: Path, chat_template: str | None) -> None:
    """Copy a tokenizer's files, with another chat template if one is given."""
    if not (source / "tokenizer.json").is_file():
        raise TrainerError(f"model.tokenizer: {source} holds no tokenizer.json", kind="user")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)


def _texts(corpus: Path) -> Iterator[str]:
    for row in read_rows(corpus):
        if isinstance(row.value.get("text"), str):
            yield row.value["text"]
            continue
        for message in row.messages():
            yield f"{message['role']}\n"
            yield message["content"] or ""


def _config(model: Mapping[str, Any], directory: Path) -> Any:
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    init = model.get("init") or {}
    architecture, sizes = init.get("architecture"), dict(init.get("sizes") or {})
    if model.get("context_length") is not None:
        sizes.setdefault("max_position_embeddings", model["context_length"])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    try:
        known = AutoConfig.for_model(architecture)
    except (ValueError, KeyError) as error:
        raise TrainerError(
            f"model.init.architecture: transformers knows no model type {architecture!r}", kind="user"
        ) from error
    unknown = [name for name in sizes if not hasattr(known, name)]
    if unknown:
        raise TrainerError(
            f"model.init.sizes: a {architecture} configuration has no field {unknown[0]!r}", kind="user"
        )
    hidden = sizes.get("hidden_size") or known.hidden_size
    ids = {key: _token_id(tokenizer, settings, key) for key in ("bos_token", "eos_token", "pad_token")}
    try:
        return AutoConfig.for_model(
            architecture,
            **{
                "vocab_size": tokenizer.get_vocab_size(),
                "initializer_range": init.get("std") or 1 / math.sqrt(hidden),
                **{f"{key}_id": value for key, value in ids.items()},
                **sizes,
            },
        )
    except (ValueError, TypeError) as error:
        raise TrainerError(f"model.init.sizes: {error}", kind="user") from error


def _token_id(tokenizer: Any, settings: Mapping[str, Any], key: str) -> int | None:
    token = settings.get(key)
    text = token.get("content") if isinstance(token, Mapping) else token
    return None if text is None else tokenizer.token_to_id(text)
