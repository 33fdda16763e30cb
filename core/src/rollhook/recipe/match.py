"""Whether this machine is still as a lock says: what is not is named, with what was locked and is here."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rollhook.plugins import Plugins
from rollhook.recipe.facts import digests, distributions, revisions, version_here
from rollhook.recipe.load import Loaded
from rollhook.recipe.problem import Problem

#: in place of a name: everything may differ
ALL = "all"


def mismatches(loaded: Loaded, plugins: Plugins) -> list[Problem]:
    """Return what no longer matches the lock, one problem each, keyed by its name; none for a recipe.

    Reads the files that the recipe names; call it off the event loop.
    """
    if loaded.locked is None or loaded.validated is None:
        return []
    return [*_versions(loaded), *_digests(loaded, plugins)]


def remarks(loaded: Loaded, plugins: Plugins) -> list[str]:
    """Return what differs from the lock, or is not known, and stops nothing: revisions, absent digests."""
    if loaded.locked is None:
        return []
    found = []
    here = {name: _revision(each) for each in revisions(distributions(plugins)) for name in _names(each)}
    moved: dict[tuple[str, str], list[str]] = {}
    for each in loaded.locked.get("revisions") or ():
        for name in _names(each):
            if here.get(name) != _revision(each):
                moved.setdefault((_revision(each), here.get(name, "not from a checkout")), []).append(name)
    for (locked, now), names in moved.items():
        found.append(f"revision of {', '.join(names)}: locked {locked}, here {now}; this stops nothing")
    unknown = [name for name, digest in (loaded.locked.get("digests") or {}).items() if digest is None]
    if unknown:
        found.append(f"not compared, for they were not there when the lock was written: {', '.join(unknown)}")
    return found


def let_through(problems: list[Problem], allowed: Collection[str]) -> tuple[list[Problem], list[str]]:
    """Divide mismatches into those that stop a run and, as remarks, those that may differ."""
    stop = [each for each in problems if ALL not in allowed and each.key not in allowed]
    passed = [each for each in problems if each not in stop]
    return stop, [f"let through: {each.key}: {each.message.partition(':')[0]}" for each in passed]


def _versions(loaded: Loaded) -> Iterator[Problem]:
    assert loaded.locked is not None
    for name, locked in (loaded.locked.get("versions") or {}).items():
        here = version_here(name)
        if here != locked:
            way = f"use Python {locked}" if name == "python" else f"pip install {name}=={locked}"
            yield _mismatch(loaded, name, locked, here or "not installed", way)


def _digests(loaded: Loaded, plugins: Plugins) -> Iterator[Problem]:
    assert loaded.locked is not None
    here = digests(loaded, plugins)
    for name, locked in (loaded.locked.get("digests") or {}).items():
        if locked is None or here.get(name) in {locked, None}:
            continue  # what is not here at all, `check` has said already
        yield _mismatch(loaded, name, locked[:12], str(here[name])[:12], _way_back(name))


def _way_back(name: str) -> str:
    if ".tasks." in name:
        return "restore the tasks"
    return "restore the recipe" if name.startswith("needs.") else "restore the files"


def _mismatch(loaded: Loaded, name: str, locked: str, here: str, way: str) -> Problem:
    message = f"locked {locked}, here {here}: {way}, or run with --allow-changed {name}"
    return Problem(name, message, loaded.name, scope="site")


def _names(revision: dict[str, object]) -> list[str]:
    names = revision.get("distributions")
    return [str(name) for name in names] if isinstance(names, list) else []


def _revision(revision: dict[str, object]) -> str:
    return str(revision.get("commit"))[:12] + (" with changes" if revision.get("dirty") else "")
