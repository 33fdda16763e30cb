"""One cell: commands by nsenter, files by commands."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence

from acme_cells.records import Record
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import RawSandbox, SandboxSpec

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
_GO = 'cd -- "$1" || exit 126; shift; exec "$@"'
_READ = """
[ -e "$1" ] || exit 44
[ -d "$1" ] && exit 45
[ -f "$1" ] || exit 46
[ -r "$1" ] || exit 47
exec head -c "$2" -- "$1"
"""
_WRITE = """
[ -d "$1" ] && [ ! -L "$1" ] && exit 45
parent=${1%/*}/
mkdir -p -- "$parent" && new=$(mktemp "$parent.cell-XXXXXXXX") || exit 47
cat > "$new" && chmod "$2" "$new" && mv -fT -- "$new" "$1" || { rm -f "$new"; exit 47; }
"""
_ERRORS = {44: errno.ENOENT, 45: errno.EISDIR, 47: errno.EACCES}


class Process(asyncio.SubprocessProtocol):
    """A command; its end is told apart from the end of its output."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self.output = {1: asyncio.StreamReader(), 2: asyncio.StreamReader()}
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let full readers stop the pipes."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport
        for fd, reader in self.output.items():
            pipe = transport.get_pipe_transport(fd)
            assert pipe is not None
            reader.set_transport(pipe)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take a chunk."""
        self.output[fd].feed_data(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note the end of a stream, or that nobody reads any more."""
        if fd == 0:
            self.writable.set()
        else:
            self.output[fd].feed_eof()

    def pause_writing(self) -> None:
        """Wait before more is written."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Go on writing."""
        self.writable.set()

    def process_exited(self) -> None:
        """Note the exit code; a signal's number is negative here."""
        code = self.transport.get_returncode()
        assert code is not None
        self.ended.set_result(code if code >= 0 else 128 - code)

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield what it prints."""
        return self._chunks(1)

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield what it complains of."""
        return self._chunks(2)

    async def _chunks(self, fd: int) -> AsyncIterator[bytes]:
        while chunk := await self.output[fd].read(1 << 16):
            yield chunk

    async def write_stdin(self, data: bytes) -> None:
        """Write and wait until there is room for more."""
        pipe = self.transport.get_pipe_transport(0)
        if not isinstance(pipe, asyncio.WriteTransport) or pipe.is_closing():
            raise BrokenPipeError(errno.EPIPE, "nobody reads")
        pipe.write(data)
        await self.writable.wait()

    async def close_stdin(self) -> None:
        """End the input."""
        if (pipe := self.transport.get_pipe_transport(0)) is not None:
            pipe.close()

    async def wait(self) -> int:
        """Return how the command itself ended."""
        return await asyncio.shield(self.ended)

    async def kill(self) -> None:
        """Kill nsenter; the core kills what it has started."""
        if not self.ended.done():
            self.transport.kill()

    async def aclose(self) -> None:
        """Close the pipes."""
        self.transport.close()


class Cell(RawSandbox):
    """A cell of this machine."""

    def __init__(self, record: Record, spec: SandboxSpec) -> None:
        self.id = record.id
        self.spec = spec
        self._record = record
        target = ["--target", str(record.pid), "--user", "--preserve-credentials", "--mount", "--pid"]
        drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        program = shutil.which("nsenter") or "nsenter"
        self._inside = [program, *target, "--net", "--ipc", "--uts", *drop, "/bin/sh", "-c", _GO, "sh"]

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> Process:
        """Start a command."""
        if user not in (None, "root", "0"):
            raise SandboxError(f"there is no user {user!r} in a cell", kind="user")
        if not await self.alive():
            raise SandboxDead(f"cell {self.id} is gone")
        _, process = await asyncio.get_running_loop().subprocess_exec(
            Process,
            *self._inside,
            cwd or self.spec.workdir,
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            env={**_ENVIRONMENT, **self.spec.env, **(env or {})},
            cwd="/",
            start_new_session=True,
        )
        return process

    async def read(self, path: str, *, limit: int) -> bytes:
        """Read a file."""
        data = await self._run(_READ, path, str(limit + 1))
        if len(data) > limit:
            raise SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file beside its place and move it there."""
        await self._run(_WRITE, path, f"{mode:o}", data=data)

    async def alive(self) -> bool:
        """Return whether the first process is there."""
        return self._record.lives()

    async def _run(self, script: str, path: str, *words: str, data: bytes = b"") -> bytes:
        """Run a script on a path and return what it printed."""
        process = await self.start(["/bin/sh", "-c", script, "sh", path, *words], cwd="/", stdin=True)
        try:
            feeding = asyncio.ensure_future(_feed(process, data))
            printed = await process.output[1].read()
            code = await process.wait()
            await feeding
        finally:
            await process.aclose()
        if code in _ERRORS:
            raise OSError(_ERRORS[code], os.strerror(_ERRORS[code]), path)
        if code == 46:
            raise SandboxError(f"{path} is not a regular file", kind="user")
        if code and not await self.alive():
            raise SandboxDead(f"cell {self.id} ended")
        if code:
            raise SandboxError(f"cell {self.id}: {path}: exit code {code}")
        return printed


async def _feed(process: Process, data: bytes) -> None:
    try:
        await process.write_stdin(data)
    except BrokenPipeError:
        return
    await process.close_stdin()
