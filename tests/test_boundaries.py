"""Imports point one way: cli -> runtime -> interfaces <- plugins; nobody else's SDK, and none early."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/rollhook"
PLUGINS = sorted(
    p.parent for p in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("envs/*/pyproject.toml")]
)
IMPORT_NAMES = {"pyyaml": "yaml"}
TEST_KIT = {"pytest", "hypothesis", "_pytest"}
#: what no module may bring in by being imported
SDKS = [
    "torch",
    "ray",
    "transformers",
    "pyarrow",
    "sglang",
    "daytona",
    "e2b",
    "fastmcp",
    "aiodocker",
    "tensorboard",
    "wandb",
]


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    module: str
    in_function: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports(path: Path) -> Iterator[Import]:
    """Yield the imports of a module, with those of `from x import y` as both x and x.y."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(path, child.lineno, alias.name, in_function)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports here are absolute"
                assert child.module
                for alias in child.names:
                    yield Import(path, child.lineno, f"{child.module}.{alias.name}", in_function)
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), False)


def declared(distribution: Path) -> set[str]:
    """Return the top-level modules that a distribution may import by its own metadata."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    listed = [*project.get("dependencies", ())]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in listed}
    found = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    return found | {"pydantic_core"} if "pydantic" in found else found


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def extras(distribution: Path) -> set[str]:
    """Return the modules of a plugin's optional dependencies, which it imports inside functions."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    names = [re.split(r"[^A-Za-z0-9._-]", each)[0].lower() for group in optional.values() for each in group]
    return {name.replace("-", "_") for name in names}


def inside_a_framework(each: Import) -> bool:
    """Whether it is Ray, in a program that is carried to a node to run inside a hosted framework's job."""
    return each.top == "ray" and each.in_function and each.path.parent.name == "node"


def bridges(distribution: Path) -> set[Path]:
    """Return the directories of the modules that run inside the framework of a hosted trainer."""
    return {path for path in distribution.glob("src/*/bridge") if path.is_dir()}


def of_the_framework(each: Import, distribution: Path) -> bool:
    """Whether it is the framework itself, which a bridge imports once it is called."""
    return each.in_function and each.top == distribution.name and each.path.parent in bridges(distribution)


def is_third_party(name: str) -> bool:
    return name not in sys.stdlib_module_names and name != "__future__"


def test_the_core_imports_no_plugin_and_no_sdk() -> None:
    """Invariant 9: the core imports no plugin."""
    allowed = declared(ROOT / "core") | {"rollhook"}
    wrong = []
    for path in modules(CORE):
        for each in imports(path):
            test_kit = path.is_relative_to(CORE / "testing") and each.top in TEST_KIT
            ray = path == CORE / "cluster.py" and each.top == "ray" and each.in_function
            extra = path == CORE / "router_server/metrics.py" and each.top == "prometheus_client"
            if is_third_party(each.top) and each.top not in allowed and not (test_kit or ray or extra):
                wrong.append(str(each))
    assert wrong == []


@pytest.mark.parametrize("distribution", PLUGINS, ids=lambda p: p.name)
def test_a_plugin_imports_the_core_and_its_own_sdk_only(distribution: Path) -> None:
    own = f"rollhook_{distribution.name}"
    allowed = declared(distribution) | declared(ROOT / "core") | {"rollhook", own}
    found = [each for path in modules(distribution / "src") for each in imports(path)]
    optional = extras(distribution)
    found = [e for e in found if not inside_a_framework(e) and not (e.in_function and e.top in optional)]
    found = [e for e in found if not of_the_framework(e, distribution)]
    wrong = [str(e) for e in found if is_third_party(e.top) and e.top not in allowed]
    assert wrong == []
    assert [str(e) for e in found if e.top == "ray"] == [], "Ray is reached through rollhook.cluster"


@pytest.mark.parametrize("distribution", [ROOT / "core", *PLUGINS], ids=lambda p: p.name)
def test_every_declared_dependency_is_imported(distribution: Path) -> None:
    imported = {each.top for path in modules(distribution / "src") for each in imports(path)}
    assert declared(distribution) - {"rollhook", "pydantic_core"} - imported == set()


def layer(module: str) -> int:
    if module.startswith("rollhook.cli"):
        return 3
    return 2 if module.startswith("rollhook.runtime") else 1


def test_imports_inside_the_core_point_one_way() -> None:
    wrong = []
    for path in modules(CORE):
        name = ".".join(["rollhook", *path.relative_to(CORE).with_suffix("").parts])
        if name.startswith("rollhook.testing") or name == "rollhook.__main__":
            continue
        wrong += [str(e) for e in imports(path) if e.top == "rollhook" and layer(e.module) > layer(name)]
    assert wrong == []


def verbs(distribution: Path) -> set[Path]:
    """Return the directories of the modules that add a verb: these work as the core's verbs do."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["rollhook"].items()
    found = [value.partition(":")[0] for name, value in entries if name.startswith("command.")]
    return {distribution.joinpath("src", *module.split(".")).parent for module in found}


def test_plugins_use_neither_the_runtime_nor_the_command_line_but_for_verbs() -> None:
    found = [
        e
        for d in PLUGINS
        for path in modules(d / "src")
        if path.parent not in verbs(d) | bridges(d)
        for e in imports(path)
    ]
    assert [str(e) for e in found if layer(e.module) > 1 and e.top == "rollhook"] == []


def entry_modules() -> list[str]:
    names = {"rollhook", "rollhook.hookspecs", "rollhook.plugins", "rollhook.cli.main", "rollhook.runtime"}
    for distribution in PLUGINS:
        project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
        names |= {value.partition(":")[0] for value in project["entry-points"]["rollhook"].values()}
    return sorted(names)


@pytest.mark.parametrize("module", entry_modules())
def test_importing_it_imports_no_sdk(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(set({SDKS!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_checking_the_quickstart_imports_no_sdk() -> None:
    """The budget of the command line: no SDK, torch or ray in `sys.modules`, with the real plugins."""
    program = (
        "import sys\nfrom rollhook.cli.main import main\n"
        "try:\n    main(['check', 'quickstart', '--site', 'none'])\nexcept SystemExit as end:\n"
        f"    print(end.code or 0, sorted({{*{SDKS!r}, 'aiohttp', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_the_bootstrap_needs_the_standard_library_only() -> None:
    own = {"bootstrap", "workspace"}
    found = [e for path in (ROOT / "core").glob("*.py") for e in imports(path)]
    assert [str(e) for e in found if is_third_party(e.top) and e.top not in own] == []
