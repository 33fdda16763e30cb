"""The workspace is uniform: the same few files in each distribution, one version, names that agree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollhook
from rollhook.hookspecs import PROVIDER_HOOKS

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = [
    ROOT / "core",
    *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml")),
    *sorted(p.parent for p in ROOT.glob("envs/*/pyproject.toml")),
]
PLUGINS = DISTRIBUTIONS[1:]
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 90


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pyproject(distribution: Path) -> dict[str, Any]:
    return tomllib.loads((distribution / "pyproject.toml").read_text())


def package(distribution: Path) -> Path:
    name = "rollhook" if distribution.name == "core" else f"rollhook_{distribution.name}"
    return distribution / "src" / name


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def third_party() -> Iterator[tuple[str, str]]:
    for distribution in DISTRIBUTIONS:
        data = pyproject(distribution)
        project = data["project"]
        listed = [*data["build-system"]["requires"], *project.get("dependencies", ())]
        for extra in project.get("optional-dependencies", {}).values():
            listed += extra
        for requirement in listed:
            if requirement_name(requirement) != "rollhook":
                yield relative(distribution), requirement_name(requirement)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=relative)
def test_a_distribution_has_its_four_files(distribution: Path) -> None:
    assert (distribution / "README.md").read_text().strip()
    assert list((distribution / "tests").glob("test_*.py"))
    assert (package(distribution) / "__init__.py").is_file()
    assert (package(distribution) / "py.typed").is_file()
    assert [p.name for p in (distribution / "src").iterdir() if p.name != "__pycache__"] == [
        package(distribution).name
    ]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=relative)
def test_a_pyproject_holds_metadata_and_no_tool_settings(distribution: Path) -> None:
    data = pyproject(distribution)
    assert set(data) == {"build-system", "project"}
    assert data["build-system"] == {
        "requires": ["hatchling", "editables"],
        "build-backend": "hatchling.build",
    }
    assert data["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("distribution", PLUGINS, ids=relative)
def test_the_names_of_a_plugin_agree(distribution: Path) -> None:
    project = pyproject(distribution)["project"]
    assert project["name"] == f"rollhook-{distribution.name.replace('_', '-')}"
    entries = project["entry-points"]["rollhook"]
    assert entries
    for name, module in entries.items():
        kind, dot, rest = name.partition(".")
        assert dot
        assert re.fullmatch(r"[a-z][a-z0-9_]*", rest), name
        assert kind in {*PROVIDER_HOOKS, "plugin", "command"}, name
        assert module.split(".")[0] == package(distribution).name
    core = [d for d in project["dependencies"] if requirement_name(d) == "rollhook"]
    assert [re.sub(r"\[\w+\]", "", d) for d in core] == ["rollhook>=0.1,<0.2"]


def test_there_is_one_version() -> None:
    assert {pyproject(d)["project"]["version"] for d in DISTRIBUTIONS} == {rollhook.__version__}
    assert f"## {rollhook.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_third_party_dependency_is_constrained() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constrained = {requirement_name(line) for line in lines if line and not line.startswith("#")}
    missing = [f"{where}: {name}" for where, name in third_party() if name not in constrained]
    assert missing == []
    assert not [line for line in lines if "+" in line.partition("==")[2]], "no build of one machine is pinned"
    assert not [line for line in lines if "@" in line or "://" in line]


def test_the_known_plugins_are_those_of_the_workspace() -> None:
    known = tomllib.loads((package(ROOT / "core") / "known_plugins.toml").read_text())
    listed = {f"{kind}.{name}": dist for kind, names in known.items() for name, dist in names.items()}
    here = {}
    for distribution in PLUGINS:
        project = pyproject(distribution)["project"]
        here |= dict.fromkeys(project["entry-points"]["rollhook"], project["name"])
    assert listed == here


def sources() -> list[Path]:
    found = [p for d in DISTRIBUTIONS for p in package(d).rglob("*.py")]
    return sorted([*found, *(ROOT / "core").glob("*.py")])


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE_LINES, "split it along what it is about"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_every_invariant_has_a_test_that_names_it() -> None:
    said = "".join(path.read_text() for path in ROOT.glob("**/tests/test_*.py") if ".venv" not in path.parts)
    named = {int(number) for number in re.findall(r'"""Invariant (\d+)\b', said)}
    assert named == set(range(1, 11))
