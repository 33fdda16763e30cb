"""A sandbox in bad weather, and its commands."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from rollhook.sandbox import RawProcess, RawSandbox
from rollhook_chaos.weather import GARBAGE, ChaosError, CommandFate, Weather


class ChaosProcess:
    """A command whose output may be cut or begin with what is no text."""

    def __init__(self, inner: RawProcess, fate: CommandFate) -> None:
        self._inner = inner
        self._fate = fate
        self._cut = asyncio.Event()

    async def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks, until end of file or the cut."""
        if self._fate.garbage:
            yield GARBAGE
        left = self._fate.cut
        async for chunk in self._inner.stdout():
            if left is not None and len(chunk) >= left:
                self._cut.set()
                yield chunk[:left]
                return
            left = None if left is None else left - len(chunk)
            yield chunk

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file."""
        return self._inner.stderr()

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain."""
        await self._inner.write_stdin(data)

    async def close_stdin(self) -> None:
        """Signal end of file."""
        await self._inner.close_stdin()

    async def wait(self) -> int:
        """Return the exit code; raises ChaosError once the stream was cut."""
        if self._fate.cut is None:
            return await self._inner.wait()
        code = asyncio.ensure_future(self._inner.wait())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({code, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not cut.done():
                return code.result()  # it wrote less than the cut lets through
            raise ChaosError("chaos: the connection was cut while a command ran")
        finally:
            for task in (code, cut):
                task.cancel()
            await asyncio.wait({code, cut})

    async def kill(self) -> None:
        """Kill the process itself."""
        await self._inner.kill()

    async def aclose(self) -> None:
        """Drop the handle."""
        await self._inner.aclose()


class ChaosSandbox(RawSandbox):
    """One live sandbox; `number` is that of its create."""

    def __init__(
        self,
        inner: RawSandbox,
        number: int,
        full_after: int | None,
        weather: Weather,
        wait: Callable[[], Awaitable[None]],
        die: Callable[[str, float], None],
    ) -> None:
        self.id, self.spec, self.own_pids = inner.id, inner.spec, inner.own_pids
        self._inner = inner
        self._number = number
        self._room = full_after
        self._weather = weather
        self._wait = wait
        self._die = die
        self._commands = itertools.count()
        self._writes = itertools.count()

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> RawProcess:
        """Start `argv`, and let its fate begin."""
        fate = self._weather.command(self._number, next(self._commands))
        await self._wait()
        process = await self._inner.start(argv, cwd=cwd, env=env, user=user, stdin=stdin)
        if fate.death is not None:
            self._die(self.id, fate.death)
        return process if fate.cut is None and not fate.garbage else ChaosProcess(process, fate)

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes."""
        await self._wait()
        return await self._inner.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, while there is room."""
        await self._wait()
        if self._room is not None and next(self._writes) >= self._room:
            raise OSError(errno.ENOSPC, "chaos: no space left on device", path)
        await self._inner.write(path, data, mode=mode)

    async def alive(self) -> bool:
        """Return whether commands can still be run here."""
        return await self._inner.alive()

    async def touch(self) -> None:
        """Tell the provider that the sandbox is in use."""
        await self._inner.touch()

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
        """Kill as the other does."""
        return await self._inner.kill_tree(mark)

    async def remove(self, paths: Sequence[str]) -> Sequence[bool] | None:
        """Remove as the other does."""
        return await self._inner.remove(paths)
