"""The run's own metrics: one JSON object per line, whole lines only, shared by the attempts of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rollhook.durable import cannot_write, check_schema, to_json, write_all
from rollhook.errors import RunError
from rollhook.failpoints import fail

SCHEMA_VERSION = 1


class MetricsWriter:
    """Appends rows `{schema, step, attempt, time, <metric>: value, ...}` to a file.

    A line is there wholly or not at all: what a crash cut off is removed when the file is opened again,
    what a full disk cut off at once. Not a number is written as null. `guard` is called before every row and
    raises when this process may no longer write.
    """

    def __init__(
        self,
        path: Path,
        *,
        guard: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._guard = guard
        self._clock = clock
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = _whole_lines(self._fd)
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
        """Append one row; raises RunError when it cannot be written, and the file is intact."""
        row: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
        row |= {"schema": SCHEMA_VERSION, "step": step, "attempt": attempt, "time": self._clock()}
        line = to_json(row) + b"\n"
        self._guard()
        fail("metrics.before_row")
        try:
            write_all(self._fd, line)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise cannot_write(self.path, error) from error
        fail("metrics.after_row")
        self._size += len(line)

    def close(self) -> None:
        """Make the file durable and close it; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file; a torn last line is dropped.

    Raises RunError for any other bad line, and for one of a later schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = orjson.loads(line)
            check_schema(row["schema"], SCHEMA_VERSION, path)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}, line {number}: not a row of metrics ({error})") from error
        yield row


def _whole_lines(fd: int) -> int:
    """Return the size of a file up to its last newline."""
    size = os.fstat(fd).st_size
    while size:
        start = max(0, size - 65536)
        found = os.pread(fd, size - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0
