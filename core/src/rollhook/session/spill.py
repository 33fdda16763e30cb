"""Bytes that are seldom read, on disk in place of memory."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spilled:
    """Some bytes in a segment of a spill file; the segment lives as long as one of them."""

    segment: _Segment
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes; OSError when the disk fails."""
        data = os.pread(self.segment.file, self.size, self.offset)
        if len(data) != self.size:
            raise OSError(f"{len(data)} bytes of {self.size} could be read back from a spill file")
        return data


class Spill:
    """Writes bytes into files without a name: they are gone with what refers to them, or with the process.

    `directory` is made when first needed; default: the system's for temporary files.
    """

    def __init__(self, directory: Path | None = None, segment_bytes: int = 64 << 20) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segment: _Segment | None = None
        self._failed = False

    def write(self, data: bytes) -> Spilled | None:
        """Put bytes on disk; None, told once, where that cannot be done and they are to stay in memory."""
        try:
            if self._segment is None or self._segment.size >= self._segment_bytes:
                self._segment = _Segment(self._directory)
            return self._segment.append(data)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "records of sessions stay in memory, for they cannot be spilled to disk: %s", error
                )
            self._failed = True
            return None


class _Segment:
    """One file; closed, and with that deleted, once nothing refers to it."""

    def __init__(self, directory: Path | None) -> None:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self.file, name = tempfile.mkstemp(prefix="sessions-", dir=directory)
        weakref.finalize(self, os.close, self.file)
        os.unlink(name)
        self.size = 0

    def append(self, data: bytes) -> Spilled:
        offset, left = self.size, memoryview(data)
        while left:
            left = left[os.pwrite(self.file, left, offset + len(data) - len(left)) :]
        self.size += len(data)
        return Spilled(self, offset, len(data))
