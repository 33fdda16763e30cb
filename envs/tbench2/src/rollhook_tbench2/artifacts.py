"""What a task keeps of a sandbox: collected within limits, and given to a separate verifier as it was."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox
from rollhook_tbench2.task_toml import Artifact

MANIFEST = "manifest.json"
#: seconds that collecting one entry may take
_SECONDS = 120.0


@dataclass
class Collected:
    """One entry of the manifest: `path` below the episode's artifacts, `reason` why it is not there."""

    source: str
    path: str
    kind: Literal["file", "directory", ""] = ""
    files: int = 0
    bytes: int = 0
    skipped: int = 0
    reason: str = ""


async def collect(box: Sandbox, entries: Sequence[Artifact], target: Path, limit: int) -> list[Collected]:
    """Fetch every entry into `target`, together at most `limit` bytes, and write the manifest.

    The sandbox may be hostile: nothing is written outside `target`, special files and links that lead out are
    left out and counted. What is missing or too large is said in its entry and spoils no other; only
    SandboxDead is raised.
    """
    await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
    found: list[Collected] = []
    for entry in entries:
        row = Collected(entry.source, str(entry.place))
        found.append(row)
        if other := next((f for f in found[:-1] if f.kind and _overlap(f.path, row.path)), None):
            row.reason = f"{other.source} was put there first"
            continue
        left = limit - sum(each.bytes for each in found)
        try:
            async with asyncio.timeout(_SECONDS):
                await _fetch(box, entry, target / entry.place, left, row)
        except SandboxDead:
            raise
        except (OSError, SandboxError, TimeoutError) as error:
            row.reason = _reason(error, left)
            await asyncio.to_thread(_clear, target / entry.place)
    manifest = json.dumps([asdict(row) for row in found], indent=1) + "\n"
    await asyncio.to_thread((target / MANIFEST).write_text, manifest)
    return found


async def deliver(box: Sandbox, rows: Sequence[Collected], target: Path) -> None:
    """Put what was collected into another box, each entry where it came from, in place of what is there."""
    for row in rows:
        if not row.kind:
            continue
        await box.remove([row.source])
        if row.kind == "directory":
            await box.upload_dir(target / row.path, row.source)
        else:
            path = target / row.path
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            await box.write(row.source, await asyncio.to_thread(path.read_bytes), mode=mode)


async def _fetch(box: Sandbox, entry: Artifact, path: Path, limit: int, row: Collected) -> None:
    await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
    try:
        report = await box.download_dir(entry.source, path, limit=limit)
    except NotADirectoryError:
        data = await box.read(entry.source, limit=limit)
        await asyncio.to_thread(path.write_bytes, data)
        row.kind, row.files, row.bytes = "file", 1, len(data)
        return
    dropped = await asyncio.to_thread(_exclude, path, entry.exclude)
    row.kind, row.files, row.bytes = "directory", report.files - dropped, report.bytes
    row.skipped = len(report.skipped)


def _exclude(root: Path, patterns: Sequence[str]) -> int:
    """Remove what matches a pattern, as tar's --exclude does: at any depth, `*` also across slashes."""
    dropped = 0
    for path in sorted(root.rglob("*"), reverse=True) if patterns else ():
        name = path.relative_to(root).as_posix()
        tails = ["/".join(name.split("/")[n:]) for n in range(name.count("/") + 1)]
        if any(fnmatchcase(tail, pattern.rstrip("/")) for tail in tails for pattern in patterns):
            inside = [each for each in path.rglob("*") if not each.is_dir()] if path.is_dir() else [path]
            dropped += len(inside)
            _clear(path)
    return dropped


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _overlap(one: str, other: str) -> bool:
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first == second or first in second.parents or second in first.parents


def _reason(error: Exception, left: int) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    if isinstance(error, TimeoutError):
        return f"collecting it took longer than {_SECONDS:g} s"
    if isinstance(error, SandboxError) and error.kind == "user":
        return f"it is larger than the {left} bytes that are left, or no regular file: {error}"
    return str(error)
