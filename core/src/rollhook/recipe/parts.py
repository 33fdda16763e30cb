"""The components of a recipe as `check` sees them: validated keys, classes, and what is wrong with each."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollhook.component import BuildContext
from rollhook.errors import RollhookError
from rollhook.installed import EntryInfo, nearest
from rollhook.packs import cache_directory
from rollhook.plugins import LoadError, Plugins, load
from rollhook.recipe.load import Loaded
from rollhook.recipe.names import chain, located_names
from rollhook.recipe.problem import Problem
from rollhook.recipe.refs import references
from rollhook.recipe.tree import COMPONENT_KEYS
from rollhook.recipe.validate import validate
from rollhook.secrets import resolve_secret

#: kinds of whose classes no rule asks anything: on another machine they are not imported
_UNASKED = frozenset({"environment", "tracker", "pack"})


@dataclass(frozen=True)
class Part:
    """One component: where the recipe names it, and what could be learnt about it.

    `cls` is None where it cannot be loaded, or was not because nobody asks it anything.
    """

    key: str
    kind: str
    name: str
    keys: Mapping[str, Any]
    config: BaseModel | None
    cls: type[Any] | None


@dataclass
class Parts:
    """All components of a recipe."""

    plugins: Plugins
    parts: list[Part]
    problems: list[Problem]
    #: whether every class is loaded, not only those that rules ask something
    whole: bool = True

    def of(self, kind: str) -> list[Part]:
        """Return the parts of a kind that could be loaded, in the recipe's order."""
        return [part for part in self.parts if part.kind == kind]

    def build(self, part: Part) -> Any:
        """Return the component, None if its keys are wrong, or a problem if it cannot be built here.

        Constructors do no I/O, so that a component can be asked what it can do.
        """
        if part.config is None or part.cls is None:
            return None
        context = BuildContext(
            logger=logging.getLogger(f"rollhook.{part.key}"),
            scratch=Path(tempfile.gettempdir()),
            cache=cache_directory(),
            secret=resolve_secret,
        )
        try:
            return self.plugins.build(part.kind, part.name, part.keys, context, part.key)
        except (RollhookError, ImportError, OSError) as error:
            reason = " ".join(str(error).split())
            return Problem(f"{part.key}.use", f"{part.name} cannot be built here: {reason}", scope="site")


def find_parts(loaded: Loaded, *, whole: bool = True, entries: Sequence[EntryInfo] | None = None) -> Parts:
    """Load and validate every component that the recipe names; nothing is raised.

    Without `whole` the classes of environments, trackers and packs are left alone: their imports take as long
    as the rest of a check.
    """
    located = located_names(loaded)
    plugins = load([(kind, name) for kind, name, _ in located], strict=False, entries=entries)
    found = Parts(plugins, [], [], whole)
    for kind, name, key in located:
        if (kind, name) in plugins.failures:
            found.problems.append(plugins.failures[kind, name].at(key))
    for key, kind, name, keys in _uses(loaded.defaulted()):
        if kind == "router":
            _add_chain(found, key, name, keys, loaded.unresolved)
        else:
            _add(found, key, kind, name, keys, loaded.unresolved)
    return found


def _uses(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield (key path, kind, name, the component's own keys)."""
    for kind in COMPONENT_KEYS:
        value = data.get(kind)
        several = isinstance(value, list)
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Mapping) and isinstance(each.get("use"), str):
                own = {key: item for key, item in each.items() if key not in COMPONENT_KEYS[kind]}
                yield f"{kind}.{index}" if several else kind, kind, each["use"], own
    trackers = data.get("trackers")
    for index, each in enumerate(trackers if isinstance(trackers, list) else []):
        if isinstance(each, Mapping) and isinstance(each.get("use"), str):
            own = {key: item for key, item in each.items() if key != "use"}
            yield f"trackers.{index}", "tracker", each["use"], own


def _add(found: Parts, key: str, kind: str, name: str, keys: dict[str, Any], unresolved: set[str]) -> None:
    plugins = found.plugins
    if (kind, name) in plugins.failures:
        return
    config, wrong = validate(plugins.component(kind, name).config, keys, key)
    found.problems += [each for each in wrong if each.key not in unresolved]
    cls = None
    try:
        if found.whole or kind not in _UNASKED:
            cls = plugins.load_class(kind, name)
    except LoadError as error:
        found.problems.append(error.at(f"{key}.use"))
    found.parts.append(Part(key, kind, name, keys, config, cls))
    for field, inner_kind, use in references(config) if config is not None else ():
        plugins.add([(inner_kind, use.use)], strict=False)
        inner = f"{key}.{field}"
        if (inner_kind, use.use) in plugins.failures:
            where = f"{inner}.use" if isinstance(keys[field], Mapping) else inner
            found.problems.append(plugins.failures[inner_kind, use.use].at(where))
        else:
            _add(found, inner, inner_kind, use.use, use.keys, unresolved)


def _add_chain(found: Parts, key: str, use: str, keys: dict[str, Any], unresolved: set[str]) -> None:
    names = chain(use)
    for name in names:
        own = keys.get(name) or {}
        if isinstance(own, Mapping):
            _add(found, f"{key}.{name}", "router", name, dict(own), unresolved)
        else:
            found.problems.append(Problem(f"{key}.{name}", f"{own!r} is not a mapping of the keys of {name}"))
    for other in [other for other in keys if other not in names]:
        owner = next((name for name in names if _takes(found.plugins, name, other)), "")
        found.problems.append(
            Problem(
                f"{key}.{other}",
                f"{other!r} is not a policy of the chain {use}",
                allowed=f"keys of a policy go under its name: {', '.join(names)}",
                nearest=f"{owner}.{other}"
                if owner
                else nearest(other, [*names, *sorted(COMPONENT_KEYS[key])]),
            )
        )


def _takes(plugins: Plugins, policy: str, key: str) -> bool:
    if ("router", policy) in plugins.failures:
        return False
    return key in plugins.component("router", policy).config.model_fields
