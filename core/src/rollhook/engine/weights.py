"""Weights on their way to the engines: durable directories, one per version, and the update itself."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import orjson

from rollhook.durable import cannot_write, fsync_directory, fsync_tree, write_atomic
from rollhook.engine.base import PauseMode
from rollhook.errors import EngineError, RunError
from rollhook.failpoints import fail
from rollhook.router import Worker

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MARKER = "COMPLETE.json"
_NAME = re.compile(r"v(\d{6,})")
_KEPT = 2
#: engines that read new weights at once
_AT_ONCE = 32
#: tries of a flush that requests in the queue forbid, before they are aborted
_RETRACTED_FLUSH_TRIES = 3
#: seconds for telling an engine to continue that has failed an update: it leaves the routing anyway
_CONTINUE_SECONDS = 5.0


class WeightControl(Protocol):
    """What an update asks of the engine client."""

    async def health(self, worker: Worker) -> bool:
        """Return, soon, whether the engine is healthy."""

    async def pause(self, worker: Worker, mode: PauseMode = ...) -> None:
        """Stop generating."""

    async def continue_(self, worker: Worker) -> None:
        """Go on generating."""

    async def update_weights_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load weights."""

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the version in service."""

    async def flush(self, worker: Worker, tries: int = ...) -> None:
        """Drop the prefix cache."""

    async def abort(self, worker: Worker, rid: str | None = None) -> None:
        """End one request, or all."""


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


def cache_key(version: int, mode: PauseMode) -> str | None:
    """Return the name of the prefix cache of new requests: by weight version where no update flushes it."""
    return f"weight-version:{version}" if mode == "in_place" else None


@asynccontextmanager
async def paused(client: WeightControl, engine: Worker, mode: PauseMode = "in_place") -> AsyncIterator[None]:
    """Pause an engine while the block runs; it is told to continue whatever happens, cancellation included.

    After an error of the engine's this takes a few seconds at most, so that a hung one holds nobody up.
    Raises EngineError when it cannot be paused, or told to continue after a block that ended well.
    """
    try:
        await client.pause(engine, mode)
        yield
    except BaseException as failure:
        limit = _CONTINUE_SECONDS if isinstance(failure, EngineError) else None
        try:
            await _to_the_end(_within(limit, client.continue_(engine)))
        except (EngineError, TimeoutError) as error:
            log.error("engine %s may be paused still: %s", engine.url, error or "it gave no answer")
        raise
    await _to_the_end(client.continue_(engine))


async def update_workers(
    client: WeightControl,
    workers: Sequence[Worker],
    path: Path,
    version: int,
    mode: PauseMode = "in_place",
    *,
    at_once: int = _AT_ONCE,
    out: Container[Worker] = (),
) -> dict[Worker, str]:
    """Bring every engine to a version: pause, flush unless `in_place`, update, verify the version, continue.

    Engines are updated side by side, `at_once` of them, each base URL once however many ranks it has. An
    engine that fails in any step is told to continue all the same. One whose workers are all `out` of the
    routing is updated only if it says that it is healthy: nobody waits for one that hangs.

    Returns the workers of the engines that failed, with the reason; the caller takes them out of the routing.
    """
    engines: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        engines[worker.url].append(worker)
    slots = asyncio.Semaphore(at_once)

    async def update(url: str) -> str:
        async with slots:
            if all(rank in out for rank in engines[url]) and not await client.health(Worker(url)):
                return "it was out of the routing and is not healthy"
            return await _update_engine(client, Worker(url), path, version, mode)

    reasons = await asyncio.gather(*map(update, engines))
    failed = {}
    for (url, ranks), reason in zip(engines.items(), reasons, strict=True):
        if reason:
            log.error("engine %s did not get weight version %d: %s", url, version, reason)
            failed.update(dict.fromkeys(ranks, reason))
    return failed


async def _update_engine(
    client: WeightControl, engine: Worker, path: Path, version: int, mode: PauseMode
) -> str:
    """Return why the update failed, or an empty string."""
    try:
        before = await client.weight_version(engine)
        if before is not None and before > version:
            return f"it serves version {before}, which {version} does not follow"
        async with paused(client, engine, mode):
            if mode != "in_place":
                await _drop_cache(client, engine, mode)
            await client.update_weights_from_disk(engine, path, version)
            served = await client.weight_version(engine)
    except EngineError as error:
        return str(error)
    return "" if served == version else f"it serves version {served} after the update"


async def _drop_cache(client: WeightControl, engine: Worker, mode: PauseMode) -> None:
    """Flush a paused engine's cache.

    Some releases of SGLang (0.5.10 to 0.5.20) refuse as long as requests wait, as retracted ones do until the
    pause ends. They are aborted then, and asked anew by whoever sent them.
    """
    if mode != "retract":
        await client.flush(engine)
        return
    try:
        await client.flush(engine, _RETRACTED_FLUSH_TRIES)
    except EngineError as error:
        log.info("engine %s: its retracted requests are aborted, for %s", engine.url, error)
        await client.abort(engine)
        await client.flush(engine)


async def _within(seconds: float | None, work: Coroutine[object, object, None]) -> None:
    async with asyncio.timeout(seconds):
        await work


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Await something that a cancellation of the caller does not cut short."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
