"""`${...}` in a recipe: other keys, `${oc.env:NAME}` and `${needs.alias.checkpoint}`."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from rollhook.installed import nearest
from rollhook.recipe import paths
from rollhook.recipe.problem import Problem

#: what `${needs.alias.KEY}` may name before the recipe has run
RESULT_KEYS = ("checkpoint", "run_id")

_SHELL = re.compile(r"(?<!\\)\$\{([A-Z_][A-Z0-9_]*)\}|(?<!\\)\$\{([A-Za-z_]\w*)[:#%/^,@?+=-]+[^}]*\}")
_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL)S?(_|$)", re.IGNORECASE
)


@dataclass
class Resolved:
    """The data with every `${...}` replaced. `unresolved` are the paths that this machine cannot fill."""

    data: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    unresolved: set[paths.Path] = field(default_factory=set)
    raw: dict[paths.Path, str] = field(default_factory=dict)


def resolve(
    data: dict[str, Any], needs_results: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> Resolved:
    """Replace every `${...}`; what fails is a problem with its key path, and the others go on.

    `${key}` of a key that the recipe leaves out is looked up in `defaults`.
    """
    result = Resolved(copy.deepcopy(data))
    readable = copy.deepcopy(data)
    pending: list[tuple[paths.Path, str]] = []
    for path, value in paths.leaves(data):
        if not isinstance(value, str) or "${" not in value:
            continue
        problem = _misuse(paths.text(path), value, data)
        if problem:
            result.problems.append(problem)
            result.unresolved.add(path)
            paths.replace(readable, path, None)
        else:
            pending.append((path, value))
    if not pending:
        return result
    readable["needs"] = _needs(data.get("needs"), needs_results)
    config = OmegaConf.create(_over(defaults, readable))
    for path, value in pending:
        try:
            found = _value(config, path, value)
        except OmegaConfBaseException as error:
            result.problems.append(_failure(paths.text(path), value, error, _over(defaults, readable)))
            result.unresolved.add(path)
        else:
            result.raw[path] = value
            paths.replace(result.data, path, found)
    return result


def _value(config: Any, path: paths.Path, text: str) -> Any:
    """Resolve one value. Under `needs`, where the tree holds results, the text itself is resolved."""
    parent = config
    if path[0] == "needs":
        config = OmegaConf.merge(config, {"__value__": text})
        found = config["__value__"]
    else:
        for part in path[:-1]:
            parent = parent[part]
        found = parent[path[-1]]
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def _over(defaults: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in data if isinstance(data[key], dict) and isinstance(defaults.get(key), dict)}
    return {**defaults, **data, **{key: _over(defaults[key], data[key]) for key in both}}


def _needs(aliases: Any, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    known: dict[str, Any] = {alias: dict(values) for alias, values in results.items()}
    for alias in aliases if isinstance(aliases, dict) else ():
        known.setdefault(alias, {key: f"needs:{alias}.{key}" for key in RESULT_KEYS})
    return known


def _misuse(key: str, value: str, data: Mapping[str, Any]) -> Problem | None:
    for name in _ENV.findall(value):
        if _SECRET_NAME.search(name):
            return Problem(
                key,
                f"${{oc.env:{name}}} would write a secret into the recipe",
                hint=f"refer to it as env:{name} in a key that takes secrets",
            )
    shell = _SHELL.search(value)
    name = (shell.group(1) or shell.group(2)) if shell else ""
    if shell and name not in data and name != "oc":
        return Problem(
            key,
            f"{shell.group(0)} looks like a shell variable",
            hint=f"escape it as \\{shell.group(0)} (in double quotes: \\\\{shell.group(0)}), "
            f"or read it now with ${{oc.env:{name}}}",
        )
    try:
        OmegaConf.create({"value": value})
    except GrammarParseError:
        return Problem(key, f"{value!r} is not an interpolation", hint=r"write a plain ${ as \${")
    return None


def _failure(key: str, value: str, error: OmegaConfBaseException, known: Mapping[str, Any]) -> Problem:
    if isinstance(error, InterpolationKeyError | InterpolationToMissingValueError):
        return _unknown_key(key, value, known)
    names = _ENV.findall(value)
    if names and "Environment variable" in str(error):
        name = next((each for each in names if f"'{each}'" in str(error)), names[0])
        return Problem(
            key,
            f"the environment variable {name} is not set",
            hint=f"set it: export {name}=...",
            scope="site",
        )
    return Problem(key, f"{value!r} cannot be resolved: {str(error).splitlines()[0]}")


def _unknown_key(key: str, value: str, known: Mapping[str, Any]) -> Problem:
    needs = known["needs"]
    alias = re.search(r"\$\{needs\.([^.}]+)(?:\.([^}]+))?\}", value)
    if alias and alias.group(1) in needs:
        have = list(needs[alias.group(1)])
        return Problem(
            key,
            f"{value} names no result of a recipe",
            allowed=f"results: {', '.join(have)}",
            nearest=nearest(alias.group(2) or "", have),
        )
    if alias:
        return Problem(
            key,
            f"{value} names no recipe under needs",
            allowed=f"needs: {', '.join(needs) or 'none'}",
            nearest=nearest(alias.group(1), needs),
        )
    keys = [paths.text(path[:end]) for path, _ in paths.leaves(known) for end in range(1, len(path) + 1)]
    named = re.search(r"\$\{([\w.]+)\}", value)
    near = nearest(named.group(1), dict.fromkeys(keys)) if named else ""
    return Problem(key, f"{value} names no key of this recipe", nearest=near)
