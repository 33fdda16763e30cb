"""`rollhook eval` against an OpenAI-compatible endpoint in another process, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.testing.parts import needs_part

needs_part("bubblewrap")

ROLLHOOK = [sys.executable, "-m", "rollhook.cli.main"]
KEY = "sk-sentinel-0123456789abcdef"
RECIPE = """\
name: there
environment: {use: tbench2, pack: pocket}
agent: {use: shell, parse: strict}
sandbox: {use: local, create_concurrency: 2}
budgets: {turns: 3, max_seq_len: 2000, reply_tokens: 100}
evaluation: {split: heldout}
model: {path: /no/such/weights}
"""


@pytest.fixture
def url() -> Iterator[str]:
    argv = [sys.executable, "-m", "rollhook.testing.chat_server", KEY]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.communicate(timeout=30)


def script(url: str, *steps: dict[str, Any]) -> None:
    body = json.dumps({"steps": steps}).encode()
    urllib.request.urlopen(urllib.request.Request(url + "/script", body)).close()


def evaluate(directory: Path, url: str, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "there.yaml").write_text(RECIPE)
    overrides = [f"engine.base_url={url}", "engine.model=double-1", "engine.api_key=env:THERE_KEY"]
    argv = [*ROLLHOOK, "eval", "there.yaml", "engine.use=openai", *overrides, "--run-id", "there", *more]
    env = {**os.environ, "THERE_KEY": KEY, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_a_recipe_is_evaluated_there_without_weights_or_ray_and_the_key_is_written_nowhere(
    url: str, tmp_path: Path
) -> None:
    """Invariant 5: a secret is a reference."""
    script(
        url,
        {"status": 429, "headers": {"Retry-After": "0"}, "body": {"error": {"message": f"{KEY} is busy"}}},
        {"content": "```bash\necho hello\n```"},
        {"echo_key": True},
        *[{"content": "TASK_COMPLETE"}] * 12,
    )
    done = evaluate(tmp_path, url, "--episodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    run = tmp_path / "runs/there"
    rows = [
        json.loads(line) for path in run.glob("episodes/*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len(rows) == 2
    assert {row["outcome"]["kind"] for row in rows} == {"scored"}
    assert all(row["turns"] and row["completion_tokens"] and not row["samples"] for row in rows)
    assert found["engine"]["model"] == "double-1"
    assert not list(run.glob("episodes/*.safetensors"))
    assert not (run / ".cluster").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert [path for path in written if b"sentinel" in path.read_bytes()] == []
    assert "sentinel" not in done.stdout + done.stderr
