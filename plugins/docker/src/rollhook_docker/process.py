"""A command in a container: its streams, demultiplexed, and how it ended."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

_HEADER = struct.Struct(">BxxxL")
_STDERR = 2
_PIECE = 1 << 17
#: pieces of a stream that are held until somebody reads them
_HELD = 16
_POLL_FIRST, _POLL_MOST = 0.25, 3.0
_CLOSE_SECONDS = 1.0
_END_FIRST, _END_MOST = 0.005, 1.0


class DockerProcess:
    """A command that runs; `ended` asks the engine for its exit code, None while it runs.

    `counted`: its input goes in pieces, each after a line with its length, and ends with a 0.

    Frames: a byte for the stream, three of nothing, four for the length ("Attach" of the Engine API).
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: Callable[[], Awaitable[int | None]],
        *,
        counted: bool = False,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._ended = ended
        self._counted = counted
        self._queues: dict[int, asyncio.Queue[bytes]] = {
            number: asyncio.Queue(_HELD) for number in (1, _STDERR)
        }
        self._parting = asyncio.create_task(self._part())

    async def _part(self) -> None:
        try:
            while True:
                number, left = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                queue = self._queues[_STDERR if number == _STDERR else 1]
                while left:
                    piece = await self._reader.read(min(left, _PIECE))
                    if not piece:
                        return
                    left -= len(piece)
                    await queue.put(piece)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the end, which `wait` has explained by the engine
        finally:
            for queue in self._queues.values():
                if queue.full() and self._cancelled():
                    queue.get_nowait()
                with suppress(asyncio.QueueFull):
                    queue.put_nowait(b"")

    @staticmethod
    def _cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def _chunks(self, number: int) -> AsyncIterator[bytes]:
        queue = self._queues[number]
        while True:
            if queue.empty() and self._parting.done():
                return
            piece = await queue.get()
            if not piece:
                return
            yield piece

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks."""
        return self._chunks(1)

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks."""
        return self._chunks(_STDERR)

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain."""
        try:
            if self._counted and data:
                self._writer.write(b"%d\n" % len(data))
            self._writer.write(data)
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise BrokenPipeError("the command reads no more") from error

    async def close_stdin(self) -> None:
        """Signal end of file."""
        with suppress(OSError, RuntimeError):
            if self._counted:
                self._writer.write(b"0\n")
                await self._writer.drain()
            else:
                self._writer.write_eof()

    async def wait(self) -> int:
        """Return the exit code: asked for when the streams end, and now and then before.

        Children may hold the streams of a command that has ended.
        """
        pause = _POLL_FIRST
        while not self._parting.done():
            await asyncio.wait({self._parting}, timeout=pause)
            if (code := await self._ended()) is not None:
                return code
            pause = min(pause * 1.5, _POLL_MOST)
        pause = _END_FIRST
        while (code := await self._ended()) is None:
            await asyncio.sleep(pause)
            pause = min(pause * 2, _END_MOST)
        return code

    async def kill(self) -> None:
        """Do nothing: the engine has no request for it, and the core kills the tree."""

    async def aclose(self) -> None:
        """Drop the stream."""
        self._parting.cancel()
        await asyncio.wait({self._parting})
        self._writer.close()
        try:
            with suppress(OSError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()  # input that nobody takes


class Refused:
    """A command that could not be started: it has ended with an exit code and a reason."""

    def __init__(self, code: int, reason: str) -> None:
        self._code = code
        self._reason = reason

    async def stdout(self) -> AsyncIterator[bytes]:
        """Yield nothing."""
        for nothing in tuple[bytes, ...]():
            yield nothing

    async def stderr(self) -> AsyncIterator[bytes]:
        """Yield the reason."""
        yield self._reason.encode() + b"\n"

    async def write_stdin(self, data: bytes) -> None:
        """Nobody reads."""
        raise BrokenPipeError("the command was not started")

    async def close_stdin(self) -> None:
        """Nobody reads."""

    async def wait(self) -> int:
        """Return the exit code."""
        return self._code

    async def kill(self) -> None:
        """Nothing runs."""

    async def aclose(self) -> None:
        """Nothing is held."""
