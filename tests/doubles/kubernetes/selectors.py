"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from doubles.kubernetes.errors import ApiError

Object = dict[str, Any]
Test = Callable[[Object], bool]

_SET = re.compile(r"\s*(?P<key>[^\s,=!()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^)]*)\)\s*")
_FIELDS = {
    "metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "type", "involvedObject.kind",
    "reason",
    "involvedObject.name", "involvedObject.namespace", "involvedObject.uid", "spec.serviceAccountName",
}  # fmt: skip


def labels(text: str) -> Test:
    """Return the test of a label selector; 400 for one that is none."""
    tests: list[Callable[[dict[str, str]], bool]] = []
    rest = text
    while rest.strip(" ,"):
        rest = rest.lstrip(" ,")
        if found := _SET.match(rest):
            key, values = found["key"], {each.strip() for each in found["values"].split(",")}
            if found["how"] == "in":
                tests.append(lambda have, key=key, values=values: have.get(key) in values)  # type: ignore[misc]
            else:
                tests.append(lambda have, key=key, values=values: have.get(key) not in values)  # type: ignore[misc]
            rest = rest[found.end() :]
            continue
        term, _, rest = rest.partition(",")
        tests.append(_term(term.strip(), text))
    return lambda each: all(test(each["metadata"].get("labels") or {}) for test in tests)


def _term(term: str, text: str) -> Callable[[dict[str, str]], bool]:
    for sign in ("!=", "==", "="):
        if sign in term:
            key, _, value = (part.strip() for part in term.partition(sign))
            if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?", key):
                break
            if sign == "!=":
                return lambda have: have.get(key) != value
            return lambda have: have.get(key) == value
    else:
        if re.fullmatch(r"!?[A-Za-z0-9][-A-Za-z0-9_./]*", term):
            return (lambda have: term[1:] not in have) if term[0] == "!" else (lambda have: term in have)
    raise ApiError(400, f'unable to parse requirement: found {term!r} in "{text}"')


def by_labels(wanted: dict[str, str]) -> Test:
    """Return the test of `matchLabels`."""
    return lambda each: wanted.items() <= (each["metadata"].get("labels") or {}).items()


def fields(text: str) -> Test:
    """Return the test of a field selector; 400 for a field that none is made for."""
    tests: list[Test] = []
    for term in filter(None, (each.strip() for each in text.split(","))):
        found = re.fullmatch(r"([A-Za-z.]+)(!=|==|=)(.*)", term)
        if found is None or found[1] not in _FIELDS:
            raise ApiError(400, f'field label not supported: "{found[1] if found else term}"')
        path, unlike, value = found[1].split("."), found[2] == "!=", found[3]

        def test(each: Object, path: list[str] = path, unlike: bool = unlike, value: str = value) -> bool:
            have: Any = each
            for name in path:
                have = have.get(name) if isinstance(have, dict) else None
            return ((have or "") == value) != unlike

        tests.append(test)
    return lambda each: all(test(each) for test in tests)
