import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollhook.errors import TrainerError
from rollhook.session.render import Renderer
from rollhook_torch.trainer import TorchTrainer
from rollhook_torch.weights import read_tensors

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def model(rows: Path, **init: Any) -> dict[str, Any]:
    return {
        "init": {"architecture": "llama", "sizes": SIZES, **init},
        "tokenizer": {"train": str(rows), "vocab_size": 300},
    }


def test_weights_depend_on_the_seed_alone(make_model: Callable[..., Path], model_dir: Path) -> None:
    same, other = read_tensors(make_model(seed=0)), read_tensors(make_model(seed=1))
    ours = read_tensors(model_dir)
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert not torch.equal(ours["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize(("std", "wanted"), [(None, 1 / math.sqrt(64)), (0.02, 0.02)])
def test_the_standard_deviation_is_one_over_the_root_of_the_width(
    tmp_path: Path, rows_file: Path, std: float | None, wanted: float
) -> None:
    TorchTrainer.initialise_model(model(rows_file, std=std), tmp_path / "model", 0)
    for name, tensor in read_tensors(tmp_path / "model").items():
        if tensor.dim() == 2:
            assert float(tensor.std()) == pytest.approx(wanted, rel=0.05), name


def test_the_tokenizer_knows_its_corpus_and_ends_replies(model_dir: Path, rows_file: Path) -> None:
    renderer = Renderer(model_dir)
    for text in ("amber.txt", "naïve “quotes” 🙂", " two  spaces\n\ttab"):
        assert renderer.decode(renderer.encode(text)) == text
    assert len(renderer.encode(" the file")) < len(" the file") / 2
    config = json.loads((model_dir / "config.json").read_text())
    assert renderer.stop_token_ids == (config["eos_token_id"],)
    assert renderer.decode(renderer.stop_token_ids) == "<|im_end|>"
    assert config["vocab_size"] == renderer.vocab_size


def test_a_tokenizer_may_come_from_a_directory_and_a_template_from_a_file(
    tmp_path: Path, model_dir: Path
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    keys = {
        "init": {"architecture": "llama", "sizes": SIZES},
        "tokenizer": str(model_dir),
        "chat_template": str(template),
    }
    TorchTrainer.initialise_model(keys, tmp_path / "model", 0)
    renderer = Renderer(tmp_path / "model")
    assert renderer.decode(renderer.first([{"role": "user", "content": "amber"}])) == "amber<|im_end|>"


def test_text_rows_train_a_tokenizer_too(tmp_path: Path) -> None:
    rows = tmp_path / "text.jsonl"
    rows.write_text(json.dumps({"text": "wolfram " * 50}) + "\n")
    TorchTrainer.initialise_model(model(rows), tmp_path / "model", 0)
    assert len(Renderer(tmp_path / "model").encode(" wolfram")) == 1


def test_other_architectures_are_made_alike(tmp_path: Path, rows_file: Path) -> None:
    keys = model(rows_file)
    keys["init"] = {"architecture": "qwen3", "sizes": {**SIZES, "num_key_value_heads": 2, "head_dim": 32}}
    TorchTrainer.initialise_model(keys, tmp_path / "model", 0)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"init": {"architecture": "lama", "sizes": SIZES}}, r"model\.init\.architecture.*'lama'"),
        (
            {"init": {"architecture": "llama", "sizes": {"hiden_size": 8}}},
            r"model\.init\.sizes.*'hiden_size'",
        ),
        ({"tokenizer": None}, r"model\.tokenizer is missing"),
        ({"tokenizer": "nowhere"}, r"model\.tokenizer: nowhere holds no tokenizer\.json"),
        ({"tokenizer": {"train": "absent.jsonl"}}, r"absent\.jsonl: there is no such file"),
    ],
)
def test_a_key_that_is_wrong_is_named(
    tmp_path: Path, rows_file: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TrainerError, match=reason) as caught:
        TorchTrainer.initialise_model({**model(rows_file), **change}, tmp_path / "model", 0)
    assert caught.value.kind == "user"


def test_the_template_of_a_fresh_model_shows_tools_and_calls(model_dir: Path) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    call: Any = {"id": "c00000000", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c00000000"},
    ]
    renderer = Renderer(model_dir)
    text = renderer.decode(renderer.first(messages, tools))
    said = '<tool_call>{"name": "run", "arguments": {"a": 1}}</tool_call>'
    assert '{"name": "run", "parameters": {}}' in text
    assert f"<|im_start|>assistant\n{said}<|im_end|>" in text
    assert renderer.parse(renderer.encode(said), tools)["tool_calls"][0]["function"]["name"] == "run"
