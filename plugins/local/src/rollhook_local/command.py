"""A command that the keeper has started, and its pipes on this process's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from rollhook.errors import SandboxDead

_PIPE_CHUNK = 1 << 17
_ORPHAN_PAUSE = 0.02


class Command:
    """A command in a sandbox: the `RawProcess` of this backend."""

    def __init__(self, kill: Callable[[], None], out: int, err: int, stdin: int) -> None:
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._out = _Pipe(out, self._loop)
        self._err = _Pipe(err, self._loop)
        self._stdin = stdin
        if stdin >= 0:
            os.set_blocking(stdin, False)

    def ended(self, code: int, dead: bool) -> None:
        """Take note of the end: what is in the pipes is still read, later output is nobody's."""
        self._out.process_ended()
        self._err.process_ended()
        if self._code.done():
            return
        if dead:
            self._code.set_exception(SandboxDead("the sandbox ended"))
            self._code.exception()  # whoever waits sees it; nobody has to
        else:
            self._code.set_result(code)

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file, or until the process has ended and nothing is left."""
        return self._out.chunks()

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file, or until the process has ended and nothing is left."""
        return self._err.chunks()

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain; BrokenPipeError once nobody reads."""
        view = memoryview(data)
        while view:
            if self._stdin < 0:
                raise BrokenPipeError("stdin is closed")
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        fd = self._stdin
        self._loop.add_writer(fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            if self._stdin == fd:
                self._loop.remove_writer(fd)

    async def close_stdin(self) -> None:
        """Signal end of file."""
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    async def wait(self) -> int:
        """Return the exit code of the process itself."""
        return await asyncio.shield(self._code)

    async def kill(self) -> None:
        """Kill the process itself."""
        if not self._code.done():
            self._kill()

    async def aclose(self) -> None:
        """Drop the handle; children that still write are read and forgotten, so that they can go on."""
        await self.close_stdin()
        self._out.abandon()
        self._err.abandon()

    def drop(self) -> None:
        """Close everything of a command that was never sent."""
        for pipe in (self._out, self._err):
            pipe.close()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


class _Pipe:
    """The reading end of a pipe on the event loop."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._ended = False
        self._wake: asyncio.Future[None] | None = None
        os.set_blocking(fd, False)

    async def chunks(self) -> AsyncIterator[bytes]:
        while self._fd >= 0:
            ended = self._ended
            try:
                data = os.read(self._fd, _PIPE_CHUNK)
            except BlockingIOError:
                if ended:
                    return
                await self._more()
                continue
            if not data:
                self.close()
                return
            yield data

    async def _more(self) -> None:
        self._wake = self._loop.create_future()
        self._loop.add_reader(self._fd, self._notify)
        try:
            await self._wake
        finally:
            if self._fd >= 0:
                self._loop.remove_reader(self._fd)
            self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def process_ended(self) -> None:
        self._ended = True
        self._notify()

    def abandon(self) -> None:
        if self._fd >= 0:
            self._discard()

    def _discard(self) -> None:
        """Read a little of what a background process still writes; at most a few MB/s, so nobody spins."""
        try:
            data = os.read(self._fd, _PIPE_CHUNK)
        except BlockingIOError:
            self._loop.add_reader(self._fd, self._discard)
            return
        if not data:
            self.close()
            return
        self._loop.remove_reader(self._fd)
        self._loop.call_later(_ORPHAN_PAUSE, self._discard_later)

    def _discard_later(self) -> None:
        if self._fd >= 0:
            self._discard()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
