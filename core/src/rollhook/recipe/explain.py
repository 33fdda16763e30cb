"""`rollhook explain`: which distribution supplied each part, and where every value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollhook.recipe import paths
from rollhook.recipe.check import Checked
from rollhook.recipe.lock import complete
from rollhook.recipe.tree import COMPONENT_KEYS


@dataclass(frozen=True)
class Supplied:
    """One part of a recipe and the distribution behind it."""

    key: str
    component: str
    distribution: str
    version: str


@dataclass(frozen=True)
class Value:
    """One value of the resolved recipe. `source` is a file and line, the command line, or a default."""

    key: str
    value: Any
    source: str


def supplied(checked: Checked) -> list[Supplied]:
    """Return the parts that could be loaded, in the recipe's order."""
    return [
        Supplied(part.key, f"{part.kind}.{part.name}", *checked.plugins.distribution(part.kind, part.name))
        for part in checked.parts
    ]


def values(checked: Checked) -> list[Value]:
    """Return every value, defaults included; only those written down while the recipe is not valid.

    A value that is wrong is not among them: it may be a secret in the wrong place.
    """
    loaded, wrong = checked.loaded, wrong_keys(checked)
    data = loaded.resolved if checked.composition else complete(loaded, checked.plugins)
    owners = {part.key: f"default of {part.kind}.{part.name}" for part in checked.parts}
    return [
        Value(paths.text(path), value, _source(loaded.origins, path, owners))
        for path, value in paths.leaves(data)
        if not any(paths.below(path, key) for key in wrong)
    ]


def wrong_keys(checked: Checked) -> list[paths.Path]:
    """Return the paths of the keys that have a problem."""
    return [paths.parse(problem.key) for problem in checked.composition if problem.key]


def _source(origins: dict[str, str], path: paths.Path, owners: dict[str, str]) -> str:
    key = paths.text(path)
    inside = next((origin for each, origin in origins.items() if each.startswith(f"{key}.")), "")
    for end in range(len(path), 0, -1):
        if paths.text(path[:end]) in origins:
            return origins[paths.text(path[:end])]
    if inside:
        return inside
    for end in range(len(path) - 1, 0, -1):
        part = paths.text(path[:end])
        if part in owners and path[end] not in COMPONENT_KEYS.get(str(path[0]), ()):
            return owners[part]
    return "default"
