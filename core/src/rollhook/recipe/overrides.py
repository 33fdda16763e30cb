"""Overrides of the command line: `key.path=value`, `+key=value`, `~key`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rollhook.recipe import paths
from rollhook.recipe.problem import Problem
from rollhook.recipe.reading import read_value

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.([A-Za-z_][\w-]*|\d+)|\[\d+\])*")
_HINT = "overrides are key.path=value, +key.path=value (add) and ~key.path (delete)"


@dataclass(frozen=True)
class Override:
    """One parsed override; `text` is what was typed."""

    action: Literal["set", "add", "delete"]
    path: paths.Path
    value: Any
    text: str


def parse(text: str) -> Override | Problem:
    """Parse one override; the value is read as YAML, so `a=[1, x]` is a list and `a=null` nothing."""
    action: Literal["set", "add", "delete"] = "set"
    rest = text
    if text[:1] in {"+", "~"}:
        action = "add" if text[0] == "+" else "delete"
        rest = text[1:]
    key, equals, value = rest.partition("=")
    shown = text if "=" not in text else text.partition("=")[0] + "=..."
    if not _KEY.fullmatch(key):
        return Problem("", f"{shown!r} does not start with a key path", "command line", hint=_HINT)
    if action == "delete" and equals:
        return Problem(key, "is deleted by ~ and given a value at once", "command line", hint=_HINT)
    if action != "delete" and not equals:
        return Problem(key, "has no value", "command line", hint=_HINT)
    path = paths.parse(key.replace("[", ".").replace("]", ""))
    if action == "delete":
        return Override(action, path, None, text)
    try:
        return Override(action, path, read_value(value), text)
    except ValueError as error:
        reason = str(error).removeprefix("is not YAML: ")
        return Problem(
            key, f"has a value that is not YAML: {reason}", "command line", hint="quote it: key='\"text\"'"
        )
