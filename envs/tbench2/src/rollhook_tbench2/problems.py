"""What is wrong with a task's files: file, key, line and reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskProblem:
    """One thing wrong with a task; `line` 0 means that the file as a whole is meant."""

    file: str
    key: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}: {self.reason}" if self.key else f"{where}: {self.reason}"


def line_of(text: str, path: Sequence[str | int]) -> int:
    """Return the line of a TOML key, or of the nearest table that holds it; 0 if there is none.

    `path` is as pydantic gives it: names, and an index behind the name of an array of tables.
    """
    names = [str(part) for part in path if isinstance(part, str)]
    index = next((part for part in path if isinstance(part, int)), 0)
    table: list[str] = []
    entries, nearest, depth = 0, 0, 0
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$", line):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            entries += line.lstrip().startswith("[[") and table == names[: len(table)]
            found = table
        elif assignment := re.match(r"\s*([\w\-.\"']+)\s*=", line):
            found = table + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        matches = found == names[: len(found)] and (entries == 0 or entries == index + 1)
        if matches and len(found) > depth:
            nearest, depth = number, len(found)
    return nearest


def impossible(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str]]:
    """Yield where a value, or the name of a key, is none that can be used, and why."""
    if isinstance(value, str) and "\0" in value:
        yield path, "holds the character NUL, which no program can be given"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, "is no number of 64 bits, which is what TOML has"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from impossible(name, path)
            yield from impossible(inner, [*path, name])
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from impossible(inner, [*path, number])
