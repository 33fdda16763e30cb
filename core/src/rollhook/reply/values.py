"""Arguments of calls whose form writes them without types: restored by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollhook.messages import ToolSchema

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def parameters(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's parameters by name; empty where it declares none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters") or function.get("input_schema") or {}
            declared = schema.get("properties") if isinstance(schema, Mapping) else None
            return declared if isinstance(declared, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """Return what a text means under a schema: its JSON where that has a declared type, else the text.

    Without a declared type the text's JSON counts. `true` and `false` in any spelling are booleans where one
    is asked for.
    """
    types = set(_declared(schema))
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if types == {"string"}:
        return text
    try:
        value = load(text)
    except ValueError:
        return text
    return value if not types or any(_is(value, name) for name in types) else text


def load(text: str) -> Any:
    """Return the value of JSON text; raises ValueError, also for NaN and for nesting that is too deep."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _declared(schema: Any) -> Iterator[str]:
    """Return the names of the types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return
    names = schema.get("type")
    yield from [names] if isinstance(names, str) else names if isinstance(names, list) else ()
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            yield from _declared(branch)
    if names is None and isinstance(values := schema.get("enum"), list):
        for value in values:
            yield from (name for name in _TYPES if _is(value, name))


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))
