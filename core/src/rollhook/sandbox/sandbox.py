"""The sandbox that callers see: what commands, timeouts, kills and file transfers mean on every backend."""

from __future__ import annotations

import asyncio
import itertools
import logging
import posixpath
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import scripts, transfer
from rollhook.sandbox.backend import RawProcess, RawSandbox, SandboxSpec
from rollhook.sandbox.detached import DetachedProcess
from rollhook.sandbox.output import Capture
from rollhook.sandbox.results import Census, ExecResult, Spawned
from rollhook.sandbox.streams import STDIN_CHUNK, drain, feed, pump, sliced, stop
from rollhook.sandbox.transfer import TransferReport

MAX_OUTPUT = 1 << 20
MAX_READ = 100 << 20
MAX_TRANSFER = 4 << 30

_KILL_SECONDS = 15.0
_RESENDS = 2

logger = logging.getLogger(__name__)

__all__ = ["Census", "ExecResult", "Sandbox", "Spawned", "TransferReport"]


class Sandbox:
    """One live sandbox. Methods may be called concurrently; after `close` they raise SandboxDead.

    Paths are those of the sandbox; relative ones start at the working directory of its spec. A sandbox that
    is gone raises SandboxDead from every method but `alive`, `quiesce` and `close`; a command that fails is
    an ordinary result.
    """

    def __init__(
        self,
        raw: RawSandbox,
        *,
        capabilities: frozenset[str],
        delete: Callable[[str], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = raw.id
        self.spec: SandboxSpec = raw.spec
        self.capabilities = capabilities
        self._raw = raw
        self._delete = delete
        self._clock = clock
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._kills: set[asyncio.Task[Census]] = set()
        self._closing: asyncio.Task[None] | None = None

    # commands

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
        repeatable: bool = False,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run `argv` (no shell takes part) and return how it ended.

        Returns when the command itself ends; what it left in the background lives on. After `timeout`
        seconds it and all that it started are killed and the output so far is returned with `timed_out`. A
        cancelled call kills the same. A program that does not exist or may not be executed is a result with
        exit code 127 or 126. The command is sent once; only with `repeatable` again when the backend failed
        in a way that it calls retryable. Raises SandboxDead when the sandbox is gone, before or during.
        """
        for resend in itertools.count():
            try:
                return await self._exec_once(argv, cwd, env, user, timeout, stdin, max_output)
            except SandboxDead:
                raise
            except SandboxError as error:
                if not repeatable or error.kind != "retryable" or resend >= _RESENDS:
                    raise
                logger.info("sandbox %s: sending a repeatable command again: %s", self.id, error)
        raise AssertionError("unreachable")

    async def shell(
        self,
        text: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
        repeatable: bool = False,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run `text` with /bin/sh; otherwise as `exec`."""
        return await self.exec(
            ["/bin/sh", "-c", text],
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            repeatable=repeatable,
            max_output=max_output,
        )

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> Spawned:
        """Start `argv` and return at once."""
        process, mark = await self._start(argv, cwd, env, user, stdin)

        async def kill() -> None:
            await self._kill(mark)

        return Spawned(process, kill)

    async def _start(
        self,
        argv: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bool,
    ) -> tuple[RawProcess, str]:
        self._check_open()
        if not argv or any("\0" in part for part in argv):
            raise SandboxError("a command needs at least one word, and none with a NUL byte", kind="user")
        mark = f"{self._mark}.{next(self._numbers)}."
        cwd = self._absolute(cwd) if cwd is not None else None
        marked = {**(env or {}), scripts.MARK: mark}
        user = self.spec.user if user is None else user
        return await self._raw.start(list(argv), cwd=cwd, env=marked, user=user, stdin=stdin), mark

    @property
    def _most(self) -> str | None:
        """The user that moves and removes files, whoever runs the commands here."""
        return None if self.spec.user is None else "root"

    async def _exec_once(
        self,
        argv: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout: float | None,
        stdin: bytes | None,
        max_output: int,
    ) -> ExecResult:
        started = self._clock()
        process, mark = await self._start(argv, cwd, env, user, stdin is not None)
        if isinstance(process, DetachedProcess):
            process.keep_at_most(max_output)
        out, err = Capture(max_output), Capture(max_output)
        code = await self._run(process, mark, out, err, None if stdin is None else sliced(stdin), timeout)
        if code is not None and code >= 128 and not await self._raw.alive():
            raise SandboxDead(f"sandbox {self.id} ended while a command ran in it")
        return ExecResult(
            stdout=out.value(),
            stderr=err.value(),
            exit_code=code,
            timed_out=code is None,
            truncated=out.truncated or err.truncated,
            duration=self._clock() - started,
            stdout_bytes=out.total,
            stderr_bytes=err.total,
        )

    async def _run(
        self,
        process: RawProcess,
        mark: str,
        out: Capture,
        err: Capture,
        stdin: Iterable[bytes] | None,
        timeout: float | None,
    ) -> int | None:
        """Serve the streams of a command until it ends; None after the timeout, when it has been killed."""
        pumps = [
            asyncio.create_task(pump(process.stdout(), out)),
            asyncio.create_task(pump(process.stderr(), err)),
        ]
        feeders = [asyncio.create_task(feed(process, stdin))] if stdin is not None else []
        code: int | None = None
        try:
            try:
                async with asyncio.timeout(timeout):
                    code = await process.wait()
            except TimeoutError:
                await self._kill(mark)
                if isinstance(process, DetachedProcess):
                    await process.rest()
            await drain(pumps, out, err)
        except SandboxDead:
            raise
        except BaseException:
            if code is None:
                await self._kill_in_background(mark)
            raise
        finally:
            await stop([*pumps, *feeders])
            await process.aclose()
        return code

    async def _kill_in_background(self, mark: str) -> None:
        """Kill while being cancelled: a second cancellation leaves the kill running."""
        task = asyncio.create_task(self._kill(mark))
        self._kills.add(task)
        task.add_done_callback(self._kill_done)
        await asyncio.wait({task}, timeout=_KILL_SECONDS)

    def _kill_done(self, task: asyncio.Task[Census]) -> None:
        self._kills.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("sandbox %s: a cancelled command was not killed: %s", self.id, error)

    async def _kill(self, mark: str) -> Census:
        """Kill what carries `mark` ("" for everything) and what descends from it, until none is left."""
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                killed = await self._raw.kill_tree(mark)
                if killed is None:
                    killed = await self._kill_by_script(mark)
        except TimeoutError:
            raise SandboxError(
                f"sandbox {self.id}: processes were still there {_KILL_SECONDS:g} s after being killed"
            ) from None
        return Census(tuple(killed))

    async def _kill_by_script(self, mark: str) -> list[tuple[int, str]]:
        process = await self._raw.start(scripts.kill_argv(mark, self._raw.own_pids))
        try:
            out, err = Capture(MAX_OUTPUT), Capture(4096)
            await asyncio.gather(pump(process.stdout(), out), pump(process.stderr(), err))
            code = await process.wait()
        finally:
            await process.aclose()
        killed, left = scripts.parse_killed(out.value())
        if left == 0:
            return killed
        if not await self._raw.alive():
            raise SandboxDead(f"sandbox {self.id} is gone")
        raise SandboxError(
            f"sandbox {self.id}: could not end its processes (exit code {code}, {left} left): "
            f"{err.value().decode('utf-8', 'replace').strip()}"
        )

    # files

    async def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        """Return a regular file's bytes, following links inside the sandbox only.

        Raises FileNotFoundError, IsADirectoryError, PermissionError; SandboxError(kind="user") when the
        file holds more than `limit` bytes or is not a regular one.
        """
        self._check_open()
        return await self._raw.read(self._absolute(path), limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making its parents; what was there, a link included, is replaced.

        Raises IsADirectoryError, PermissionError.
        """
        self._check_open()
        await self._raw.write(self._absolute(path), data, mode=mode)

    async def upload_dir(self, local: Path | str, remote: str) -> TransferReport:
        """Copy what is in `local` into the directory `remote`, which is made: modes and links are kept.

        Links are copied as links, never followed; devices, FIFOs and sockets are skipped and reported.
        Raises FileNotFoundError or NotADirectoryError for `local`.
        """
        self._check_open()
        self._absolute(remote)
        plan, report = await asyncio.to_thread(transfer.plan_upload, Path(local))
        if plan.simple:
            for name, source, mode in plan.files:
                data = await asyncio.to_thread(source.read_bytes)
                await self._raw.write(self._absolute(posixpath.join(remote, name)), data, mode=mode)
            return report
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(transfer.pack, plan, cast(BinaryIO, archive))
            await self._unpack_into(remote, cast(BinaryIO, archive))
        return report

    async def download_dir(
        self, remote: str, local: Path | str, *, limit: int = MAX_TRANSFER
    ) -> TransferReport:
        """Copy what is in the directory `remote` into `local`, never writing outside it.

        What would leave `local` (names with "..", absolute names, links that point out) and what is no
        file, directory or link is skipped and reported; the rest arrives. Raises FileNotFoundError or
        NotADirectoryError for `remote`, SandboxError(kind="user") past `limit` bytes.
        """
        self._check_open()
        self._absolute(remote)
        with tempfile.TemporaryFile() as archive:
            stream = cast(BinaryIO, archive)
            warnings = await self._archive_of(remote, stream, limit)
            return await asyncio.to_thread(transfer.unpack, stream, Path(local), limit, warnings)

    async def remove(self, paths: Sequence[str]) -> list[str]:
        """Remove files and whole directories, links not followed; return those that existed."""
        self._check_open()
        if not paths:
            return []
        absolute = [self._absolute(path) for path in paths]
        existed = await self._raw.remove(absolute)
        if existed is None:
            rooted = any(posixpath.isabs(path) for path in paths)
            argv = scripts.remove_argv(absolute if rooted else paths)
            result = await self.exec(argv, cwd="/" if rooted else None, user=self._most, timeout=120.0)
            answers = result.text.split()
            if not result.ok or len(answers) != len(paths):
                raise SandboxError(
                    f"sandbox {self.id}: could not remove {', '.join(paths)}: {result.error_text}"
                )
            existed = [answer == "1" for answer in answers]
        return [path for path, there in zip(paths, existed, strict=True) if there]

    async def _unpack_into(self, remote: str, archive: BinaryIO) -> None:
        cwd = "/" if posixpath.isabs(remote) else None
        process, mark = await self._start(transfer.unpack_argv(remote), cwd, None, self._most, True)
        archive.seek(0)
        chunks = iter(lambda: archive.read(STDIN_CHUNK), b"")
        err = Capture(4096)
        code = await self._run(process, mark, Capture(0), err, chunks, None)
        if code != 0:
            raise SandboxError(
                f"sandbox {self.id}: unpacking failed with exit code {code}: "
                f"{err.value().decode('utf-8', 'replace').strip()}"
            )

    async def _archive_of(self, remote: str, archive: BinaryIO, limit: int) -> str:
        """Write a tar of `remote` to `archive`; return what tar said on stderr."""
        cwd = "/" if posixpath.isabs(remote) else None
        process, mark = await self._start(transfer.pack_argv(remote), cwd, None, self._most, False)
        err = Capture(1 << 18)
        warnings = asyncio.create_task(pump(process.stderr(), err))
        code: int | None = None
        try:
            received = 0
            async for chunk in process.stdout():
                received += len(chunk)
                if received > limit:
                    raise SandboxError(
                        f"sandbox {self.id}: {remote} holds more than the limit of {limit} bytes", kind="user"
                    )
                archive.write(chunk)
            code = await process.wait()
            await drain([warnings], err)
        except BaseException:
            if code is None:
                await self._kill_in_background(mark)
            raise
        finally:
            await stop([warnings])
            await process.aclose()
        said = err.value().decode("utf-8", "surrogateescape")
        transfer.check_packed(remote, code, said)
        return said

    # life

    async def touch(self) -> None:
        """Tell the provider that the sandbox is in use."""
        self._check_open()
        await self._raw.touch()

    async def alive(self) -> bool:
        """Return whether commands can still be run here; False after `close`."""
        return self._closing is None and await self._raw.alive()

    async def quiesce(self) -> Census:
        """Kill everything that commands have started, until nothing of it runs; return what was killed.

        In a sandbox that is gone nothing runs: an empty census. Raises SandboxError when something
        survives.
        """
        if self._closing is not None:
            return Census()
        everything = "" if "isolation" in self.capabilities else f"{self._mark}."
        try:
            return await self._kill(everything)
        except SandboxDead:
            return Census()

    async def close(self) -> None:
        """Delete the sandbox and all that runs in it; safe to call twice and while commands run."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._kills:
            await asyncio.wait(set(self._kills), timeout=_KILL_SECONDS)
        if self._delete is not None:
            await self._delete(self.id)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxDead(f"sandbox {self.id} is closed")

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path:
            raise SandboxError(f"{path!r} is not a path", kind="user")
        return posixpath.join(self.spec.workdir, path)
