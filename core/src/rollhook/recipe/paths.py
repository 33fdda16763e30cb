"""Key paths: `sandbox.create_concurrency`, `environment.0.split`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]


def text(path: Path) -> str:
    """Return a path as people write it."""
    return ".".join(str(part) for part in path)


def parse(key: str) -> Path:
    """Return the path that `text` writes as `key`; all-digit parts are indexes."""
    return tuple(int(part) if part.isdigit() else part for part in key.split(".")) if key else ()


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every scalar below a value with its path; an empty mapping or list counts as one."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def get(value: Any, path: Path) -> Any:
    """Return what is at a path; KeyError where there is nothing."""
    for part in path:
        inside = isinstance(value, Mapping) and part in value
        inside = inside or (isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value))
        if not inside:
            raise KeyError(text(path))
        value = value[part]
    return value


def replace(value: Any, path: Path, new: Any) -> None:
    """Put `new` at a path whose parent exists."""
    get(value, path[:-1])[path[-1]] = new


def below(path: Path, prefix: Path) -> bool:
    """Return whether a path is `prefix` or inside it."""
    return path[: len(prefix)] == prefix
