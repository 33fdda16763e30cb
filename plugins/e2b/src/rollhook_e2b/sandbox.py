"""One sandbox of E2B: all that is done inside goes by short commands, which may be asked for again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

from rollhook.sandbox import SandboxSpec
from rollhook.sandbox.detached import DetachedTimes
from rollhook.sandbox.detached_sandbox import DetachedSandbox
from rollhook_e2b.errors import ServiceError
from rollhook_e2b.service import Service

#: envd starts a login shell, whose profile sets PATH anew: what the image or the task said is put back
_RESTORE = 'while IFS= read -r -d "" v; do case $v in PATH=*) export "$v" ;; esac; done < /proc/$$/environ'


class E2BSandbox(DetachedSandbox):
    """One sandbox of E2B. `lease(age)` says for how many seconds one of this age may live on."""

    def __init__(self, service: Service, box: Any, spec: SandboxSpec, lease: Callable[[float], int]) -> None:
        super().__init__(str(box.sandbox_id), spec, DetachedTimes(poll=service.poll_seconds))
        self._service = service
        self._box = box
        self._lease = lease
        self._born = time.monotonic()

    async def run(self, script: str, *, timeout: float) -> str:
        """Run a script as root, in E2B's login shell, and return its stdout."""
        # on one line with the script's first, by which the core finds looks that are under way
        return await self._service.run(self._box, f"{_RESTORE}; {script}", timeout)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file as root."""
        try:
            await self._service.upload(self._box, path, data)
        except ServiceError as error:
            if error.kind == "infrastructure":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
            raise

    async def get(self, path: str) -> bytes:
        """Return a file's bytes."""
        return await self._service.download(self._box, path)

    async def alive(self) -> bool:
        """Return whether its envd answers."""
        return await self._service.running(self._box)

    async def touch(self) -> None:
        """Move the sandbox's deadline on, not beyond its lifetime; what nobody touches the service kills."""
        seconds = self._lease(time.monotonic() - self._born)
        if seconds > 0:
            await self._service.extend(self.id, seconds)
