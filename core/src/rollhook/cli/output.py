"""Plain text and JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer


def table(rows: Iterable[Sequence[str]], *, indent: str = "") -> None:
    """Print rows with columns as wide as they need; the last one is not padded."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))] if lines else []
    for row in lines:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        typer.echo(indent + "  ".join([*padded, row[-1]]).rstrip())


def as_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
