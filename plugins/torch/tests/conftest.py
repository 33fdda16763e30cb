"""A tiny model, made once: 2 layers, 32 wide, with a tokenizer trained on a few sentences."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

WAIT = 60.0
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
}


def conversation(word: str) -> dict[str, Any]:
    turns = [
        ("system", "Answer with one command."),
        ("user", f"Delete the file {word}.txt."),
        ("assistant", f"rm {word}.txt"),
        ("user", "exit code 0\n"),
        ("assistant", "TASK_COMPLETE"),
    ]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ROWS = [conversation(word) for word in ("amber", "birch", "cedar", "delta", "ember", "fern", "garnet")]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Callable[..., Path]:
    """Return a function that writes a model of another seed or other sizes."""
    from rollhook_torch.trainer import TorchTrainer

    def make(seed: int = 0, context_length: int = 256, architecture: str = "llama", **sizes: Any) -> Path:
        directory = tmp_path_factory.mktemp("model")
        model = {
            "init": {"architecture": architecture, "sizes": {**SIZES, **sizes}},
            "tokenizer": {"train": str(rows_file), "vocab_size": 300},
            "context_length": context_length,
        }
        TorchTrainer.initialise_model(model, directory, seed)
        return directory

    return make


@pytest.fixture(scope="session")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture
def context(tmp_path: Path) -> BuildContext:
    return BuildContext(logging.getLogger("test"), scratch=tmp_path, cache=tmp_path)


class Client:
    """Submits requests to a decode thread and waits for them."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder

    def submit(
        self, prompt: list[int], *, seed: int = 0, count: int = 12, **keys: Any
    ) -> tuple[Any, threading.Event]:
        from rollhook_torch.request import Request

        done = threading.Event()
        request = Request(
            rid=keys.get("rid", f"r{seed}"),
            prompt=prompt,
            temperature=keys.get("temperature", 1.0),
            top_p=1.0,
            top_k=-1,
            max_new_tokens=count,
            stops=frozenset(keys.get("stops", ())),
            random=random.Random(seed),
            done=lambda _: done.set(),
            progress=keys.get("progress"),
            extra_key=keys.get("extra_key"),
        )
        self.decoder.submit(request)
        return request, done

    def run(self, prompt: list[int], **keys: Any) -> Any:
        request, done = self.submit(prompt, **keys)
        assert done.wait(WAIT)
        return request


@pytest.fixture
def make_client(model_dir: Path) -> Iterator[Callable[..., Client]]:
    import torch

    from rollhook_torch.decode import Decoder
    from rollhook_torch.weights import load_model

    clients: list[Client] = []

    def make(directory: Path = model_dir, **keys: Any) -> Client:
        model = load_model(directory, "float32", torch.device("cpu"))
        settings = {
            "context_length": 256,
            "max_batch": 64,
            "prefill_tokens": 4096,
            "prefix_cache_bytes": 1 << 24,
            **keys,
        }
        clients.append(Client(Decoder(model, "1", **settings)))
        return clients[-1]

    yield make
    for client in clients:
        client.decoder.stop()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
