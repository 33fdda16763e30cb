"""What an API server does with a structural schema: prune, default, check; and the lists that are maps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

#: the rules of the schemas in CEL, as functions of the new and the old value
_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "self == oldSelf": lambda new, old: old is None or new == old,
    "self in ['ray.io/kuberay-operator', 'kueue.x-k8s.io/multikueue']": lambda new, old: (
        new in ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
    ),
    "!(has(self.jobStatus) && has(self.jobDeploymentStatus))": lambda new, old: (
        not ("jobStatus" in new and "jobDeploymentStatus" in new)
    ),
    "has(self.jobStatus) || has(self.jobDeploymentStatus)": lambda new, old: (
        "jobStatus" in new or "jobDeploymentStatus" in new
    ),
    "((has(self.onSuccess) && has(self.onFailure)) || has(self.deletionRules))": lambda new, old: (
        ("onSuccess" in new and "onFailure" in new) or "deletionRules" in new
    ),
    "!((has(self.onSuccess) || has(self.onFailure)) && has(self.deletionRules))": lambda new, old: (
        not (("onSuccess" in new or "onFailure" in new) and "deletionRules" in new)
    ),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


@cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("ray_schema.json").read_text())
    known: dict[str, Any] = {}

    def expand(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if (name := node.get("$ref")) is None:
            return {key: expand(each) for key, each in node.items()}
        if name not in known:
            known[name] = expand(loaded["defs"][name])
        return known[name]

    return {plural: expand(node) for plural, node in loaded["roots"].items()}


def child(schema: Schema, name: str) -> Schema | None:
    """Return the schema of a field; None when there is none."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    more = schema.get("additionalProperties")
    return more if isinstance(more, dict) else None


def items(schema: Schema) -> Schema:
    """Return the schema of a list's items."""
    return schema.get("items", {})  # type: ignore[no-any-return]


def root(plural: str) -> Schema:
    """Return the schema of a Ray kind."""
    return _data()[plural]  # type: ignore[no-any-return]


def pod_template() -> Schema:
    """Return the schema of a pod template, as KubeRay's CRD embeds it."""
    found: Schema | None = root("rayclusters")
    for name in ("spec", "headGroupSpec", "template"):
        assert found is not None
        found = child(found, name)
    assert found is not None
    return found


def map_keys(schema: Schema | None) -> list[str]:
    """Return the keys that tell the items of a list apart; none when the list is replaced as a whole."""
    if schema is None or schema.get("x-kubernetes-list-type") != "map":
        return []
    return list(schema["x-kubernetes-list-map-keys"])


def is_set(schema: Schema | None) -> bool:
    """Whether a list is a set of scalars."""
    return schema is not None and schema.get("x-kubernetes-list-type") == "set"


def prune(value: Any, schema: Schema, path: str = "") -> list[str]:
    """Remove fields that the schema does not have, and return their paths."""
    gone: list[str] = []
    if isinstance(value, dict) and schema.get("type") == "object":
        known, more = schema.get("properties"), schema.get("additionalProperties")
        if known is None and more is None:
            if not path.startswith("metadata"):
                gone += [f"{path}.{name}" for name in value]
                value.clear()
            return gone
        for name in list(value):
            below = child(schema, name)
            here = f"{path}.{name}" if path else name
            if below is not None:
                if here != "metadata":
                    gone += prune(value[name], below, here)
            elif not (path == "" and name in ("apiVersion", "kind", "metadata")):
                gone.append(here)
                del value[name]
    elif isinstance(value, list):
        for number, each in enumerate(value):
            gone += prune(each, items(schema), f"{path}[{number}]")
    return gone


def default(value: Any, schema: Schema) -> None:
    """Set the defaults of fields that are absent, or null where null is not allowed."""
    if isinstance(value, dict):
        for name in schema.get("properties", {}):
            below = child(schema, name) or {}
            if value.get(name) is None and name in value and not below.get("nullable"):
                del value[name]
            if name not in value and "default" in below:
                value[name] = json.loads(json.dumps(below["default"]))
        for name, each in value.items():
            below = child(schema, name) or {}
            default(each, below)
    elif isinstance(value, list):
        for each in value:
            default(each, items(schema))


def check(value: Any, schema: Schema, old: Any = None, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (reason, path, message) of each fault, as causes of a Status have them."""
    if value is None and schema.get("nullable"):
        return
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield _invalid(path, value, f"must be of type integer or string, not {_name(value)}")
            return
    elif wanted and (
        not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted in ("integer", "number"))
    ):
        yield (
            "FieldValueTypeInvalid",
            path,
            f'Invalid value: "{_name(value)}": {path} in body must be of type {wanted}: "{_name(value)}"',
        )
        return
    yield from _scalar(value, schema, path)
    if isinstance(value, dict):
        for name in schema.get("required", []):
            if name not in value:
                yield "FieldValueRequired", f"{path}.{name}".lstrip("."), "Required value"
        for name, each in value.items():
            below = child(schema, name)
            if below is not None and not (path == "" and name == "metadata"):
                before = old.get(name) if isinstance(old, dict) else None
                yield from check(each, below, before, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        seen = set()
        for number, each in enumerate(value):
            yield from check(each, items(schema), None, f"{path}[{number}]")
            if (keys := map_keys(schema)) and isinstance(each, dict):
                mark = json.dumps([each.get(key) for key in keys])
                if mark in seen:
                    told = json.dumps({key: each.get(key) for key in keys})
                    yield "FieldValueDuplicate", f"{path}[{number}]", f"Duplicate value: {told}"
                seen.add(mark)
    for rule in schema.get("x-kubernetes-validations", []):
        if not _RULES[rule["rule"]](value, old):
            yield _invalid(path, value, rule["message"])


def _scalar(value: Any, schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(json.dumps(each) for each in schema["enum"])
        told = f"Unsupported value: {json.dumps(value)}: supported values: {allowed}"
        yield "FieldValueNotSupported", path, told
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield _invalid(path, value, f"{path} in body should match '{schema['pattern']}'")
        if len(value) < schema.get("minLength", 0):
            yield _invalid(path, value, f"should be at least {schema['minLength']} chars long")
        if len(value) > schema.get("maxLength", len(value)):
            yield "FieldValueTooLong", path, f"Too long: may not be more than {schema['maxLength']} bytes"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield _invalid(path, value, f"should be greater than or equal to {schema['minimum']}")
        if schema.get("format") == "int32" and not -(2**31) <= value < 2**31:
            yield _invalid(path, value, "must be a 32-bit integer")
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        yield _invalid(path, len(value), f"should have at least {schema['minItems']} items")


def _invalid(path: str, value: Any, message: str) -> tuple[str, str, str]:
    shown = json.dumps(value) if isinstance(value, (str, int, float, bool)) else _name(value)
    return "FieldValueInvalid", path, f"Invalid value: {shown}: {message}"


def _name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")
