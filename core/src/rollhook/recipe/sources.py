"""Recipe files and the recipes they extend, laid over each other; shipped recipes by bare name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rollhook
from rollhook.installed import nearest
from rollhook.recipe import paths
from rollhook.recipe.problem import Problem
from rollhook.recipe.reading import Document, read_file
from rollhook.recipe.tree import Origin, Tree, normalise

MAX_EXTENDS = 16


@dataclass
class Sources:
    """What a recipe is made of, before overrides: merged data, and the same without anything not shipped.

    `broken`: a file could not be read, so that what else is wrong cannot be told.
    """

    tree: Tree = field(default_factory=Tree)
    reference: Tree = field(default_factory=Tree)
    names: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    text: str = ""
    broken: bool = False
    lock: dict[str, Any] | None = None


def shipped_directory() -> Path:
    """Return where the recipes that come with Rollhook are."""
    package = Path(rollhook.__file__).resolve().parent
    packaged, checkout = (package / "recipes").resolve(), package.parents[2] / "recipes"
    return packaged if packaged.is_dir() else checkout


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, without `.yaml`."""
    return sorted(path.stem for path in shipped_directory().glob("*.yaml"))


def find(source: str | Path, beside: Path) -> Path | Problem:
    """Return the file that a recipe is in: a path (relative to `beside`), or the name of a shipped one."""
    path = Path(source).expanduser()
    for candidate in (beside / path, beside / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    if len(path.parts) == 1:
        name = path.name.removesuffix(".yaml")
        if name in shipped_recipes():
            return shipped_directory() / f"{name}.yaml"
    kind = "a directory" if (beside / path).is_dir() else "no recipe file, and no shipped recipe"
    names = shipped_recipes()
    return Problem(
        "",
        f"{str(source)!r} is {kind}",
        allowed=f"shipped recipes: {', '.join(names) or 'none'}",
        nearest=nearest(path.name.removesuffix(".yaml"), names),
    )


def display(path: Path) -> str:
    """Return a path as messages show it: relative where that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def gather(source: str | Path, infra: Sequence[str] = ()) -> Sources:
    """Read a recipe and all that it extends, the last one winning, then infra files on top of it.

    An infra file is a path, or the PROFILE of `<recipe>.PROFILE.infra.yaml` beside the recipe; it fills the
    `launcher` section.
    """
    sources = Sources()
    found = find(source, Path())
    if isinstance(found, Problem):
        sources.problems.append(found)
        sources.broken = True
    else:
        _gather(found, sources, ())
        for each in infra:
            _add_infra(each, found, sources)
    return sources


def _add_infra(infra: str, recipe: Path, sources: Sources) -> None:
    beside = recipe.parent / f"{recipe.stem}.{infra}.infra.yaml"
    path = next((each for each in (Path(infra).expanduser(), beside) if each.is_file()), None)
    if sources.lock is not None:
        sources.problems.append(
            Problem("launcher", "is locked, so an infra file cannot fill it", "command line")
        )
    elif path is None:
        text = f"{infra!r} is no infra file, and {display(beside)} is not there"
        sources.problems.append(Problem("launcher", text, "command line"))
        sources.broken = True
    else:
        _gather(path, sources, (), infra=True)


def _as_launcher(document: Document, name: str) -> Document:
    """Return an infra file as a recipe that has a launcher: `{launcher: {...}}`, or the section's body alone.

    Keys that begin with `_` are for YAML anchors.
    """
    data = {key: value for key, value in document.data.items() if not key.startswith("_")}
    parents = {key: data.pop(key) for key in ("extends",) if key in data}
    lines, problems = document.lines, list(document.problems)
    if "launcher" in data:
        for key in data.keys() - {"launcher"}:
            problems.append(Problem(key, "is in an infra file, which fills `launcher` alone", name))
        data = {"launcher": data["launcher"]}
    else:
        lines = {("launcher", *path) if path[:1] != ("extends",) else path: n for path, n in lines.items()}
        data = {"launcher": data}
    return Document({**parents, **data} if document.data else {}, lines, problems, document.text)


def _gather(path: Path, sources: Sources, above: tuple[Path, ...], *, infra: bool = False) -> None:
    name = display(path)
    document = read_file(path, name)
    if infra:
        document = _as_launcher(document, name)
    sources.problems += document.problems
    sources.broken |= not document.data
    if not above and not infra:
        sources.text = document.text
    if not above and "lock" in document.data:
        sources.lock, sources.names = document.data, [name]
        return
    above = (*above, path.resolve())
    for parent in _extends(document, name, sources):
        found = find(parent, path.parent)
        source = f"{name}:{document.lines.get(('extends',), 1)}"
        if isinstance(found, Problem):
            sources.problems.append(
                Problem("extends", found.message, source, found.allowed, found.nearest, found.hint)
            )
        elif found.resolve() in above:
            chain = " -> ".join(display(each) for each in (*above, found.resolve()))
            sources.problems.append(Problem("extends", f"goes round in a circle: {chain}", source))
        elif len(above) >= MAX_EXTENDS:
            sources.problems.append(Problem("extends", f"is nested deeper than {MAX_EXTENDS} files", source))
        else:
            _gather(found, sources, above, infra=infra)
            continue
        sources.broken = True
    _lay(document, path, name, sources, main=len(above) == 1 and not infra)


def _lay(document: Document, path: Path, name: str, sources: Sources, *, main: bool) -> None:
    data = normalise({key: value for key, value in document.data.items() if key != "extends"})
    layer = len(sources.names)
    sources.names.append(name)
    tree = Tree(
        data,
        {leaf: Origin(_line(document, name, leaf), layer, path.parent) for leaf, _ in paths.leaves(data)},
    )
    sources.tree.merge(tree)
    if path.resolve().parent == shipped_directory():
        sources.reference.merge(tree)
    elif main and not sources.reference.data:
        sources.reference.merge(sources.tree)


def point_needs(tree: Tree) -> list[Problem]:
    """Make every recipe under `needs` findable from here; what cannot be found is a problem."""
    problems = []
    needs = tree.data.get("needs")
    for alias, need in needs.items() if isinstance(needs, dict) else ():
        recipe = need.get("recipe") if isinstance(need, dict) else None
        origin = tree.origin(("needs", alias, "recipe"))
        if not isinstance(recipe, str) or "${" in recipe or origin is None:
            continue
        found = find(recipe, origin.directory)
        if isinstance(found, Problem):
            key = f"needs.{alias}.recipe"
            problems.append(Problem(key, found.message, origin.source, found.allowed, found.nearest))
        else:
            shipped = found.resolve().parent == shipped_directory()
            need["recipe"] = found.stem if shipped else display(found)
    return problems


def _line(document: Document, name: str, path: paths.Path) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in document.lines:
            return f"{name}:{document.lines[path[:end]]}"
    return name


def _extends(document: Document, name: str, sources: Sources) -> Sequence[str]:
    value = document.data.get("extends", [])
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        return names
    source = f"{name}:{document.lines.get(('extends',), 1)}"
    sources.problems.append(Problem("extends", f"{value!r} is not a recipe or a list of recipes", source))
    sources.broken = True
    return []
