"""Digests of what a run reads: plain data, tasks, files and directories."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook import packs
from rollhook.durable import write_atomic
from rollhook.errors import RollhookError

if TYPE_CHECKING:
    from rollhook.environment import Task

#: digests of files above this size are kept, with size and time, so that weights are read once
_LARGE = 16 * 1024**2
_MOST_KEPT = 4096


def digest_tasks(tasks: Sequence[Task]) -> str:
    """Return the digest of a split: ids and contents of its tasks, in its order."""
    return digest_of([[task.id, task.digest] for task in tasks])


def digest_of(data: Any) -> str:
    """Return the digest of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest_files(path: Path) -> str | None:
    """Return the digest of a file's content, or of the names and contents below a directory.

    None where there is nothing. Hidden files do not count. Digests of large files are kept in the user's
    cache and taken from there while size and time of the file stay the same.
    """
    from concurrent.futures import ThreadPoolExecutor

    files = {"": path} if path.is_file() else dict(_files(path))
    kept = _Kept(packs.cache_directory() / "digests.json")
    try:
        with ThreadPoolExecutor(4) as pool:
            contents = list(pool.map(kept.digest, files.values()))
    except OSError:
        return None
    kept.save()
    return digest_of(dict(zip(files, contents, strict=True))) if files else None


class _Kept:
    """Digests of large files, by path, size and time, in one JSON file that may be lost at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, str] = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            self._known = {}
        self._new: dict[str, str] = {}

    def digest(self, file: Path) -> str:
        about = file.stat()
        key = f"{file.resolve()}:{about.st_size}:{about.st_mtime_ns}"
        if key in self._known:
            return self._known[key]
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if about.st_size >= _LARGE:
            self._new[key] = digest
        return digest

    def save(self) -> None:
        if not self._new:
            return
        kept = dict(list((self._known | self._new).items())[-_MOST_KEPT:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(kept).encode())
        except (OSError, RollhookError):
            return  # a cache: the next run reads the files again


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    for place, below, names in os.walk(directory, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(directory).as_posix(), path
