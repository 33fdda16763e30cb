"""Legacy spellings of task.toml; one that contradicts its new spelling is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

Path = Sequence[str | int]


def environments(raw: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the tables of a raw task.toml that describe a box, with their paths."""
    steps = raw.get("steps")
    paths: list[Path] = [["environment"], ["verifier", "environment"]]
    paths += [
        ["steps", n, "verifier", "environment"] for n in range(len(steps) if isinstance(steps, list) else 0)
    ]
    found = []
    for path in paths:
        table: Any = raw
        for part in path:
            if isinstance(part, int):
                table = table[part]
            else:
                table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict):
            found.append((path, table))
    return found


def take_legacy(raw: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Rewrite legacy spellings in place; yield (key, reason) of conflicts."""
    if "version" in raw:
        yield from _rewrite(raw, [], "version", "schema_version", raw.pop("version"))
    for path, table in environments(raw):
        yield from _environment(path, table)


def _environment(path: Path, table: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in table:
            value = table.pop(old)
            megabytes = _megabytes(value)
            if megabytes is None:
                yield [*path, old], f"{value!r} is not a size such as '512M' or '2G'"
            else:
                yield from _rewrite(table, path, old, new, megabytes)
    if "allow_internet" in table:
        allowed = table.pop("allow_internet")
        if not isinstance(allowed, bool):
            yield [*path, "allow_internet"], f"{allowed!r} is neither true nor false"
        else:
            mode = "public" if allowed else "no-network"
            yield from _rewrite(table, path, "allow_internet", "network_mode", mode)


def _rewrite(table: dict[str, Any], path: Path, old: str, new: str, value: Any) -> Iterator[tuple[Path, str]]:
    if table.setdefault(new, value) != value:
        name = ".".join(str(part) for part in [*path, new])
        yield [*path, old], f"says {value!r} where {name} says {table[new]!r}; keep one"


def _megabytes(size: Any) -> int | None:
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", size.strip(), re.I) if isinstance(size, str) else None
    )
    if match is None:
        return None
    scale = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]
    megabytes = float(match[1]) * scale
    return max(1, math.ceil(megabytes)) if math.isfinite(megabytes) else None
