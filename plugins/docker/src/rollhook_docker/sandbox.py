"""One container, as the core drives it."""

from __future__ import annotations

import asyncio
import logging
import posixpath
import re
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import RawSandbox, SandboxSpec, scripts
from rollhook_docker.archive import Stat, packed, unpacked
from rollhook_docker.engine import Engine, EngineApiError
from rollhook_docker.process import DockerProcess, Refused

_START_SECONDS = 60.0
#: within it the script must have killed, or the container is restarted; well below the core's limit
_KILL_SECONDS = 9.0
_LIST_SECONDS = 2.0
_LINKS = 40
_READ_TRIES, _WRITE_TRIES = 3, 20
_STAT = "X-Docker-Container-Path-Stat"
# what the kernel takes (MAX_ARG_STRLEN, and a quarter of a stack of 8 MiB)
_ONE_ARGUMENT, _ALL_ARGUMENTS = 131_072, (2 << 20) - 4096
_NO_USER = re.compile(
    r"unable to find (user|group)|no matching entries in (passwd|group) file", re.IGNORECASE
)

#: what the engine's own reading does not reach: Podman takes these characters for patterns, Docker does not
#: see what is mounted inside
_BY_COMMAND = re.compile(r"[*?\[\\]|^/+(proc|sys|dev)/")
_NO_FILE = ("no such file or directory", "not a directory", "too many levels of symbolic links")
#: $1: the file, $2: how many bytes of it
_READ = """
[ -e "$1" ] || exit 2
[ -d "$1" ] && exit 21
[ -f "$1" ] || exit 22
exec head -c "$2" -- "$1"
"""
#: $1: the directory; the rest: the command
_RUN = 'cd -- "$1" || exit 126; shift; exec "$@"'
#: The same where the end of input cannot be told from the end of the connection, as with TLS: the input comes
#: in pieces, each after its length.
_RUN_COUNTED = r"""
cd -- "$1" || exit 126
shift
exec 3<&0
{
  while IFS= read -r size <&3 && [ "$size" -gt 0 ]; do head -c "$size" <&3 || break; done
} 2>/dev/null | "$@" 3<&-
"""
#: The main process of the container is the oldest but process 1; the kill script spares both.
_KILL = (
    r"""
oldest= main=
for directory in /proc/[0-9]*; do
  pid=${directory#/proc/}
  [ "$pid" = 1 ] && continue
  stat=
  { while IFS= read -r line; do stat="$stat $line"; done < "$directory/stat"; } 2>/dev/null || continue
  set -f -- "$1" "$2" ${stat##*) }
  began=${22}
  set +f -- "$1" "$2"
  case $began in '' | *[!0-9]*) continue ;; esac
  if [ -n "$oldest" ]; then
    [ "$began" -gt "$oldest" ] && continue
    [ "$began" = "$oldest" ] && [ "$pid" -gt "$main" ] && continue
  fi
  oldest=$began main=$pid
done
set -- "$1" "$2 $main"
"""
    + scripts.KILL
)

logger = logging.getLogger(__name__)


class DockerSandbox(RawSandbox):
    """One container."""

    def __init__(self, engine: Engine, container_id: str, spec: SandboxSpec) -> None:
        self.id = container_id
        self.spec = spec
        self._engine = engine
        self._container = engine.client.containers.container(container_id)
        self._killing: set[asyncio.Task[Any]] = set()

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> DockerProcess | Refused:
        """Start `argv`."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        sizes = [len(text.encode("utf-8", "surrogateescape")) + 1 for text in (*argv, *variables)]
        if max(sizes) > _ONE_ARGUMENT or sum(sizes) + 8 * len(sizes) > _ALL_ARGUMENTS:
            return Refused(126, f"{argv[0]}: argument list too long")
        directory = posixpath.join(self.spec.workdir, cwd or "")
        run = _RUN_COUNTED if stdin and self._engine.where.tls else _RUN
        command = ["/bin/sh", "-c", run, "rollhook", directory, *argv]
        user = user or self.spec.user or ""
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await self._start(command, variables, user, stdin)
        except EngineApiError as error:
            if user and _NO_USER.search(str(error)):
                raise SandboxError(f"there is no user {user!r} in the sandbox", kind="user") from error
            await self._must_live(error)
            raise
        except BaseException as error:
            if mark := (env or {}).get(scripts.MARK):  # it may run, and nobody else will know of it
                self._later(self.kill_tree(mark))
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    f"sandbox {self.id}: the container engine did not start a command in {_START_SECONDS:g} s"
                ) from None
            raise

    async def _start(self, command: list[str], env: list[str], user: str, stdin: bool) -> DockerProcess:
        async with self._engine.asked("a command"):
            made = await self._container.exec(command, stdin=stdin, user=user, environment=env)
        reader, writer = await self._engine.attach(made.id)

        async def ended() -> int | None:
            try:
                async with self._engine.asked("a command's state"):
                    state = await made.inspect()
            except EngineApiError as error:
                await self._must_live(error)
                raise
            return None if state["Running"] else int(state["ExitCode"] or 0)

        return DockerProcess(reader, writer, ended, counted=stdin and self._engine.where.tls)

    async def _must_live(self, error: EngineApiError) -> None:
        """Raise SandboxDead when a request failed because the container is gone or just going."""
        if error.status == 0:
            return
        for left in reversed(range(5 if error.status in (404, 409, 500) else 1)):
            if not await self.alive():
                raise SandboxDead(f"sandbox {self.id} is gone") from error
            await asyncio.sleep(0.1 if left else 0.0)

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes; the engine reads them, with nothing that is inside."""
        by_command = _BY_COMMAND.search(path) is not None
        for left in reversed(range(_READ_TRIES)):
            try:
                return await (self._read_by_command if by_command else self._read)(path, limit)
            except EngineApiError:
                raise
            except SandboxError as error:
                if error.kind != "retryable" or not left:
                    raise
        raise AssertionError("unreachable")

    async def _read(self, path: str, limit: int) -> bytes:
        at = path
        for _ in range(_LINKS):
            try:
                async with self._engine.answer(
                    path, f"containers/{self.id}/archive", params={"path": at}
                ) as response:
                    stat = Stat.parse(response.headers[_STAT])
                    if stat.link and stat.target not in ("", at):
                        at = stat.target
                        continue
                    _check_readable(path, stat, limit)
                    archive = bytearray()
                    with suppress(aiohttp.ClientPayloadError):
                        async for piece in response.content.iter_any():
                            archive += piece
                            if len(archive) > limit + (1 << 16) + 2 * len(path):
                                raise _too_large(path, limit)
                data = await unpacked(path, archive)
            except EngineApiError as error:
                raise await self._named(error, path) from error
            if len(data) > limit:
                raise _too_large(path, limit)
            return data
        raise FileNotFoundError(40, "too many links", path)

    async def _read_by_command(self, path: str, limit: int) -> bytes:
        command = ["/bin/sh", "-c", _READ, "rollhook-read", path, str(limit + 1)]
        process = await self._start(command, [], "0", stdin=False)
        try:
            data = bytearray()
            async for piece in process.stdout():
                data += piece
            code = await process.wait()
        finally:
            await process.aclose()
        if code == 2:
            raise FileNotFoundError(2, "No such file or directory", path)
        if code == 21:
            raise IsADirectoryError(21, "Is a directory", path)
        if code:
            raise SandboxError(f"{path} is no regular file that can be read (exit {code})", kind="user")
        if len(data) > limit:
            raise _too_large(path, limit)
        return bytes(data)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; the engine does, with nothing that is inside."""
        path = posixpath.normpath(path)
        for left in reversed(range(_WRITE_TRIES)):
            try:
                await self._engine.upload(
                    path,
                    f"containers/{self.id}/archive?path=%2F&noOverwriteDirNonDir=1",
                    packed(path, data, mode),
                )
                return
            except EngineApiError as error:
                # Podman removes a file and makes it anew: another write may come between
                if not left or "file exists" not in str(error) or await self._is_directory(path):
                    raise await self._named(error, path) from error

    async def _is_directory(self, path: str) -> bool:
        query = {"path": path}
        try:
            async with self._engine.answer(path, f"containers/{self.id}/archive", params=query) as response:
                return Stat.parse(response.headers[_STAT]).directory
        except EngineApiError as error:
            if error.status == 404:
                return False
            raise

    async def _named(self, error: EngineApiError, path: str) -> Exception:  # noqa: PLR0911 - a table
        """Return what a failed request for a file means."""
        if error.status == 0:
            return error
        if not await self.alive():
            return SandboxDead(f"sandbox {self.id} is gone")
        said = str(error)
        if "no space left" in said or "quota exceeded" in said:
            return OSError(28, "No space left on device", path)
        if error.status == 404 or any(words in said for words in _NO_FILE):
            return FileNotFoundError(2, "No such file or directory", path)
        if "file exists" in said or "cannot overwrite directory" in said or "is a directory" in said:
            return IsADirectoryError(21, "Is a directory", path)
        if "permission denied" in said or "read-only file system" in said:
            return PermissionError(13, "Permission denied", path)
        return error

    async def alive(self) -> bool:
        """Ask the engine whether the container runs."""
        try:
            async with self._engine.asked("a sandbox's state"):
                state = (await self._container.show())["State"]
        except EngineApiError as error:
            if error.gone:
                return False
            raise
        return bool(state["Running"]) and not state.get("Paused")

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]]:
        """Kill with the core's script; where it cannot run or does not prevail, restart the container.

        A restart ends every process and keeps the files. It is what is left when the table of processes is
        full, or when the sandbox's own shell is broken; then other commands end, too.
        """
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                process = await self._start(
                    ["/bin/sh", "-c", _KILL, "rollhook-kill", mark, "1"], [], "0", stdin=False
                )
                try:
                    out = b"".join([piece async for piece in process.stdout()])
                finally:
                    await process.aclose()
            killed, left = scripts.parse_killed(out)
            if left == 0:
                return killed
            reason = f"{left} left" if left > 0 else "it did not run"
        except TimeoutError:
            reason = f"it took more than {_KILL_SECONDS:g} s"
        except EngineApiError as error:
            if error.status == 0:
                raise
            reason = str(error)
        if not await self.alive():
            raise SandboxDead(f"sandbox {self.id} is gone")
        logger.warning("sandbox %s: restarting it, as its processes were not killed: %s", self.id, reason)
        return await self._restart()

    async def _restart(self) -> Sequence[tuple[int, str]]:
        seen: list[tuple[int, str]] = []
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                seen = await self._engine.processes(self.id)
        except (TimeoutError, EngineApiError, ValueError) as error:
            logger.info("sandbox %s: no list of its processes: %s", self.id, error)
        async with self._engine.asked("a restart"):
            await self._container.restart(t=0)
        return seen[2:]  # the first two are process 1 and the main one

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._killing.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._killing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("sandbox %s: a command whose start was given up: %s", self.id, error)


def _check_readable(path: str, stat: Stat, limit: int) -> None:
    if stat.directory:
        raise IsADirectoryError(21, "Is a directory", path)
    if stat.special or stat.link:
        raise SandboxError(f"{path} is not a regular file", kind="user")
    if stat.size > limit:
        raise SandboxError(f"{path} holds {stat.size} bytes, more than the limit of {limit}", kind="user")


def _too_large(path: str, limit: int) -> SandboxError:
    return SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
