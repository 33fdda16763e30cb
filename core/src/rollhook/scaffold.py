"""Packages for authors, written from the templates in `scaffolds/`.

A template is a file whose name ends in `.tmpl`, with `string.Template` placeholders; `__package__` in its
path stands for the package. `common/` goes into every package.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template

import yaml

from rollhook.errors import UsageError

TEMPLATES = Path(__file__).with_name("scaffolds")
#: the range of this release's interfaces
REQUIREMENT = ">=0.1,<0.2"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*")


@dataclass(frozen=True)
class _Kind:
    """`entry` is the kind in the entry point, `test` what the suite needs beside the core."""

    entry: str
    title: str
    summary: str
    guide: str
    test: tuple[str, ...] = ()


KINDS = {
    "sandbox": _Kind(
        "sandbox",
        "sandbox backend",
        "Sandboxes of {Class}",
        "What the service cannot do is a gap: name the case in `gaps` of the backend, with the reason.",
    ),
    "environment": _Kind(
        "environment",
        "environment",
        "Tasks of {Class}",
        "Then prove every task: `rollhook tasks oracle {name}`.",
        (f"rollhook-local{REQUIREMENT}",),
    ),
    "agent": _Kind("agent", "agent", "The agent {Class}", "Then use it in a recipe: `agent={name}`."),
    "router-policy": _Kind(
        "router",
        "router policy",
        "The router policy {Class}",
        "Then use it in a recipe, alone or in a chain: `router={name}+min_load`.",
    ),
    "launcher": _Kind(
        "launcher",
        "launcher",
        "Runs jobs with {Class}",
        "Then look at `rollhook plan RECIPE launcher={name}`.",
    ),
    "tracker": _Kind(
        "tracker", "tracker", "Metrics for {Class}", "Then use it in a recipe: `trackers=[{name}]`."
    ),
}


def write(kind: str, name: str, *, distribution: str | None = None, directory: Path | None = None) -> Path:
    """Write the package and return its directory.

    Raises UsageError for a name that cannot be one, that a known plugin has, or a directory that holds files.
    """
    about = KINDS[kind]
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be a plugin's name: use lower-case letters, digits and single underscores, "
            "beginning with a letter"
        )
    distribution = distribution or f"rollhook-{name.replace('_', '-')}"
    if not isinstance(yaml.safe_load(name), str) or name == "none":
        raise UsageError(f"{name!r} cannot be a plugin's name: in a recipe it would not be read as a name")
    if not _DISTRIBUTION.fullmatch(distribution):
        raise UsageError(f"{distribution!r} cannot be a package's name: use e.g. acme-{name}")
    package = re.sub(r"[-.]", "_", distribution)
    _refuse_taken(about.entry, name, distribution, package)
    names = {"name": name, "Class": "".join(part.capitalize() for part in name.split("_"))}
    values = names | {
        "package": package,
        "distribution": distribution,
        "requirement": REQUIREMENT,
        "entry": about.entry,
        "title": about.title,
        "summary": about.summary.format(**names),
        "guide": about.guide.format(**names),
        "test_requirements": ", ".join(
            f'"{each}"' for each in ("pytest>=8.3", "pytest-asyncio>=1", "hypothesis>=6.120", *about.test)
        ),
    }
    target = (directory or Path(distribution)).expanduser().absolute()
    try:
        if target.exists() and any(target.iterdir()):
            raise UsageError(f"{target} holds files already: give another --directory, or move them away")
        files = _rendered(TEMPLATES / "common", values) | _rendered(TEMPLATES / kind, values)
        _refuse_clashes(name, files)
        for relative, text in files.items():
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}; give another --directory") from error
    return target


def _rendered(source: Path, values: dict[str, str]) -> dict[str, str]:
    """Return the files that the templates below `source` become, by their paths."""
    files = {}
    for template in sorted(source.rglob("*.tmpl")):
        path = str(template.relative_to(source)).removesuffix(".tmpl")
        text = Template(template.read_text("utf-8")).substitute(values)
        files[path.replace("__package__", values["package"])] = text
    return files


def _refuse_clashes(name: str, files: Mapping[str, str]) -> None:
    """Raise UsageError where a class would be called like something else in its file."""
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        found = list(ast.walk(ast.parse(text)))
        named = [alias.name for node in found if isinstance(node, ast.ImportFrom) for alias in node.names]
        named += [node.name for node in found if isinstance(node, ast.ClassDef)]
        clashes = [each for each, count in Counter(named).items() if count > 1 or hasattr(builtins, each)]
        if clashes:
            raise UsageError(
                f"{name!r} cannot be this plugin's name: its class would be called {clashes[0]}, which means "
                "something else there"
            )


def _refuse_taken(entry: str, name: str, distribution: str, package: str) -> None:
    from rollhook.installed import installed, known_plugins

    for found in installed():
        if (found.kind, found.name) == (entry, name):
            raise UsageError(
                f"{entry} {name!r} is installed already, from {found.distribution}: use another name"
            )
    if known := known_plugins().get(entry, {}).get(name):
        raise UsageError(f"{entry} {name!r} is what {known} supplies: use another name")
    if distribution == "rollhook":
        raise UsageError("rollhook is the core's own name: give another --distribution")
    if keyword.iskeyword(package):
        raise UsageError(f"Python would not take {package} for a package: give another --distribution")
    if find_spec(package) is not None:
        raise UsageError(f"a module {package} is there already: give another --distribution")
