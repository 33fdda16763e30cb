"""Plain text and JSON on stdout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from rollhook.terminal import one_line


def table(rows: Iterable[Sequence[str]], *, indent: str = "") -> None:
    """Print rows with columns as wide as they need; the last one is not padded."""
    lines = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))] if lines else []
    for row in lines:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        typer.echo(indent + "  ".join([*padded, row[-1]]).rstrip())


def as_json(value: Any) -> None:
    """Print a value as JSON: what is not finite is null, an object without a form in JSON its text."""
    import json

    import orjson

    try:
        text = orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # lone surrogates, integers of more than 64 bits
        text = json.dumps(_finite(value), indent=2, default=str)
    typer.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
