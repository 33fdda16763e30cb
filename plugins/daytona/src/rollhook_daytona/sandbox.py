"""One sandbox of Daytona: scripts by the toolbox's exec, bytes by its file transfer."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxSpec
from rollhook.sandbox.detached import DetachedTimes
from rollhook.sandbox.detached_sandbox import DetachedSandbox

if TYPE_CHECKING:
    from rollhook_daytona.backend import DaytonaSandboxes

Result = TypeVar("Result")


class DaytonaSandbox(DetachedSandbox):
    """A sandbox; `handle` is the SDK's."""

    def __init__(self, backend: DaytonaSandboxes, handle: Any, spec: SandboxSpec) -> None:
        config = backend.config
        super().__init__(
            handle.id, spec, DetachedTimes(poll=config.poll_seconds, grace=config.request_seconds)
        )
        self._backend = backend
        self._handle = handle

    async def run(self, script: str, *, timeout: float) -> str:
        """Run a script. The daemon prefers zsh and feeds it by stdin, so it starts a sh without input."""
        command = f"exec /bin/sh -c {shlex.quote(script)} < /dev/null"
        seconds = math.ceil(timeout)
        answer = await self._call(
            "running a command", timeout, lambda: self._handle.process.exec(command, timeout=seconds)
        )
        return str(answer.result or "")

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        timeout = self._backend.config.request_seconds + len(data) / 1e5
        await self._call(
            "uploading a file",
            timeout,
            lambda: self._handle.fs.upload_file(data, path, timeout=math.ceil(timeout)),
        )

    async def get(self, path: str) -> bytes:
        """Read a file, as a stream where the SDK has one: it would block the loop otherwise."""

        async def stream() -> bytes:
            data = [chunk async for chunk in await self._handle.fs.download_file_stream(path)]
            return await asyncio.to_thread(b"".join, data)

        return await self._call("downloading a file", 1800.0, stream)

    async def alive(self) -> bool:
        """Return whether the service says that it is started."""
        return await (await self._backend.rest()).state(self.id) == "started"

    async def touch(self) -> None:
        """Put off the service's own stop."""
        await self._call("touching a sandbox", 0.0, self._handle.refresh_activity)

    async def _call(self, what: str, seconds: float, request: Callable[[], Awaitable[Result]]) -> Result:
        """Make a request within its own limit, since the SDK has none or a longer one.

        A failure of a sandbox that is not started any more is SandboxDead, whatever the toolbox said.
        """
        limit = seconds + self._backend.config.request_seconds
        try:
            async with self._backend.requests, asyncio.timeout(limit):
                return await request()
        except Exception as error:
            translated = self._backend.translate(error, what)
            if isinstance(translated, SandboxDead) or not await self._may_live():
                raise SandboxDead(f"sandbox {self.id} is gone ({translated})") from error
            if translated.kind == "user" and "401" not in str(error):
                # a daemon that is just starting or ending answers 400
                raise SandboxError(str(translated), kind="retryable") from error
            raise translated from error

    async def _may_live(self) -> bool:
        try:
            return await self.alive()
        except SandboxDead:
            return False
        except SandboxError:
            return True
