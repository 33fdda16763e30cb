"""Small writes that survive a crash: fsync of directories, atomic files, and words for a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

import orjson

from rollhook.errors import RunError
from rollhook.failpoints import fail

_WORDS = {
    errno.ENOSPC: ("no space is left on the device", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or set storage.root elsewhere"),
    errno.EACCES: ("permission denied", "give this user write access, or set storage.root elsewhere"),
    errno.EPERM: ("operation not permitted", "give this user write access, or set storage.root elsewhere"),
}


def cannot_write(path: Path, error: OSError) -> RunError:
    """Return the error that says why `path` cannot be written and what to do."""
    why, remedy = _WORDS.get(error.errno or 0, (error.strerror or str(error), "look at the file system"))
    return RunError(f"{path} cannot be written: {why}; what is there is intact; {remedy}, then run again")


def check_schema(schema: int, newest: int, path: Path) -> None:
    """Raise RunError for a file of a later schema than `newest`, the one that this version writes."""
    if schema > newest:
        raise RunError(f"{path} has schema {schema}, this Rollhook reads up to {newest}; upgrade rollhook")


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    """Make every regular file and directory below `root` durable, `root` included."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        fsync_directory(Path(directory))


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new bytes, and the new ones are durable.

    Raises RunError when the disk is full or not writable; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fail("durable.before_write")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        fail("durable.before_rename")
        os.replace(temporary, path)
        fail("durable.after_rename")
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only file system refuses this too
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a file descriptor, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def to_json(value: Any, *, indent: bool = False) -> bytes:
    """Return JSON with sorted keys, so that the same data gives the same bytes.

    Takes numpy numbers, text with lone surrogates and integers of any size; an object that has no form in
    JSON becomes its `repr`.
    """
    option = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return json.dumps(value, sort_keys=True, default=_plain, indent=2 if indent else None).encode()


def from_json(data: bytes) -> Any:
    """Return what `to_json` was given; ValueError for what is no JSON."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)
