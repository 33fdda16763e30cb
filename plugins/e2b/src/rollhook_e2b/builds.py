"""Builds of templates: one per name however many ask, in this process, on this host, and elsewhere."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from logging import Logger
from pathlib import Path

from rollhook.errors import SandboxError
from rollhook_e2b.errors import ServiceError
from rollhook_e2b.service import Service
from rollhook_e2b.templates import Plan

_LOCK_POLL = 0.2
_POLL_FIRST, _POLL_MOST = 0.2, 2.0
_TAIL_LINES = 30
#: how long a build that failed is not tried again, in seconds
_FAILED_SECONDS = 300.0
#: what E2B says of a build when another of the same name has begun
_SUPERSEDED = "superseded"


class Builds:
    """The templates of a process."""

    def __init__(
        self,
        service: Service,
        directory: Path,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._directory = directory
        self._logger = logger
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[float, SandboxError]] = {}

    async def ensure(self, plan: Plan, alias: str, seconds: float) -> None:
        """Return once the template is there; build it if need be, within `seconds`.

        A caller that is cancelled stops waiting; the build goes on, for whoever asks next. Raises
        SandboxError(kind="user") with the end of the log for a build that fails, and the same again for a
        while.
        """
        if alias in self._failed:
            since, failure = self._failed[alias]
            if self._clock() - since < _FAILED_SECONDS:
                raise failure
            del self._failed[alias]
        task = self._tasks.get(alias)
        if task is None:
            task = self._tasks[alias] = asyncio.create_task(self._ensure(plan, alias, seconds))
            task.add_done_callback(lambda done: self._done(alias, done))
        await asyncio.shield(task)

    def forget(self, alias: str) -> None:
        """Look for a template again: the service no longer has it."""
        task = self._tasks.get(alias)
        if task is not None and task.done():
            del self._tasks[alias]

    def _done(self, alias: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._tasks.pop(alias, None)
        elif (error := task.exception()) is not None:
            self._tasks.pop(alias, None)
            if isinstance(error, SandboxError) and error.kind == "user":
                self._failed[alias] = (self._clock(), error)

    async def _ensure(self, plan: Plan, alias: str, seconds: float) -> None:
        deadline = self._clock() + seconds
        if await self._service.ready(alias):
            return
        async with self._lock(alias, deadline):
            if not await self._service.ready(alias):
                await self._build(plan, alias, deadline)

    async def _build(self, plan: Plan, alias: str, deadline: float) -> None:
        self._logger.info("building E2B template %s from %s", alias, plan.base)
        began = self._clock()
        build = await self._service.start_build(plan, alias)
        seen, tail, pause = 0, deque[str](maxlen=_TAIL_LINES), _POLL_FIRST
        while True:
            status, lines, reason = await self._service.build_status(build, seen)
            seen += len(lines)
            tail.extend(lines)
            if status == "ready":
                self._logger.info("E2B template %s is ready after %.0f s", alias, self._clock() - began)
                return
            if status == "error" and not lines:
                break
            self._in_time(alias, deadline, tail)
            if not lines:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _POLL_MOST)
        if _SUPERSEDED not in reason:
            raise SandboxError(
                f"E2B template {alias} could not be built: {reason}{_shown(tail)}", kind="user"
            )
        self._logger.info("E2B template %s is built by another host", alias)
        while not await self._service.ready(alias):
            self._in_time(alias, deadline, tail)
            await asyncio.sleep(_POLL_MOST)

    def _in_time(self, alias: str, deadline: float, tail: deque[str]) -> None:
        if self._clock() > deadline:
            raise SandboxError(
                f"E2B template {alias} was not built in time; build_seconds limits it{_shown(tail)}",
                kind="user",
            )

    @asynccontextmanager
    async def _lock(self, alias: str, deadline: float) -> AsyncIterator[None]:
        """Hold a template's lock among the processes of this host."""
        path = self._directory / f"{alias}.lock"
        handle = await asyncio.to_thread(_opened, path)
        try:
            while not _locked(handle):
                if self._clock() > deadline:
                    raise ServiceError(f"E2B template {alias} is being built by another process ({path})")
                await asyncio.sleep(_LOCK_POLL)
            yield
        finally:
            os.close(handle)

    async def aclose(self) -> None:
        """Stop waiting for builds; the service goes on with them."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SandboxError(
            f"{path} cannot be used ({error.strerror}); set XDG_CACHE_HOME to one that can be written",
            kind="user",
        ) from error


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(tail: deque[str]) -> str:
    return "\n  " + "\n  ".join(tail) if tail else ""
