"""Weights on their way to the engines: durable directories, one per version, and the update itself."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from rollhook.durable import cannot_write, fsync_directory, fsync_tree, write_atomic
from rollhook.errors import EngineError, RunError
from rollhook.failpoints import fail
from rollhook.router import Worker

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MARKER = "COMPLETE.json"
_NAME = re.compile(r"v(\d{6,})")
_KEPT = 2


class WeightControl(Protocol):
    """What an update asks of the engine client."""

    async def pause(self, worker: Worker, mode: str = ...) -> None:
        """Stop generating."""

    async def continue_(self, worker: Worker) -> None:
        """Go on generating."""

    async def update_weights_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load weights."""

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the version in service."""


class WeightStore:
    """Weight directories `v000012` under one directory, complete once they hold their marker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def new(self, version: int) -> Path:
        """Return a new, empty directory for a version; what a crash left under that name is removed.

        Raises EngineError when that version is complete already: a version is published once. RunError, here
        and in `commit`, when the disk is full or not writable.
        """
        path = self.path(version)
        if (path / MARKER).exists():
            raise EngineError(f"weight version {version} was published before, in {path}")
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        fail("weights.after_new")
        return path

    def commit(self, path: Path, version: int) -> None:
        """Make every byte of `path` durable, then mark it complete. Blocks; call it off the loop."""
        try:
            (path / MARKER).unlink(missing_ok=True)  # a trainer may copy all that it was set up from
            fsync_tree(path)
            fsync_directory(self.directory)
            fail("weights.before_marker")
            write_atomic(path / MARKER, orjson.dumps({"schema": SCHEMA_VERSION, "version": version}))
            fail("weights.after_marker")
        except OSError as error:
            raise cannot_write(path, error) from error

    def path(self, version: int) -> Path:
        """Return where a version is or would be."""
        return self.directory / f"v{version:06d}"

    def complete(self) -> list[int]:
        """Return the complete versions, ascending."""
        return sorted(version for version, path in self._versions() if (path / MARKER).exists())

    def newest(self) -> tuple[int, Path] | None:
        """Return the newest complete version and its directory."""
        versions = self.complete()
        return (versions[-1], self.path(versions[-1])) if versions else None

    def prune(self, in_use: Collection[int] = ()) -> list[int]:
        """Remove all but the newest two complete versions and those in use; return what went.

        An incomplete directory goes too once a newer version is complete: it is a crash's leftover. Raises
        RunError when one cannot be removed.
        """
        complete = self.complete()
        keep = set(complete[-_KEPT:]) | set(in_use)
        newest = complete[-1] if complete else -1
        gone = []
        for version, path in self._versions():
            if version in keep or version > newest:
                continue
            self._remove(path)
            gone.append(version)
        return sorted(gone)

    def _remove(self, path: Path) -> None:
        """Remove a directory; its marker goes first, so that half of one never looks complete."""
        try:
            if (path / MARKER).exists():
                (path / MARKER).unlink()
                fsync_directory(path)
            fail("weights.amid_removal")
            shutil.rmtree(path)
        except OSError as error:
            raise RunError(f"{path} cannot be removed: {error.strerror}") from error

    def _versions(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return [(int(match[1]), path) for match, path in found if match and path.is_dir()]


async def update_workers(
    client: WeightControl, workers: Sequence[Worker], path: Path, version: int, mode: str = "in_place"
) -> dict[Worker, str]:
    """Bring every engine to a version: pause, update, verify the version, continue.

    Engines are updated at once, each base URL once however many ranks it has. An engine that fails in
    any step is told to continue all the same. Returns the workers of the engines that failed, with the
    reason; the caller takes them out of the routing.
    """
    engines: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        engines[worker.url].append(worker)
    reasons = await asyncio.gather(
        *(_update_engine(client, Worker(url), path, version, mode) for url in engines)
    )
    failed = {}
    for (url, ranks), reason in zip(engines.items(), reasons, strict=True):
        if reason:
            log.error("engine %s did not get weight version %d: %s", url, version, reason)
            failed.update(dict.fromkeys(ranks, reason))
    return failed


async def _update_engine(client: WeightControl, engine: Worker, path: Path, version: int, mode: str) -> str:
    """Return why the update failed, or an empty string."""
    reason = ""
    try:
        await client.pause(engine, mode)
        await client.update_weights_from_disk(engine, path, version)
        served = await client.weight_version(engine)
        if served != version:
            reason = f"it serves version {served} after the update"
    except EngineError as error:
        reason = str(error)
    finally:
        try:
            await client.continue_(engine)
        except EngineError as error:
            reason = reason or str(error)
    return reason
