"""The streams of a command: taken in, fed, and left when the command itself has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence

from rollhook.errors import RollhookError
from rollhook.sandbox.backend import RawProcess
from rollhook.sandbox.output import Capture

STDIN_CHUNK = 1 << 18

_DRAIN_QUIET = 0.1
_DRAIN_MOST = 2.0

logger = logging.getLogger(__name__)


async def pump(chunks: AsyncIterator[bytes], capture: Capture) -> None:
    """Take in a stream until it ends."""
    async for chunk in chunks:
        capture.feed(chunk)


async def feed(process: RawProcess, chunks: Iterable[bytes]) -> None:
    """Write to a command as fast as it reads, and close; a command need not read what it is given."""
    with contextlib.suppress(BrokenPipeError):
        for chunk in chunks:
            await process.write_stdin(chunk)
        await process.close_stdin()


def sliced(data: bytes) -> Iterable[bytes]:
    """Yield `data` in pieces."""
    view = memoryview(data)
    for start in range(0, len(view), STDIN_CHUNK):
        yield bytes(view[start : start + STDIN_CHUNK])


async def drain(pumps: Sequence[asyncio.Task[None]], *captures: Capture) -> None:
    """Wait for the end of the streams, but not for children that keep them open."""
    waited = 0.0
    while waited < _DRAIN_MOST:
        before = sum(capture.total for capture in captures)
        done, pending = await asyncio.wait(pumps, timeout=_DRAIN_QUIET)
        for task in done:
            task.result()
        waited += _DRAIN_QUIET
        if not pending or sum(capture.total for capture in captures) == before:
            return


async def stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs and wait for its end; what failed with a sandbox is only logged."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RollhookError):
                raise error
            logger.info("a stream ended early: %s", error)
