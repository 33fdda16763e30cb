"""`rollhook eval` on real tasks in real sandboxes: a model of ours, and an endpoint of somebody else's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollhook.testing.parts import needs_part

needs_part("torch", "ray", "bubblewrap")

FEW = ["--episodes", "8", "--samples", "2", "--k", "1,2", "--json"]


def rollhook(tmp_path, *words, environ=None):
    """Run a verb whose last word on stderr is `RAY` when it has loaded Ray."""
    source = (
        "import sys\nfrom rollhook.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('RAY' * ('ray' in sys.modules), file=sys.stderr)\n"
    )
    homes = {name: str(tmp_path / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", source, *words], cwd=tmp_path, env=os.environ | homes | (environ or {}),
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr.strip().endswith("RAY")


@pytest.fixture
def weights(tmp_path):
    """A fresh small model with a tokenizer of its own, on disk."""
    from rollhook_torch.trainer import TorchTrainer

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "echo hello > /app/out.txt && ls -la /app " * 20}) + "\n")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = {
        "init": {"architecture": "llama", "sizes": {**sizes, "max_position_embeddings": 256}},
        "tokenizer": {"train": str(rows), "vocab_size": 300},
    }
    (tmp_path / "weights").mkdir()
    TorchTrainer.initialise_model(model, tmp_path / "weights", 0)
    return tmp_path / "weights"


@pytest.fixture
def endpoint():
    """A local server that answers every request with a shell command."""
    argv = [sys.executable, "-m", "rollhook.testing.chat_server"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstarts_tasks_are_evaluated_with_our_engine_and_with_an_endpoint(
    tmp_path, weights, endpoint
):
    out, ray = rollhook(
        tmp_path, "eval", "quickstart", "--checkpoint", str(weights), "--run-id", "ours", *FEW
    )
    ours = json.loads(out)
    assert ray
    assert ours["model"] == str(weights)
    engine = f"engine={{use: openai, base_url: '{endpoint}', model: double-1, max_retries: 0}}"
    out, ray = rollhook(
        tmp_path, "eval", "quickstart", engine, "~budgets.max_seq_len", "--run-id", "theirs", *FEW,
        environ={"no_proxy": "127.0.0.1"},
    )  # fmt: skip
    theirs = json.loads(out)
    assert not ray
    assert theirs["engine"]["model"] == "double-1"
    for found in (ours, theirs):
        assert [(task["n"], task["errors"]) for task in found["tasks"]] == [(2, 0)] * 4
    assert [task["digest"] for task in ours["tasks"]] == [task["digest"] for task in theirs["tasks"]]
    out, ray = rollhook(tmp_path, "compare", "ours", str(Path("runs/theirs")), "--json")
    (compared,) = json.loads(out)["comparisons"]
    assert compared["tasks"] == 4
    assert any("budgets.max_seq_len differs" in warning for warning in compared["warnings"])
    assert not ray
