"""The wheels of all distributions work outside the checkout, without anything of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIRECTORIES = [ROOT / "core", *(p.parent for p in sorted(ROOT.glob("*/*/pyproject.toml")))]
PIP = [sys.executable, "-m", "pip"]


def run(*argv: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("wheels")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q", "-w", directory]
    run(*PIP, "wheel", *options, *DIRECTORIES, cwd=directory)
    return sorted(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def elsewhere(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheels, and what they depend on by links to this one's packages."""
    environment = tmp_path_factory.mktemp("elsewhere") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    (site,) = environment.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        ours = re.match(r"(rollhook|_rollhook|__editable__|_editable|__pycache__|pip)", entry.name)
        entry_points = entry / "entry_points.txt"
        plugin = entry_points.is_file() and "[rollhook]" in entry_points.read_text()
        if not ours and not plugin:
            (site / entry.name).symlink_to(entry)
    python = environment / "bin/python"
    run(*PIP, "--python", python, "install", "-q", "--no-deps", "--no-index", *wheels, cwd=environment.parent)
    return environment


def test_there_is_one_wheel_per_distribution_with_its_typing_marker(wheels: list[Path]) -> None:
    assert len(wheels) == len(DIRECTORIES)
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("/py.typed") for name in names), wheel.name
        assert not [name for name in names if name.split("/")[0] in ("tests", "src")], wheel.name


def test_everything_comes_from_the_wheels(elsewhere: Path, tmp_path: Path) -> None:
    program = "import rollhook, rollhook_local, rollhook_tbench2; print(rollhook.__file__)"
    assert str(ROOT) not in run(elsewhere / "bin/python", "-c", program, cwd=tmp_path)


def test_the_plugins_are_listed_and_can_be_imported(elsewhere: Path, tmp_path: Path) -> None:
    listed = run(elsewhere / "bin/rollhook", "plugins", "--check", cwd=tmp_path)
    assert "sandbox.local" in listed
    assert str(ROOT) not in listed


def test_a_shipped_recipe_is_found_by_its_bare_name(elsewhere: Path, tmp_path: Path) -> None:
    said = run(elsewhere / "bin/rollhook", "check", "quickstart", cwd=tmp_path)
    assert "no problems" in said
    assert str(ROOT) not in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_steps_run(elsewhere: Path, tmp_path: Path) -> None:
    small = [
        "needs.sft.overrides=[seed=0,steps=5]", "steps=2", "rollout.batch_groups=2", "rollout.group_size=2",
        "evaluation.every=0", "environment.pack={use: pocket, train_per_family: 4, heldout_per_family: 1}",
    ]  # fmt: skip
    run(elsewhere / "bin/rollhook", "run", "quickstart", *small, "--run-id", "q", cwd=tmp_path)
    rows = (tmp_path / "runs/q/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2
