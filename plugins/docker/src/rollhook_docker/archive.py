"""One file as a tar, which is how the engine takes and gives files."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rollhook.errors import SandboxError

_PIECE = 1 << 20
_INLINE = 1 << 20
#: Docker writes standard base64, Podman that for URLs
_STANDARD = str.maketrans("-_", "+/")
# mode bits as Go's fs.FileMode has them
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19


@dataclass(frozen=True)
class Stat:
    """What the engine says of a path; `target` where a link leads, within the container."""

    mode: int
    size: int
    target: str

    @classmethod
    def parse(cls, header: str) -> Stat:
        """Read the header X-Docker-Container-Path-Stat. Raises ValueError, KeyError, TypeError."""
        data = json.loads(base64.b64decode(header.translate(_STANDARD)))
        return cls(int(data["mode"]), int(data["size"]), str(data.get("linkTarget") or ""))

    @property
    def directory(self) -> bool:
        """Whether it is a directory."""
        return bool(self.mode & _DIRECTORY)

    @property
    def link(self) -> bool:
        """Whether it is a symbolic link."""
        return bool(self.mode & _SYMLINK)

    @property
    def special(self) -> bool:
        """Whether it is a device, a FIFO, a socket or something else that is not read."""
        return bool(self.mode & _SPECIAL)


async def packed(path: str, data: bytes, mode: int) -> AsyncIterator[bytes]:
    """Yield the tar of one file that belongs to root, under its absolute path."""
    member = tarfile.TarInfo(path.lstrip("/"))
    member.size, member.mode = len(data), mode
    yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        yield bytes(view[start : start + _PIECE])
    yield bytes(-len(data) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


async def unpacked(path: str, archive: bytearray) -> bytes:
    """Return the content of the one regular file in a tar, whose end may be missing.

    The engine breaks a tar off when the file grew while it was read. Raises SandboxError.
    """
    if len(archive) > _INLINE:
        return await asyncio.to_thread(_content, path, archive)
    return _content(path, archive)


def _content(path: str, archive: bytearray) -> bytes:
    head = memoryview(archive)[:_PIECE]  # copying all of a large one would hold every thread up
    try:
        with tarfile.open(
            fileobj=io.BytesIO(head), mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            member = tar.next()
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise SandboxError(f"{path}: the container engine sent a broken archive: {error}") from error
    if member is None or not member.isreg():
        raise SandboxError(f"{path} is not a regular file", kind="user")
    start, end = member.offset_data, member.offset_data + member.size
    if len(archive) < end:
        raise SandboxError(f"{path}: the container engine sent only part of it", kind="retryable")
    return bytes(memoryview(archive)[start:end])
