"""The wheels of all distributions work outside the checkout, without anything of it.

So do those of strangers: `tests/strangers` holds an environment, a sandbox backend and a router policy as
people who know only the documentation would write them. Their suites are run there, too, never from the
checkout.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rollhook.testing.parts import needs_part

ROOT = Path(__file__).parents[1]
DIRECTORIES = [ROOT / "core", *(p.parent for p in sorted(ROOT.glob("*/*/pyproject.toml")))]
STRANGERS = sorted((ROOT / "tests/strangers").iterdir())
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
    run(*PIP, "wheel", *options, *DIRECTORIES, *STRANGERS, cwd=directory)
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
    assert len(wheels) == len(DIRECTORIES) + len(STRANGERS)
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("/py.typed") for name in names), wheel.name
        assert not [name for name in names if name.split("/")[0] in ("tests", "src")], wheel.name


def test_everything_comes_from_the_wheels(elsewhere: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.metadata as m, json, sys\n"
        "import rollhook, rollhook_local, rollhook_tbench2, acme_cells, acme_lanes, acme_mazes\n"
        "names = [d.metadata['Name'] for d in m.distributions() if d.name.startswith(('rollhook', 'acme'))]\n"
        "files = [x.__file__ for n, x in sys.modules.items() if n.startswith(('rollhook', 'acme'))]\n"
        "finders = [repr(f) for f in sys.meta_path]\n"
        "print(json.dumps([sorted(names), files, sys.path, finders]))"
    )
    names, files, path, finders = json.loads(run(elsewhere / "bin/python", "-c", program, cwd=tmp_path))
    assert len(names) == len(set(names)) == len(DIRECTORIES) + len(STRANGERS)
    assert all(file.startswith(str(elsewhere)) for file in files)
    assert not [each for each in path if each.startswith(str(ROOT))]
    assert not [each for each in finders if "editable" in each.lower()]


def test_the_plugins_are_listed_and_can_be_imported(elsewhere: Path, tmp_path: Path) -> None:
    listed = run(elsewhere / "bin/rollhook", "plugins", "--check", cwd=tmp_path)
    for name in ("sandbox.local", "sandbox.cells", "router.lanes", "environment.mazes"):
        assert name in listed
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
        "router={use: sticky+lanes+min_load, lanes: {long: 10}}",
    ]  # fmt: skip
    run(elsewhere / "bin/rollhook", "run", "quickstart", *small, "--run-id", "q", cwd=tmp_path)
    rows = [json.loads(row) for row in (tmp_path / "runs/q/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["router/workers"] == 1 for row in rows)


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda p: p.name)
def test_a_stranger_imports_what_the_documentation_names(stranger: Path) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    nodes = [node for path in stranger.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    used = {
        n.module for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("rollhook")
    }
    assert "rollhook" in used
    assert {module for module in used if module not in text} == set()


def test_the_documentation_shows_a_strangers_policy_whole() -> None:
    page = (ROOT / "docs/how-to/write-a-router-policy.md").read_text()
    assert (ROOT / "tests/strangers/acme-lanes/src/acme_lanes/__init__.py").read_text() in page


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a stranger's files, but not its source: what it needs is installed."""
    left_out = shutil.ignore_patterns("src", "__pycache__")
    return shutil.copytree(request.param, tmp_path / "its", ignore=left_out)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("copied", STRANGERS, ids=lambda p: p.name, indirect=True)
def test_a_stranger_keeps_the_contract(elsewhere: Path, copied: Path) -> None:
    needs_part("bubblewrap")
    pytest_there = [elsewhere / "bin/python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    said = run(*pytest_there, "tests", cwd=copied)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


@pytest.mark.parametrize("copied", [ROOT / "tests/strangers/acme-lanes"], ids=lambda p: p.name, indirect=True)
def test_a_recipe_with_a_strangers_policy_has_no_problems(elsewhere: Path, copied: Path) -> None:
    rollhook = elsewhere / "bin/rollhook"
    assert "no problems" in run(rollhook, "check", "recipes/lanes.yaml", cwd=copied)
    assert "acme-lanes" in run(rollhook, "explain", "recipes/lanes.yaml", cwd=copied)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("copied", [ROOT / "tests/strangers/acme-mazes"], ids=lambda p: p.name, indirect=True)
def test_a_recipe_of_strangers_trains_two_steps(elsewhere: Path, copied: Path) -> None:
    needs_part("bubblewrap")
    rollhook = elsewhere / "bin/rollhook"
    assert "no problems" in run(rollhook, "check", "recipes/mazes.yaml", cwd=copied)
    run(rollhook, "run", "recipes/mazes.yaml", "--run-id", "m", cwd=copied)
    rows = [json.loads(row) for row in (copied / "runs/m/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert len(trained) == 2
    assert all(row["train/grad_norm"] > 0 and row["sandbox/creates"] > 0 for row in trained)
    assert [row["eval/errors"] for row in rows if "eval/pass_rate" in row] == [0, 0]
