"""The JSONL file of a verb that works through a list: rows appended as they come, read again on resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import orjson

from rollhook.durable import cannot_write

SCHEMA_VERSION = 1


class Row(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """Rows of one dataclass by `key`; of those that are there already, the ones to `keep` count.

    Raises RunError when the file cannot be written.
    """

    def __init__(
        self, path: Path, row: type[R], *, key: Callable[[R], str], keep: Callable[[R], bool]
    ) -> None:
        self.path = path
        self._key = key
        self.kept = {key(each): each for each in _read(path, row) if keep(each)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(b"".join(map(_line, self.kept.values())))
            temporary.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from error

    def add(self, row: R) -> None:
        """Append a row."""
        self.kept[self._key(row)] = row
        try:
            self._file.write(_line(row))
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Row) -> bytes:
    return orjson.dumps({"schema": SCHEMA_VERSION, **asdict(row)}) + b"\n"


def _read(path: Path, kind: type[R]) -> list[R]:
    """Return the whole rows of a file; a torn last line and rows of another form do not count."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            row: dict[str, Any] = orjson.loads(line)
            row.pop("schema")
            rows.append(kind(**row))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return rows
