"""A sandbox backend for tests: plain processes in a temporary directory, no isolation whatever.

It goes through the real seam and takes none of its shortcuts, so that the core's own way of doing things is
what runs. Relative paths and the file methods are faithful; a command that names an absolute path
meets the host.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import itertools
import os
import posixpath
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import RawProcess, RawSandbox, SandboxBackend, SandboxInfo, SandboxSpec

_CHUNK = 1 << 16
_REAPED_SECONDS = 2.0


@functools.cache
def _base() -> str:
    """Return the directory of this process's fake sandboxes, which goes when the process does."""
    path = tempfile.mkdtemp(prefix="rollhook-fake-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class FakeProcess:
    """A process of the host in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, sandbox: FakeSandbox) -> None:
        self._process = process
        self._sandbox = sandbox

    async def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file."""
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(_CHUNK):
            yield chunk

    async def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_CHUNK):
            yield chunk

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except ConnectionResetError:
            raise BrokenPipeError("stdin is closed") from None

    async def close_stdin(self) -> None:
        """Signal end of file."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def wait(self) -> int:
        """Return the exit code of the process itself, though children hold its pipes."""
        ended = asyncio.create_task(self._process.wait())
        try:
            while not ended.done():
                # asyncio's own wait also waits for the pipes, which children may hold open
                if self._process.returncode is not None:
                    break
                await asyncio.wait({ended}, timeout=0.01)
        finally:
            ended.cancel()
        code = self._process.returncode
        assert code is not None
        if code < 0 and self._sandbox.gone:
            raise SandboxDead(f"sandbox {self._sandbox.id} is gone")
        return code if code >= 0 else 128 - code

    async def kill(self) -> None:
        """Kill the process itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def aclose(self) -> None:
        """Drop the handle."""
        await self.close_stdin()
        transport = getattr(self._process, "_transport", None)
        if transport is not None and self._process.returncode is not None:
            transport.close()


class FakeSandbox(RawSandbox):
    """A temporary directory that stands for "/"."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.root = root
        self.gone = False
        self.processes: list[asyncio.subprocess.Process] = []
        self.started: list[list[str]] = []

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> RawProcess:
        """Start a process of the host in the directory that stands for `cwd`."""
        self._check()
        if user not in (None, "root"):
            raise SandboxError(f"there is no user {user!r} in the sandbox", kind="user")
        self.started.append(list(argv))
        directory = self._path(posixpath.join(self.spec.workdir, cwd or ""))
        if not directory.is_dir():
            return await self._failed(f"{cwd}: no such directory", 126)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.root / "root"),
            "LANG": "C.UTF-8",
            "FAKE_SANDBOX": str(self.root),
            **self.spec.env,
            **(env or {}),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=directory,
                env=environment,
                stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            return await self._failed(f"{argv[0]}: not found", 127)
        except OSError as error:
            return await self._failed(f"{argv[0]}: {error.strerror}", 126)
        self.processes = [each for each in self.processes if each.returncode is None] + [process]
        return FakeProcess(process, self)

    async def _failed(self, text: str, code: int) -> RawProcess:
        script = 'printf "%s\\n" "$1" >&2; exit "$2"'
        return FakeProcess(
            await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", script, "sh", text, str(code)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            ),
            self,
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes."""
        self._check()
        place = self._path(path)
        try:
            mode = place.stat().st_mode
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, "not found", path) from None
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise SandboxError(f"{path} is not a regular file", kind="user")
        if place.stat().st_size > limit:
            raise SandboxError(f"{path} is larger than the limit of {limit} bytes", kind="user")
        return place.read_bytes()

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        self._check()
        place = self._path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        descriptor, temporary = tempfile.mkstemp(dir=self.root)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            os.fchmod(stream.fileno(), mode)
        Path(temporary).rename(place)

    async def alive(self) -> bool:
        """Return whether it has not been deleted."""
        return not self.gone

    def _path(self, path: str) -> Path:
        return self.root / posixpath.normpath(path).lstrip("/")

    def _check(self) -> None:
        if self.gone:
            raise SandboxDead(f"sandbox {self.id} is gone")


class FakeSandboxes(SandboxBackend):
    """The backend; all that are made with one `provider` dictionary see the same sandboxes."""

    capabilities = frozenset({"separate_streams", "adopt"})
    _numbers: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self, provider: dict[str, FakeSandbox] | None = None) -> None:
        self.provider = provider if provider is not None else {}
        self.creates = 0

    async def create(self, spec: SandboxSpec) -> RawSandbox:
        """Make a directory."""
        self.refuse(spec)
        root = Path(tempfile.mkdtemp(dir=_base()))
        for path in ("tmp", "root", spec.workdir.lstrip("/")):
            (root / path).mkdir(parents=True, exist_ok=True)
        sandbox = self.wrap(f"fake-{next(self._numbers)}", spec, root)
        self.provider[sandbox.id] = sandbox
        self.creates += 1
        return sandbox

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> RawSandbox:
        """Return the one that is there."""
        if sandbox_id not in self.provider:
            raise SandboxDead(f"sandbox {sandbox_id} is gone")
        return self.provider[sandbox_id]

    def wrap(self, sandbox_id: str, spec: SandboxSpec, root: Path) -> FakeSandbox:
        """Make the object; broken variants make another."""
        return FakeSandbox(sandbox_id, spec, root)

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return what was made."""
        wanted = labels.items()
        return [
            SandboxInfo(box.id, dict(box.spec.labels))
            for box in self.provider.values()
            if wanted <= dict(box.spec.labels).items()
        ]

    async def delete(self, sandbox_id: str) -> None:
        """Kill what says that it belongs to the sandbox, and remove its directory."""
        box = self.provider.pop(sandbox_id, None)
        if box is None:
            return
        box.gone = True
        mark = f"FAKE_SANDBOX={box.root}\0".encode()
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and mark in (path / "environ").read_bytes() + b"\0":
                    os.kill(int(path.name), signal.SIGKILL)
        await _close(box.processes)
        shutil.rmtree(box.root, ignore_errors=True)


async def _close(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Close what was killed once it is reaped, since the loop may end right after a delete.

    Closed earlier it would be reaped behind the back of asyncio, which then reports exit code 255.
    """
    loop = asyncio.get_running_loop()
    ends = [each._transport._wait() for each in processes if each._loop is loop]  # type: ignore[attr-defined]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REAPED_SECONDS):
            await asyncio.gather(*ends)
    for process in processes:
        process._transport.close()  # type: ignore[attr-defined]
