"""`recipe.lock.yaml`: the resolved recipe with every default, versions, digests and deviations; it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.durable import write_atomic
from rollhook.recipe import paths
from rollhook.recipe.digests import digest_of
from rollhook.recipe.facts import digests, distributions, revisions, versions
from rollhook.recipe.interpolate import resolve
from rollhook.recipe.load import Deviation, Loaded, validate_core
from rollhook.recipe.names import chain
from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe, Use

if TYPE_CHECKING:
    from rollhook.plugins import Plugins

LOCK_VERSION = 1

#: what stands for the result of a needed recipe until that has run
_PLACEHOLDER = re.compile(r"needs:([A-Za-z_][\w-]*)\.(\w+)")


def complete(loaded: Loaded, plugins: Plugins) -> dict[str, Any]:
    """Return the recipe as plain data with every default of the core and of its components.

    Once the recipes under `needs` have run, their results stand where they are used, and `needs` is empty.
    """
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
    if not loaded.pending:
        data["needs"] = {}
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
    return digest_of(data)


def write_lock(path: Path, loaded: Loaded, plugins: Plugins) -> None:
    """Write the lock, durably; RunError when the disk is full or not writable."""
    write_atomic(path, lock_text(loaded, plugins).encode())


def lock_text(loaded: Loaded, plugins: Plugins, *, frozen: bool = False) -> str:
    """Return the lock of a recipe. Reads the files that the recipe names and asks git.

    A `frozen` one says nothing of this machine: no versions, revisions or digests.
    """
    import yaml

    recipe, unresolved = complete(loaded, plugins), set(loaded.unresolved)
    if loaded.pending:
        unresolved |= _put_back_placeholders(recipe)
    document = {
        "lock": LOCK_VERSION,
        "sources": [_anywhere(each) for each in loaded.sources],
        "versions": {} if frozen else versions(plugins),
        "revisions": [] if frozen else revisions(distributions(plugins)),
        "digests": {} if frozen else digests(loaded, plugins),
        "deviations": {
            key: {"value": each.value, "reference": each.reference, "from": _anywhere(each.source)}
            for key, each in loaded.deviations.items()
        },
        "unresolved": sorted(unresolved),
        "recipe": recipe,
    }
    text = "# Written by Rollhook: a resolved recipe and what was here then; `rollhook run` takes it.\n"
    return text + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def read_lock(
    document: Mapping[str, Any],
    name: str,
    overrides: Sequence[str],
    needs_results: Mapping[str, Mapping[str, Any]],
) -> Loaded:
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
        single = resolve({"value": paths.get(data, path), "needs": data.get("needs")}, needs_results, {})
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
        sources=[*(document.get("sources") or ()), name],
        unresolved={paths.text(path) for path in unresolved},
        pending=recipe is not None and not recipe.needs.keys() <= needs_results.keys(),
        locked={key: document.get(key) for key in ("versions", "revisions", "digests")},
    )
    loaded.problems += [loaded.locate(problem) for problem in found]
    return loaded


def _anywhere(source: str) -> str:
    """Return a file, perhaps with a line, as it is called on any machine."""
    return Path(source).name if Path(source).is_absolute() else source


def _put_back_placeholders(recipe: dict[str, Any]) -> set[str]:
    """Turn `needs:sft.checkpoint` back into `${needs.sft.checkpoint}`; return the keys where it stood."""
    found = set()
    for path, value in paths.leaves(recipe):
        if isinstance(value, str) and _PLACEHOLDER.search(value) and path[0] != "needs":
            paths.replace(recipe, path, _PLACEHOLDER.sub(r"${needs.\1.\2}", value))
            found.add(paths.text(path))
    return found


def _keys(plugins: Plugins, kind: str, name: str, keys: Mapping[str, Any], key: str) -> dict[str, Any]:
    return plugins.config(kind, name, keys, key).model_dump(mode="json")
