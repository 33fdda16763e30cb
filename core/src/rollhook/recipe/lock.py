"""`recipe.lock.yaml`: the resolved recipe with every default, versions and deviations; it drives a run."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rollhook
from rollhook.durable import write_atomic
from rollhook.recipe import paths
from rollhook.recipe.interpolate import resolve
from rollhook.recipe.load import Deviation, Loaded, validate_core
from rollhook.recipe.names import chain
from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe, Use

if TYPE_CHECKING:
    from rollhook.plugins import Plugins

LOCK_VERSION = 1


def complete(loaded: Loaded, plugins: Plugins) -> dict[str, Any]:
    """Return the recipe as plain data with every default of the core and of its components."""
    recipe = loaded.recipe
    data = recipe.model_dump(mode="json")
    for key, kind, use in uses(recipe):
        if kind == "router":
            filled = {
                name: _keys(plugins, kind, name, use.keys.get(name) or {}, key) for name in chain(use.use)
            }
        else:
            filled = _keys(plugins, kind, use.use, use.keys, key)
        path = paths.parse(key)
        paths.replace(data, path, {**paths.get(data, path), **filled})
    if isinstance(loaded.resolved.get("environment"), Mapping):
        data["environment"] = data["environment"][0]
    return data


def uses(recipe: Recipe) -> list[tuple[str, str, Use]]:
    """Return (key path, kind, use) of every component of a recipe; a router chain is one."""
    found: list[tuple[str, str, Use]] = []
    found += [(f"environment.{index}", "environment", each) for index, each in enumerate(recipe.environment)]
    for kind in ("agent", "sandbox", "router", "engine", "trainer", "launcher"):
        use = getattr(recipe, kind)
        if use is not None:
            found.append((kind, kind, use))
    found += [(f"trackers.{index}", "tracker", each) for index, each in enumerate(recipe.trackers)]
    return found


def digest(loaded: Loaded, plugins: Plugins) -> str:
    """Return a hex digest of what the recipe asks for: equal for two runs that would do the same."""
    data = complete(loaded, plugins)
    for key in ("name", "storage", "trackers"):
        data.pop(key, None)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_lock(path: Path, loaded: Loaded, plugins: Plugins) -> None:
    """Write the lock, durably; RunError when the disk is full or not writable."""
    import yaml

    distributions = dict(plugins.distribution(kind, name) for kind, name in plugins.loaded())
    document = {
        "lock": LOCK_VERSION,
        "sources": loaded.sources,
        "versions": {
            "python": platform.python_version(),
            "rollhook": rollhook.__version__,
            **dict(sorted(distributions.items())),
        },
        "deviations": {
            key: {"value": each.value, "reference": each.reference, "from": each.source}
            for key, each in loaded.deviations.items()
        },
        "unresolved": sorted(loaded.unresolved),
        "recipe": complete(loaded, plugins),
    }
    text = "# Written by Rollhook: the resolved recipe of one run. `rollhook drive` takes this file.\n"
    text += yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)
    write_atomic(path, text.encode())


def read_lock(document: Mapping[str, Any], name: str, overrides: Sequence[str]) -> Loaded:
    """Return what a lock holds. Only what was unresolved where it was written is resolved again."""
    problems = []
    if document.get("lock") != LOCK_VERSION:
        problems.append(
            Problem("lock", f"is {document.get('lock')!r}", name, f"this version reads lock {LOCK_VERSION}")
        )
    if overrides:
        problems.append(
            Problem(
                "",
                f"a lock takes no overrides ({len(overrides)} given)",
                name,
                hint="override the recipe instead",
            )
        )
    data = document.get("recipe")
    if not isinstance(data, dict):
        problems.append(Problem("recipe", "is not a mapping: the lock is damaged", name))
        return Loaded(None, {}, {}, {}, {}, problems, [name])
    unresolved: set[paths.Path] = set()
    for key in document.get("unresolved") or ():
        path = paths.parse(key)
        single = resolve({"value": paths.get(data, path)}, {}, {})
        problems += [Problem(key, p.message, name, hint=p.hint, scope=p.scope) for p in single.problems]
        paths.replace(data, path, single.data["value"])
        unresolved |= {path} if single.problems else set()
    recipe, found = validate_core(data, unresolved)
    loaded = Loaded(
        validated=recipe,
        resolved=data,
        origins={paths.text(path): name for path, _ in paths.leaves(data)},
        layers={paths.text(path): 0 for path, _ in paths.leaves(data)},
        deviations={
            key: Deviation(each["value"], each["reference"], each["from"])
            for key, each in (document.get("deviations") or {}).items()
        },
        problems=problems,
        sources=list(document.get("sources") or [name]),
        unresolved={paths.text(path) for path in unresolved},
        locked=dict(document.get("versions") or {}),
    )
    loaded.problems += [loaded.locate(problem) for problem in found]
    return loaded


def _keys(plugins: Plugins, kind: str, name: str, keys: Mapping[str, Any], key: str) -> dict[str, Any]:
    return plugins.config(kind, name, keys, key).model_dump(mode="json")
