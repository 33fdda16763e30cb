"""One sandbox of E2B: commands detached, files by short commands, large ones by upload and download."""

from __future__ import annotations

import base64
import errno
import os
import posixpath
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollhook.errors import SandboxError
from rollhook.sandbox import RawSandbox, SandboxSpec
from rollhook.sandbox import scripts as core_scripts
from rollhook.sandbox.detached import Detached, DetachedProcess, DetachedTimes
from rollhook_e2b import scripts
from rollhook_e2b.errors import ServiceError
from rollhook_e2b.service import MOST_TEXT, Ran, Service

#: a file up to this size goes with a command, in bytes
_INLINE_WRITE = 64 << 10
_INLINE_READ = 1 << 20
_REMOVE_SECONDS = 120.0
_ERRORS = {44: errno.ENOENT, 45: errno.EISDIR, 47: errno.EACCES}


class Link:
    """The short requests that detached commands need (`rollhook.sandbox.detached.Link`)."""

    def __init__(self, service: Service, box: Any) -> None:
        self._service = service
        self._box = box

    async def run(self, script: str, *, timeout: float) -> str:
        """Run a script as root and return its stdout."""
        text = f"{scripts.RESTORE}\n{script}"
        return (await self._service.run(self._box, text, user="root", seconds=timeout)).stdout

    async def put(self, path: str, data: bytes) -> None:
        """Write a file as root."""
        await self._service.upload(self._box, path, data)


class E2BSandbox(RawSandbox):
    """One sandbox of E2B. `lease(age)` says for how many seconds one of this age may live on."""

    def __init__(self, service: Service, box: Any, spec: SandboxSpec, lease: Callable[[float], int]) -> None:
        self.id = str(box.sandbox_id)
        self.spec = spec
        self._service = service
        self._box = box
        self._lease = lease
        self._born = time.monotonic()
        self._detached = Detached(Link(service, box), times=DetachedTimes(poll=service.poll_seconds))

    async def prepare(self) -> None:
        """Make the working directory, and note which processes are not the agent's."""
        ran = await self._again(scripts.PREPARE, self.spec.workdir, self.spec.user or "")
        if ran.code != 0:
            raise SandboxError(
                f"sandbox {self.id}: the working directory {self.spec.workdir} cannot be made: "
                f"{ran.stderr.strip()}",
                kind="user",
            )
        self.own_pids = frozenset(int(word) for word in ran.stdout.split())

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> DetachedProcess:
        """Start `argv` apart from any connection, so that one that is cut neither ends nor repeats it."""
        return await self._detached.start(
            argv,
            cwd=posixpath.join(self.spec.workdir, cwd or ""),
            env={**self.spec.env, **(env or {})},
            user=user,
            stdin=stdin,
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes: small ones with one command, large ones by download."""
        ran = await self._again(scripts.READ, path, str(limit), str(_INLINE_READ))
        if ran.code == 49:
            data = await self._download(path, limit)
        elif ran.code == 48:
            raise SandboxError(
                f"{path} holds {ran.stdout.strip()} bytes, more than the limit of {limit}", kind="user"
            )
        else:
            self._check(ran, path)
            data = base64.b64decode(ran.stdout)
        if len(data) > limit:
            raise SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
        return data

    async def _download(self, path: str, limit: int) -> bytes:
        try:
            return await self._detached.again(lambda: self._service.download(self._box, path, limit))
        except ServiceError as error:
            if error.kind == "user":  # it has changed meanwhile
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file beside its place and move it there: a link is replaced, readers see all or nothing."""
        if len(data) <= _INLINE_WRITE:
            ran = await self._again(scripts.WRITE, path, f"{mode:o}", base64.b64encode(data).decode())
        else:
            beside = posixpath.join(posixpath.dirname(path), f".rollhook-{secrets.token_hex(6)}")
            try:
                await self._detached.again(lambda: self._service.upload(self._box, beside, data))
            except ServiceError as error:
                if error.kind == "infrastructure":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
                if error.kind == "retryable":
                    raise
            ran = await self._sh(scripts.PLACE, path, f"{mode:o}", beside)
        self._check(ran, path)

    def _check(self, ran: Ran, path: str) -> None:
        if ran.code == 46:
            raise SandboxError(f"{path} is not a regular file", kind="user")
        if ran.code == 47 and "No space left" in ran.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if ran.code in _ERRORS:
            raise OSError(_ERRORS[ran.code], os.strerror(_ERRORS[ran.code]), path)
        if ran.code != 0:
            raise SandboxError(f"sandbox {self.id}: {path}: exit code {ran.code}: {ran.stderr.strip()}")

    async def alive(self) -> bool:
        """Return whether its envd answers."""
        return await self._service.running(self._box)

    async def touch(self) -> None:
        """Move the sandbox's deadline on, not beyond its lifetime; what nobody touches the service kills."""
        seconds = self._lease(time.monotonic() - self._born)
        if seconds > 0:
            await self._service.extend(self.id, seconds)

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]]:
        """Kill with the core's script, in one command of its own that no wrapper looks after."""
        return await self._detached.kill_tree(mark, self.own_pids)

    async def remove(self, paths: Sequence[str]) -> Sequence[bool] | None:
        """Remove with the core's script, unless there are too many paths for one command."""
        argv = core_scripts.remove_argv(paths)
        if sum(len(word.encode()) + 8 for word in argv) > MOST_TEXT // 4:
            return None
        ran = await self._run(argv, _REMOVE_SECONDS)
        answers = ran.stdout.split()
        if ran.code != 0 or len(answers) != len(paths):
            raise SandboxError(
                f"sandbox {self.id}: could not remove {', '.join(paths)}: {ran.stderr.strip()}"
            )
        return [answer == "1" for answer in answers]

    async def settle(self) -> None:
        """Wait for what cancelled starts have left to do inside."""
        await self._detached.aclose()

    async def _sh(self, script: str, *words: str) -> Ran:
        return await self._run(["/bin/sh", "-c", script, "rollhook", *words])

    async def _again(self, script: str, *words: str) -> Ran:
        """Run a script that may be run twice until its answer arrives."""
        return await self._detached.again(lambda: self._sh(script, *words))

    async def _run(self, argv: Sequence[str], seconds: float | None = None) -> Ran:
        """Run a short command as root; what a login profile prints is not of its output."""
        mark = secrets.token_hex(8)
        limit = self._service.request_seconds if seconds is None else seconds
        ran = await self._service.run(self._box, scripts.login(mark, argv), user="root", seconds=limit)
        return Ran(ran.code, ran.stdout.partition(f"\n{mark}\n")[2], ran.stderr)
