"""What would be submitted, for every shipped recipe and every launcher of this repository.

`ROLLHOOK_UPDATE_PLANS=1 python -m pytest tests/test_plans.py` writes tests/plans anew; read the difference.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from rollhook.cli.plan import shown, write_plan
from rollhook.installed import installed
from rollhook.launcher import Plan
from rollhook.recipe.check import compose
from rollhook.recipe.load import read_recipe
from rollhook.runtime.native_job import Native, plan_of

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "tests/plans"
UPDATE = os.environ.get("ROLLHOOK_UPDATE_PLANS") == "1"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
#: a launcher's keys, for recipes that name another one; the nodes are those of the recipe
KEYS = {
    "local": "use: local",
    "ray": "use: ray, secrets: {HF_TOKEN: 'env:HF_TOKEN'}",
    "slurm": "use: slurm",
    "kuberay": "use: kuberay, namespace: research, image: 'registry.example/rollhook:1', "
    "mounts: [{path: /shared, claim: shared}]",
}
#: the recipe of which all files are kept; of others those that differ from its
FULL = "quickstart"
#: frameworks that own the training loop: their jobs are not for launcher local
HOSTED = re.compile(r"^trainer:\s*(?:\{use: |\n\s+use: )?(miles|verl|nemo_rl)\b", re.MULTILINE)
CASES = [
    (recipe, launcher)
    for recipe in RECIPES
    for launcher in KEYS
    if launcher != "local" or not HOSTED.search((ROOT / f"recipes/{recipe}.yaml").read_text())
]
HERE = {entry.name for entry in installed() if entry.kind == "launcher"}


def plan(recipe: str, launcher: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Plan:
    if launcher not in HERE:
        pytest.skip(f"needs rollhook-{launcher}: pip install ./plugins/{launcher}")
    monkeypatch.setenv("HF_TOKEN", "sentinel-90ac12")
    monkeypatch.setenv("ROLLHOOK_USER", "researcher")
    monkeypatch.chdir(directory)
    monkeypatch.setattr(socket.socket, "connect", _contacted)
    source = str(ROOT / "recipes" / f"{recipe}.yaml")
    overrides = ["+storage.root=/shared/runs"]
    named = read_recipe(source).recipe.launcher
    if named.use != launcher:
        sizes = {name: named.keys.get(name, most) for name, most in (("nodes", 2), ("gpus_per_node", 8))}
        size = "" if launcher == "local" else "".join(f", {name}: {value}" for name, value in sizes.items())
        overrides.append(f"launcher={{{KEYS[launcher]}{size}}}")
    return plan_of(Native.of(*compose(source, overrides, site="none")), frozen=True)


def _contacted(self: object, address: object) -> None:
    raise AssertionError(f"a plan contacts {address}")


def text_of(plan: Plan, full: Plan) -> str:
    """Return a plan as text, without files that but for the run's id are those of another."""
    data, run_id, other = plan.to_data(), plan.job.run_id, full.job.run_id
    for name, text in data["files"].items():
        if run_id != other and text.replace(run_id, other) == full.files.get(name):
            data["files"][name] = f"(but for the run's id as that of {FULL})"
    return "\n".join(shown(data)) + "\n"


@pytest.fixture(scope="module")
def full() -> dict[str, Plan]:
    """Launcher -> its plan of the recipe of which all is kept."""
    return {}


@pytest.mark.parametrize("launcher", KEYS)
def test_a_frozen_plan_does_not_depend_on_where_it_is_made(
    launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    made = [
        plan(FULL, launcher, monkeypatch, place).to_data() for place in (tmp_path, tmp_path / "elsewhere")
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize(("recipe", "launcher"), CASES)
def test_a_plan_is_as_it_was(
    recipe: str, launcher: str, full: dict[str, Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if launcher not in full:
        full[launcher] = plan(FULL, launcher, monkeypatch, tmp_path)
    text = text_of(plan(recipe, launcher, monkeypatch, tmp_path), full[launcher])
    assert ("sentinel" in text) is False
    path = PLANS / launcher / f"{recipe}.txt"
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = path.read_text() if path.exists() else ""
    if before != text:  # pytest's own account of a difference takes minutes
        lines = before.splitlines(), text.splitlines()
        changes = [*difflib.unified_diff(*lines, "as it was", "as it is", lineterm="", n=1)]
        pytest.fail("\n".join([*changes[:100], "ROLLHOOK_UPDATE_PLANS=1 accepts this"]), pytrace=False)


def test_every_plan_on_file_is_one_that_is_made() -> None:
    wanted = {f"{launcher}/{recipe}.txt" for recipe, launcher in CASES}
    assert {str(path.relative_to(PLANS)) for path in PLANS.rglob("*.txt")} <= wanted


def test_every_launcher_of_this_repository_is_planned_with() -> None:
    here = {
        entry.name
        for entry in installed()
        if entry.kind == "launcher" and entry.distribution.startswith("rollhook")
    }
    assert here <= KEYS.keys()


@pytest.mark.parametrize("launcher", KEYS)
def test_a_plan_on_disk_is_a_file_each(
    launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = plan(FULL, launcher, monkeypatch, tmp_path).to_data()
    written = write_plan(data, tmp_path / "plan")
    assert json.loads((tmp_path / "plan/plan.json").read_text()) == json.loads(json.dumps(data))
    scripts = [path for path in written if path.suffix in (".sh", ".sbatch")]
    assert scripts
    for path in scripts:
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0, path
    assert not re.search(r"sentinel", "".join(path.read_text() for path in written))
