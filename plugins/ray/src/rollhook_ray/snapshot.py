"""Snapshots of code on shared storage: `<root>/common/code/<name>/<id>/`, chosen per job by PYTHONPATH.

A snapshot never changes. It is the tree without version control and caches, a module `mvp_marker` that says
which one it is, and a record with the hash of what was copied.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from rollhook.durable import cannot_write, fsync_tree, to_json
from rollhook.errors import UsageError

MARKER = "mvp_marker"
RECORD = ".rollhook-snapshot.json"
SHARED_ROOT = "/private"
#: what a tree may hold that is no code: version control, caches, environments
_SKIPPED = {
    *(".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
    *(".tox", ".nox", ".venv", "node_modules", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store"),
    *(f"{MARKER}.py", RECORD),
}
_SKIPPED_ENDINGS = (".pyc", ".pyo", ".swp")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
#: bytes hashed and copied at once
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is there: `path` goes on PYTHONPATH, `digest` is the SHA-256 of the tree behind it."""

    path: Path
    name: str
    id: str
    digest: str
    files: int
    bytes: int
    written: bool


def take(source: Path, code_id: str, *, name: str = "verl", root: str | Path = SHARED_ROOT) -> Snapshot:
    """Copy the tree at `source`, which holds the package or module `name`, below `root`; return the snapshot.

    The same tree again changes nothing. Raises UsageError for another tree under the same id, for a tree
    without `name`, for links that lead out of it and for special files, and RunError when `root` cannot be
    written. Atomic: it is written beside its place and renamed.
    """
    _check_names(name, code_id)
    source = source.expanduser().resolve()
    _check_source(source, name)
    place = Path(os.path.abspath(Path(root).expanduser())) / "common" / "code" / name / code_id
    if place.resolve().is_relative_to(source):
        raise UsageError(f"{place} lies within {source}; give a --root outside of it")
    entries = list(_entries(source))
    digest = _digest(source, entries)
    sizes = [os.lstat(source / entry).st_size for entry in entries if not (source / entry).is_symlink()]
    found = Snapshot(place, name, code_id, digest, len(entries), sum(sizes), written=False)
    if place.exists():
        return _same(place, found)
    record = {"schema": 1, "name": name, "id": code_id, "digest": digest, "files": found.files}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _beside(place) as temporary:
            _copy(source, temporary, entries)
            (temporary / f"{MARKER}.py").write_text(f"MARKER = {code_id!r}\n")
            (temporary / RECORD).write_bytes(to_json(record | {"bytes": found.bytes}, indent=True) + b"\n")
            if _digest(source, list(_entries(source))) != digest:
                raise UsageError(f"{source} changed while it was copied; try again when nothing writes there")
            fsync_tree(temporary)
            try:
                temporary.rename(place)
            except OSError:
                if not place.exists():
                    raise
                return _same(place, found)  # another process was faster
    except OSError as error:
        raise cannot_write(place, error) from error
    return Snapshot(place, name, code_id, digest, found.files, found.bytes, written=True)


def read_record(path: str | Path) -> dict[str, object]:
    """Return the record of the snapshot at a path; empty where there is none."""
    try:
        value = orjson.loads((Path(path) / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _same(place: Path, wanted: Snapshot) -> Snapshot:
    there = read_record(place).get("digest")
    if there == wanted.digest and _digest(place, list(_entries(place))) == there:
        return wanted
    if there == wanted.digest:
        raise UsageError(f"{place} was changed since it was taken; take it again under another --id")
    what = "another snapshot is there" if there else "something that is no snapshot is there"
    raise UsageError(f"{place}: {what}, and a snapshot never changes; choose another --id")


def _check_names(name: str, code_id: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a Python package; write e.g. --name verl")
    if not _ID.fullmatch(code_id):
        proposal = re.sub(r"[^A-Za-z0-9._-]+", "-", code_id).strip("-._")[:63] or "codeA"
        raise UsageError(
            f"{code_id!r} is no id of a snapshot (1 to 63 of A-Z, a-z, 0-9, '.', '_', '-'); try {proposal!r}"
        )


def _check_source(source: Path, name: str) -> None:
    if not source.is_dir():
        raise UsageError(f"{source} is no directory; give the one that holds the package {name}")
    if (source / name).is_dir() or (source / f"{name}.py").is_file():
        return
    parent = source.name == name and (source / "__init__.py").is_file()
    way = f"give its parent {source.parent}" if parent else f"give the directory above {name}/, or --name"
    raise UsageError(f"{source} holds no package or module {name}; {way}")


def _entries(source: Path) -> Iterator[str]:
    """Yield the relative paths of files and links, in order. Raises UsageError for what cannot be copied."""
    for directory, folders, names in os.walk(source):
        links = [each for each in folders if os.path.islink(os.path.join(directory, each))]
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and each not in links)
        for name in sorted([*names, *links]):
            path = Path(directory, name)
            if name in _SKIPPED or name.endswith(_SKIPPED_ENDINGS):
                continue
            relative = str(path.relative_to(source))
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                target = os.readlink(path)
                inside = not os.path.isabs(target) and path.resolve().is_relative_to(source)
                if not inside:
                    raise UsageError(f"{path} is a link out of the tree; replace it by what it points to")
            elif not stat.S_ISREG(mode):
                raise UsageError(f"{path} is neither file nor directory; remove it")
            yield relative


def _digest(source: Path, entries: list[str]) -> str:
    """Return the SHA-256 over path, kind, executability and content of every entry."""
    total = hashlib.sha256()
    for relative in entries:
        path = source / relative
        if path.is_symlink():
            kind, content = b"link", os.readlink(path).encode("utf-8", "surrogateescape")
        else:
            kind = b"exec" if path.stat().st_mode & stat.S_IXUSR else b"file"
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
        name = relative.encode("utf-8", "surrogateescape")
        total.update(b"%d %s %s %d %s\n" % (len(name), name, kind, len(content), content))
    return total.hexdigest()


def _copy(source: Path, target: Path, entries: list[str]) -> None:
    for relative in entries:
        destination = target / relative
        destination.parent.mkdir(parents=True, exist_ok=True)
        if (source / relative).is_symlink():
            destination.symlink_to(os.readlink(source / relative))
        else:
            shutil.copy(source / relative, destination)


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """Give a directory beside `place` to be renamed to it; what is left of it is removed."""
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
