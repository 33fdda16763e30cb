"""Decodes the few bodies that kubectl sends as protobuf.

Field numbers: the `generated.proto` files of k8s.io/api.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from doubles.kubernetes.errors import ApiError

_MAGIC = b"k8s\x00"
_META = {
    1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion",
    11: ("map", "labels", "string"),
    12: ("map", "annotations", "string"), 14: ("many", "finalizers", "string"),
}  # fmt: skip
_ATTRIBUTES = {
    1: "namespace",
    2: "verb",
    3: "group",
    4: "version",
    5: "resource",
    6: "subresource",
    7: "name",
}
_SUBJECT = {1: "kind", 2: "apiGroup", 3: "name", 4: "namespace"}
_ROLE = {1: "apiGroup", 2: "kind", 3: "name"}
_RULE = {
    1: ("many", "verbs", "string"), 2: ("many", "apiGroups", "string"), 3: ("many", "resources", "string"),
    4: ("many", "resourceNames", "string"),
}  # fmt: skip
#: for each kind: what a field number holds: a name (of a string), or (how, name, of what)
_KINDS: dict[str, dict[int, Any]] = {
    "Namespace": {},
    "ServiceAccount": {},
    "ConfigMap": {2: ("map", "data", "string"), 3: ("map", "binaryData", "bytes")},
    "Secret": {2: ("map", "data", "bytes"), 3: "type", 4: ("map", "stringData", "string")},
    "RoleBinding": {2: ("many", "subjects", _SUBJECT), 3: ("one", "roleRef", _ROLE)},
    "Role": {2: ("many", "rules", _RULE)},
    "SelfSubjectAccessReview": {2: ("one", "spec", {1: ("one", "resourceAttributes", _ATTRIBUTES)})},
    "SelfSubjectReview": {},
    "DeleteOptions": {1: ("one", "gracePeriodSeconds", "number"), 4: "propagationPolicy"},
}


def decode(raw: bytes) -> dict[str, Any]:
    """Return the object of a body; ApiError 415 for a kind that is not decoded here."""
    if not raw.startswith(_MAGIC):
        raise ApiError(400, "the body is no protobuf of Kubernetes")
    envelope = dict(_fields(raw[4:]))
    kind = _message(envelope[1], {1: "apiVersion", 2: "kind"})
    if kind["kind"] not in _KINDS:
        raise ApiError(415, f"the double reads no protobuf of {kind['kind']}")
    layout = {**_KINDS[kind["kind"]]}
    if kind["kind"] != "DeleteOptions":
        layout[1] = ("one", "metadata", _META)
    return {**kind, **_message(envelope[2], layout)}


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(raw):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        elif tag & 7 == 2:
            length = number()
            yield tag >> 3, raw[at : at + length]
            at += length
        else:
            raise ApiError(415, f"the double reads no protobuf of wire type {tag & 7}")


def _value(raw: Any, what: Any) -> Any:
    if isinstance(what, dict):
        return _message(raw, what)
    if what == "number":
        return raw
    return raw.decode() if what == "string" else base64.b64encode(raw).decode()


def _message(raw: bytes, layout: dict[int, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number, value in _fields(raw):
        row = layout.get(number)
        if row is None:
            continue
        how, name, what = row if isinstance(row, tuple) else ("one", row, "string")
        if how == "many":
            made.setdefault(name, []).append(_value(value, what))
        elif how == "map":
            entry = dict(_fields(value))
            made.setdefault(name, {})[entry.get(1, b"").decode()] = _value(entry.get(2, b""), what)
        elif value not in (b"", 0) or what == "number":
            made[name] = _value(value, what)
    return made
