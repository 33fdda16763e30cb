"""The benchmarks run, and say what they measure; how fast things are is nothing that a test asserts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollhook.testing.parts import needs_part

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: program -> what its tables must have a row for, the limit among them
ROWS = {
    "turn_cost": ("bare aiohttp loop", "rollhook, engine in the process", "open session of 30 turns"),
    "overlap": ("staleness limit 4", "staleness limit 1", "seed 0"),
    "router": ("direct", "a call in the process", "rollhook router: prefix_cache"),
    "decode": ("generate", "generate, cache kept", "engine, in the process", "engine, over HTTP"),
    "workers": ("min_load, 1 worker", "min_load, 2 workers"),
    "sandbox": ("bare bubblewrap", "create, exec, close", "eight at once"),
    "cli": ("typer program: --help", "rollhook plugins", "rollhook check --site none"),
}


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ROWS)
def test_a_quick_benchmark_prints_its_tables(name: str, tmp_path: Path) -> None:
    if name == "decode":
        pytest.importorskip("rollhook_torch.decode", reason="torch or transformers is not installed")
    if name == "workers":
        pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")
    if name == "sandbox":
        needs_part("bubblewrap")
    said = run(BENCHMARKS / f"{name}.py", "--quick", cwd=tmp_path)
    assert [row for row in ROWS[name] if row not in said] == []


def test_every_benchmark_is_documented_and_helps(tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs/how-to/benchmarks.md").read_text()
    for name in ROWS:
        assert f"benchmarks/{name}.py" in page
        assert "--quick" in run(BENCHMARKS / f"{name}.py", "--help", cwd=tmp_path)
