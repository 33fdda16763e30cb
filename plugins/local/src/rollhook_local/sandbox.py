"""One sandbox on this machine, as the core drives it."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import RawSandbox, SandboxSpec
from rollhook_local.command import Command
from rollhook_local.keeper_client import Keeper

if TYPE_CHECKING:
    from rollhook_local.backend import LocalSandboxes

_INLINE_READ = 1 << 20


class LocalSandbox(RawSandbox):
    """One sandbox on this machine."""

    def __init__(self, backend: LocalSandboxes, sandbox_id: str, spec: SandboxSpec, root: str) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.gone = False
        self._backend = backend
        self._root = root  # "" when isolated, else the directory that stands for "/"

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> Command:
        """Start `argv`."""
        keeper = self._keeper()
        variables = dict(env or {})
        request = {
            "s": self.id,
            "argv": list(argv),
            "env": variables,
            "mark": variables.get("ROLLHOOK_EXEC", ""),
            "cwd": self._root + posixpath.join(self.spec.workdir, cwd or ""),
            "ids": await self._ids(user),
        }
        return keeper.command(request, stdin=stdin)

    async def _ids(self, user: str | None) -> tuple[int, int] | None:
        if user is None or user in ("root", "0"):
            return None
        if not self._backend.many_ids:
            raise SandboxError(
                f"commands as user {user!r} need root on this machine: an ordinary user has one id to give",
                kind="user",
            )
        if user.isdecimal():
            return int(user), int(user)
        for line in (await self.read("/etc/passwd", limit=1 << 20)).decode("utf-8", "replace").splitlines():
            fields = line.split(":")
            if len(fields) > 3 and fields[0] == user:
                return int(fields[2]), int(fields[3])
        raise SandboxError(f"there is no user {user!r} in the sandbox", kind="user")

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes."""
        try:
            _, (fd,) = await self._keeper().ask("open", s=self.id, path=path)
        except OSError as error:
            raise _named(error, path) from None
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                raise SandboxError(f"{path} holds {size} bytes, more than the limit of {limit}", kind="user")
            if size > _INLINE_READ:
                data = await asyncio.to_thread(_read_all, fd, limit)
            else:
                data = _read_all(fd, limit)
        finally:
            os.close(fd)
        if len(data) > limit:
            raise SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        try:
            await self._keeper().ask("write", s=self.id, path=path, mode=mode, blob=data)
        except OSError as error:
            raise _named(error, path) from None

    async def alive(self) -> bool:
        """Return whether process 1 is there."""
        if self.gone or self._backend.keeper is None:
            return False
        try:
            await self._backend.keeper.ask("ping", s=self.id)
        except SandboxDead:
            return False
        return True

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
        """Kill from outside; without isolation the core does it."""
        if self._root:
            return None
        try:
            answer, _ = await self._keeper().ask("kill", s=self.id, mark=mark)
        except OSError as error:
            raise SandboxError(f"sandbox {self.id}: {error.strerror}") from error
        return [(pid, command) for pid, command in answer["killed"]]

    async def remove(self, paths: Sequence[str]) -> Sequence[bool] | None:
        """Remove from outside."""
        try:
            answer, _ = await self._keeper().ask("remove", s=self.id, paths=list(paths))
        except OSError:
            return (
                None  # too deep for our descriptors, for one: the core's script goes on, and says what fails
            )
        return list(answer["existed"])

    def _keeper(self) -> Keeper:
        if self.gone or self._backend.keeper is None:
            raise SandboxDead(f"sandbox {self.id} is gone")
        return self._backend.keeper


def _named(error: OSError, path: str) -> Exception:
    if error.errno == 22:
        return SandboxError(f"{path} is not a regular file", kind="user")
    if error.errno == 20:
        return FileNotFoundError(2, "a parent of it is not a directory", path)
    return OSError(error.errno, error.strerror, path)


def _read_all(fd: int, limit: int) -> bytes:
    parts = []
    size = 0
    while size <= limit and (part := os.read(fd, 1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
