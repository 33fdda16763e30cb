"""The append-only journal of an attempt: what happened, in order, durable at commit points.

One JSON object per line: `{"data":{...},"event":"lease","seq":7,"time":1754000000.0,"crc":"89abcdef"}`.
`crc` is the CRC-32 of the line without the `crc` member. `seq` counts from 1 without gaps. The first entry
of every file is `journal` with the schema version. A torn tail, which a crash leaves, is dropped; damage
before the tail is an error that names the line. One writer; anyone may read while it is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollhook.durable import cannot_write, check_schema, from_json, fsync_directory, to_json, write_all
from rollhook.errors import RollhookError, RunError
from rollhook.failpoints import fail

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
#: what can be done about a journal that is damaged
WAY_OUT = "restore the file, or start a new run from a checkpoint of this one (checkpoint.load_from)"
_CRC_LENGTH = len(b',"crc":"00000000"}')


class JournalError(RunError):
    """A journal is damaged before its tail; `line` is the first bad line, counted from 1."""

    def __init__(self, message: str, *, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Entry:
    """One line of a journal; `time` is the writer's wall clock in epoch seconds, for people only."""

    seq: int
    event: str
    data: Mapping[str, Any]
    time: float


def encode(entry: Entry) -> bytes:
    """Return the line of an entry, newline included."""
    body = to_json({"seq": entry.seq, "event": entry.event, "data": entry.data, "time": entry.time})
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def decode(line: bytes) -> Entry | None:
    """Return the entry of a line without its newline; None when it is torn or damaged."""
    body, tail = line[:-_CRC_LENGTH] + b"}", line[-_CRC_LENGTH:]
    if tail != b',"crc":"%08x"}' % zlib.crc32(body):
        return None
    try:
        value = from_json(body)
        return Entry(int(value["seq"]), str(value["event"]), value["data"], float(value["time"]))
    except (ValueError, KeyError, TypeError):
        return None


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal in order, a torn tail dropped.

    Raises JournalError after the last good entry when damage is followed by further entries, and
    RunError when the file is not there or of a later schema.
    """
    for entry, _ in _scan(path):
        yield entry


def _scan(path: Path) -> Iterator[tuple[Entry, int]]:
    """Yield each entry with the offset of the byte behind it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; is this the directory of a run?") from error
    offset, due = 0, 1
    while (end := data.find(b"\n", offset)) >= 0:
        entry = decode(data[offset:end])
        if entry is None or entry.seq != due:
            _tail_or_damage(path, data, end + 1, due, entry)
            return
        if due == 1:
            _check_schema(path, entry)
        offset, due = end + 1, due + 1
        yield entry, offset


def _tail_or_damage(path: Path, data: bytes, offset: int, line: int, entry: Entry | None) -> None:
    """Return when nothing valid follows line `line` (a torn tail); else raise JournalError."""
    if entry is not None:
        raise JournalError(
            f"{path}, line {line}: entry {entry.seq} stands where {line} was due; lines are missing; "
            f"{WAY_OUT}",
            line=line,
        )
    if any(decode(rest) is not None for rest in data[offset:].split(b"\n")):
        raise JournalError(
            f"{path}, line {line}: the checksum does not fit; the file was changed after it was written "
            f"(entries before line {line} are good); {WAY_OUT}",
            line=line,
        )


def _check_schema(path: Path, entry: Entry) -> None:
    schema = entry.data.get("schema")
    if entry.event != "journal" or not isinstance(schema, int):
        raise JournalError(f"{path}, line 1: not a journal (no schema version)", line=1)
    check_schema(schema, SCHEMA_VERSION, path)


class Journal:
    """The one writer of a journal file; safe to use from the event loop and from threads.

    Lines are written and fsynced by a thread of their own. Whoever waits for durability shares the next
    fsync with all who came by then (group commit), so a wait is at most two fsyncs. After a failed write
    the file is cut back to its last good line and every further call raises the same RunError.
    `guard` is called before every write and raises when this process may no longer write.
    """

    def __init__(
        self,
        path: Path,
        *,
        header: Mapping[str, Any] | None = None,
        guard: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        self.path = path
        self._guard = guard
        self._clock = clock
        self._fsync = fsync
        self._wake = threading.Condition()
        self._lines: list[bytes] = []
        self._durable: Future[None] | None = None
        self._closing = self._closed = False
        self._error: RollhookError | None = None
        self._seq, self._size, self._fd = _open(path)
        if self._seq == 0:
            self.append("journal", schema=SCHEMA_VERSION, **(header or {}))
        self._thread = threading.Thread(target=self._run, name=f"journal {path.parent.name}", daemon=True)
        self._thread.start()

    @property
    def seq(self) -> int:
        """The number of the newest entry appended, durable or not."""
        return self._seq

    def append(self, event: str, /, **data: Any) -> int:
        """Add an entry and return its number; it becomes durable with the next commit.

        Raises RunError when the journal cannot be written (any more), TypeError for data that is no JSON.
        """
        with self._wake:
            return self._append(event, data)

    async def append_durable(self, event: str, /, **data: Any) -> int:
        """Add an entry and return its number once it is durable. Cancelled, the entry may stay."""
        with self._wake:
            seq = self._append(event, data)
            done = self._commit()
        await asyncio.shield(asyncio.wrap_future(done))
        return seq

    async def commit(self) -> None:
        """Return once everything appended so far is durable."""
        with self._wake:
            done = self._commit()
        await asyncio.shield(asyncio.wrap_future(done))

    def flush(self) -> None:
        """Block until everything appended so far is durable (for code without an event loop)."""
        with self._wake:
            done = self._commit()
        done.result()

    def close(self) -> None:
        """Make everything durable and close the file; safe to call twice. Raises what a write raised."""
        with self._wake:
            first, self._closing = not self._closing, True
            self._wake.notify()
        self._thread.join()
        if first:
            os.close(self._fd)
        if self._error is not None and first:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, event: str, data: Mapping[str, Any]) -> int:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise RunError(f"{self.path} is closed; nothing more is written by this attempt")
        line = encode(Entry(self._seq + 1, event, data, self._clock()))
        self._seq += 1
        self._lines.append(line)
        self._wake.notify()
        return self._seq

    def _commit(self) -> Future[None]:
        if self._error is not None:
            raise self._error
        if self._closed:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        if self._durable is None:
            self._durable = Future()
            self._wake.notify()
        return self._durable

    def _run(self) -> None:
        """Write what has gathered, one batch after the other, until closed or failed."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._lines or self._durable or self._closing)
                lines, self._lines = self._lines, []
                durable, self._durable = self._durable, None
                closing = self._closing
            try:
                self._write(b"".join(lines), durable is not None or closing)
            except RollhookError as error:
                self._fail(error, durable)
                return
            with self._wake:
                waiting = [durable, self._durable if closing else None]
                self._closed = closing
            for future in waiting:
                if future is not None:
                    future.set_result(None)
            if closing:
                return

    def _write(self, data: bytes, durable: bool) -> None:
        if self._guard is not None and data:
            self._guard()
        fail("journal.before_write")
        try:
            write_all(self._fd, data)
            if durable:
                fail("journal.before_fsync")
                self._fsync(self._fd)
                fail("journal.after_fsync")
        except OSError as error:
            self._cut_back()
            raise cannot_write(self.path, error) from error
        self._size += len(data)

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:  # readers drop the torn tail all the same
            logger.warning("%s keeps a torn tail: %s", self.path, error.strerror)

    def _fail(self, error: RollhookError, durable: Future[None] | None) -> None:
        logger.error("%s", error)
        with self._wake:
            self._error = error
            waiting = [durable, self._durable]
            self._lines, self._durable = [], None
        for future in waiting:
            if future is not None:
                future.set_exception(error)


def _open(path: Path) -> tuple[int, int, int]:
    """Open a journal for appending, its torn tail cut off: (newest number, size in bytes, descriptor)."""
    seq = size = 0
    if path.exists():
        for entry, end in _scan(path):
            seq, size = entry.seq, end
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(fd, size)
        fsync_directory(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    return seq, size, fd
