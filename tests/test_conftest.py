"""The rules of conftest.py itself: nightly tests wait for the night, and CI hides no skipped test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = """
import os
import pytest
from rollhook.testing.parts import needs_part

def test_figure(record_property):
    record_property("figure", "0.81 of 400")

def test_absent():
    needs_part("no_such_module")

def test_plain_skip():
    pytest.skip("too tired")

@pytest.mark.nightly
def test_long():
    pass

@pytest.mark.xfail(reason="a declared gap", strict=True)
def test_gap():
    assert False

def test_home():
    assert os.environ["XDG_CACHE_HOME"] == os.environ["HOME"] + "/cache"
    assert os.environ["HOME"] != os.environ["OUTER_HOME"]
    assert "ROLLHOOK_TORCH_INDEX" not in os.environ
"""


def run(directory: Path, **env: str) -> str:
    shutil.copy(ROOT / "conftest.py", directory)
    shutil.copy(ROOT / "pyproject.toml", directory)
    (directory / "test_suite.py").write_text(SUITE)
    outer = {k: v for k, v in os.environ.items() if not k.startswith("ROLLHOOK_")}
    outer |= {"OUTER_HOME": os.environ["HOME"], "ROLLHOOK_TORCH_INDEX": "x"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py"]
    done = subprocess.run(argv, cwd=directory, env=outer | env, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize(
    ("env", "summary"),
    [
        ({}, "2 passed, 3 skipped, 1 xfailed"),
        ({"ROLLHOOK_NIGHTLY": "1"}, "3 passed, 2 skipped, 1 xfailed"),
        ({"ROLLHOOK_CI": "1"}, "2 failed, 2 passed, 1 skipped, 1 xfailed"),
        (
            {"ROLLHOOK_CI": "1", "ROLLHOOK_CI_WITHOUT": "nvidia no_such_module"},
            "1 failed, 2 passed, 2 skipped, 1 xfailed",
        ),
    ],
    ids=["plain", "nightly", "ci", "ci-without"],
)
def test_skips_and_figures(tmp_path: Path, env: dict[str, str], summary: str) -> None:
    output = run(tmp_path, **env)
    assert summary in output.splitlines()[-1], output
    assert "test_figure: 0.81 of 400" in output
