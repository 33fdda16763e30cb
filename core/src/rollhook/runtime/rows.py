"""The JSONL file of a verb that works through a list: rows appended as they come, read again on resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import Field, asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import orjson

from rollhook.durable import cannot_write, check_schema, write_all, write_atomic
from rollhook.errors import RunError

SCHEMA_VERSION = 1


class Row(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """Rows of one dataclass by `key`; of those that are there already, the ones to `keep` count.

    Raises RunError when the file cannot be written, or holds something else.
    """

    def __init__(
        self, path: Path, row: type[R], *, key: Callable[[R], str], keep: Callable[[R], bool]
    ) -> None:
        self.path = path
        self._key = key
        self.kept = {key(each): each for each in _read(path, row) if keep(each)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, b"".join(map(_line, self.kept.values())))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from error

    def add(self, row: R) -> None:
        """Append a row."""
        self.kept[self._key(row)] = row
        try:
            write_all(self._file.fileno(), _line(row))
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Row) -> bytes:
    return orjson.dumps({"schema": SCHEMA_VERSION, **asdict(row)}) + b"\n"


def _read(path: Path, kind: type[R]) -> list[R]:
    """Return the rows of a file, if there is one; a torn last line does not count."""
    if not os.path.exists(path):
        return []
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = dict(orjson.loads(line))
            check_schema(row.pop("schema"), SCHEMA_VERSION, path)
            rows.append(kind(**row))
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path}, line {number} is no row of this verb ({error}); name another file"
            ) from error
    return rows
