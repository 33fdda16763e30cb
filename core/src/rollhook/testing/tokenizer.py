"""A small tokenizer with a ChatML template, made in milliseconds, for tests that need a real one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\nCall with <tool_call>: ' + tools | tojson + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '')"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(
    directory: Path,
    *,
    corpus: Iterable[str] = (),
    vocab_size: int = 300,
    template: str | None = CHATML,
    control: Sequence[str] = (),
    markup: Sequence[str] = (),
    eos: str = "<|im_end|>",
) -> Path:
    """Write a byte-level BPE tokenizer (merges from `corpus`) there and return the directory.

    `control` are more control tokens, `markup` more tokens that are no control tokens, as `<tool_call>` is of
    several families; `eos` is the one that the files name as the end of a reply.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(control))
    tokenizer.add_tokens(list(markup))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
