"""Which components a recipe names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rollhook.errors import UsageError
from rollhook.hookspecs import PROVIDER_HOOKS
from rollhook.packs import PREFIX, parse_reference
from rollhook.recipe import paths
from rollhook.recipe.load import Loaded
from rollhook.recipe.schema import Recipe
from rollhook.recipe.tree import COMPONENT_KEYS


def component_names(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (kind, name) of all components, in the recipe's order, each once.

    What a `ComponentRef` field names is found when the component's own keys are validated.
    """
    return list(dict.fromkeys(_names(recipe.model_dump(mode="json"))))


def names_in(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names in recipe data that need not be valid, without any plugin's help.

    Among a component's own keys, one that is called like a kind (`pack: pocket`) names one of it, and a
    mapping with `use` one of that kind, else of the kind of the component.
    """
    found = [*_names(data)]
    for path, kind, _ in _located(data):
        if path[-1] == "use":
            found += _nested(paths.get(data, path[:-1]), kind)
    return list(dict.fromkeys(found))


def located_names(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return (kind, name, key path that names it), in the recipe's order."""
    return [(kind, name, paths.text(path)) for path, kind, name in _located(loaded.defaulted())]


def chain(use: str) -> list[str]:
    """Return the policies of a router chain: `sticky+min_load` is two."""
    return [part.strip() for part in use.split("+")]


def _names(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for _, kind, name in _located(data):
        yield kind, name


def _located(data: Mapping[str, Any]) -> Iterator[tuple[paths.Path, str, str]]:
    for key, value in data.items():
        if key in COMPONENT_KEYS:
            entries = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, each in entries:
                path: paths.Path = (key,) if index is None else (key, index)
                yield from _component(each, key, path)
        elif key == "trackers" and isinstance(value, list):
            for index, each in enumerate(value):
                yield from _component(each, "tracker", (key, index))
        elif key == "plugins" and isinstance(value, list):
            yield from (
                ((key, index), "plugin", each) for index, each in enumerate(value) if isinstance(each, str)
            )
    for path, value in paths.leaves(data):
        if isinstance(value, str) and value.startswith(PREFIX):
            with suppress(UsageError):
                reference = parse_reference(value)
                yield from [(path, "pack", reference.name)] if reference else []


def _component(value: Any, kind: str, path: paths.Path) -> Iterator[tuple[paths.Path, str, str]]:
    if not isinstance(value, Mapping):
        return
    use = value.get("use")
    if isinstance(use, str):
        for name in chain(use) if kind == "router" else [use]:
            yield (*path, "use"), kind, name


def _nested(keys: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    for key, value in keys.items():
        inner = key if key in PROVIDER_HOOKS else kind
        if isinstance(value, str) and key in PROVIDER_HOOKS:
            yield key, value
        if isinstance(value, Mapping):
            if isinstance(value.get("use"), str):
                yield inner, value["use"]
            yield from _nested(value, inner)
