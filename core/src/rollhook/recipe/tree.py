"""A recipe while it is put together: plain data, and where every value came from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollhook.recipe import paths
from rollhook.recipe.schema import EnvironmentUse, RouterUse, SandboxUse, Use

#: the keys that name one component, and the keys beside `use` that are the core's own
COMPONENT_KEYS = {
    key: frozenset(model.model_fields)
    for key, model in {
        "environment": EnvironmentUse,
        "agent": Use,
        "sandbox": SandboxUse,
        "router": RouterUse,
        "engine": Use,
        "trainer": Use,
        "launcher": Use,
    }.items()
}


@dataclass(frozen=True)
class Origin:
    """Where a value came from: later layers win; paths of recipes in it are relative to `directory`."""

    source: str
    layer: int
    directory: Path = Path()


@dataclass
class Tree:
    """Plain nested data with an origin per leaf."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[paths.Path, Origin] = field(default_factory=dict)

    def origin(self, path: paths.Path) -> Origin | None:
        """Return the origin of a value, or of what encloses it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return next((origin for key, origin in self.origins.items() if paths.below(key, path)), None)

    def merge(self, other: Tree) -> None:
        """Lay `other` over this: mappings merge key by key, everything else replaces.

        A component that is replaced by another one takes its own keys along; the core's keys stay.
        """
        self._merge(self.data, other.data, (), other)

    def delete(self, path: paths.Path) -> None:
        """Delete a key that exists."""
        parent = paths.get(self.data, path[:-1])
        del parent[path[-1]]
        self._forget(path)

    def put(self, path: paths.Path, value: Any, origin: Origin) -> None:
        """Set one value, making the mappings above it. Raises KeyError where a list index does not exist."""
        if any(isinstance(part, int) for part in path):
            parent = paths.get(self.data, path[:-1])
            if isinstance(path[-1], int) or not isinstance(parent, dict):
                paths.get(self.data, path)
            parent[path[-1]] = value
            self._forget(path)
            self._note(path, value, origin)
            self.data = normalise(self.data)
            return
        patch: Any = value
        for part in reversed(path):
            patch = {part: patch}
        layer = normalise(patch)
        self.merge(Tree(layer, {leaf: origin for leaf, _ in paths.leaves(layer)}))

    def _merge(self, base: dict[str, Any], layer: dict[str, Any], path: paths.Path, other: Tree) -> None:
        for key, value in layer.items():
            here = (*path, key)
            old = base.get(key)
            if isinstance(old, dict) and isinstance(value, dict) and (value or not old):
                if len(here) == 1 and key in COMPONENT_KEYS:
                    self._drop_replaced_component(key, old, value, other)
                self._merge(old, value, here, other)
                continue
            if isinstance(old, dict) and value == {}:
                continue
            base[key] = copy.deepcopy(value)
            self._forget(here)
            for leaf, _ in paths.leaves(value, here):
                self.origins[leaf] = other.origin(leaf) or Origin("", 0)

    def _drop_replaced_component(
        self, key: str, old: dict[str, Any], new: dict[str, Any], other: Tree
    ) -> None:
        if new.get("use") is None or new["use"] == old.get("use"):
            return
        layer = max((origin.layer for origin in other.origins.values()), default=0)
        for name in [name for name in old if name not in COMPONENT_KEYS[key]]:
            origin = self.origin((key, name))
            if origin is None or origin.layer < layer:
                del old[name]
                self._forget((key, name))

    def _note(self, path: paths.Path, value: Any, origin: Origin) -> None:
        self.origins.update({leaf: origin for leaf, _ in paths.leaves(value, path)})

    def _forget(self, path: paths.Path) -> None:
        """Forget a value's origin, and that of an empty mapping which encloses it."""
        for leaf in [leaf for leaf in self.origins if paths.below(leaf, path) or paths.below(path, leaf)]:
            del self.origins[leaf]


def normalise(data: dict[str, Any]) -> dict[str, Any]:
    """Write the short forms out: a bare name is a component with its defaults, one tracker is a list."""
    result = dict(data)
    for key in COMPONENT_KEYS:
        if key in result:
            result[key] = _component(result[key])
    if isinstance(result.get("environment"), list):
        result["environment"] = [_component(each) for each in result["environment"]]
    for key in ("trackers", "plugins"):
        if isinstance(result.get(key), str | dict):
            result[key] = [result[key]]
    if isinstance(result.get("trackers"), list):
        result["trackers"] = [_component(each) for each in result["trackers"]]
    if isinstance(result.get("needs"), dict):
        result["needs"] = {
            alias: {"recipe": need} if isinstance(need, str) else need
            for alias, need in result["needs"].items()
        }
    return result


def _component(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value
