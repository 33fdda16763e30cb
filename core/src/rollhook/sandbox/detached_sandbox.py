"""A sandbox of which the backend only says how a short script runs and how a file's bytes move.

Everything that `RawSandbox` promises is made of that: commands are started detached, files are read and
written beside their place and moved there, so that links, special files and races do no harm.
"""

from __future__ import annotations

import base64
import binascii
import errno
import itertools
import os
import secrets
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from rollhook.errors import SandboxError
from rollhook.sandbox.backend import RawSandbox, SandboxSpec
from rollhook.sandbox.detached import Detached, DetachedProcess, DetachedTimes

#: files up to this size travel inside the script's own request and answer
_INLINE_READ = 1 << 20
_INLINE_WRITE = 32 << 10
#: a larger file is put in pieces of this size: a client library may block the loop for the length of one
_PIECE = 4 << 20

#: $1: path; $2: bytes at most; $3: where a copy of a larger file goes
_READ = r"""
exec 2> /dev/null
if [ -d "$1" ]; then said=directory
elif [ ! -e "$1" ]; then said=absent
elif [ ! -f "$1" ]; then said=special
elif [ ! -r "$1" ]; then said=denied
else said=file; fi
printf '\nrollhook: %s\n' "$said"
if [ "$said" = file ]; then
  if [ "$3" ]; then head -c "$2" -- "$1" > "$3" && wc -c < "$3"
  else head -c "$2" -- "$1" | base64 -w 0 || head -c "$2" -- "$1" | base64 | tr -d '\n'; fi
fi
printf '\nrollhook: end\n'
"""

#: $1: path; $2: umask; $3: mode, "" where the umask gives it; $4: name to write under; $5: base64 of the
#: content, or "" where the rest are files that hold it
_WRITE = r"""
exec 2> /dev/null
write() {
  [ -d "$1" ] && [ ! -L "$1" ] && { said=directory; return; }
  said=denied parent=${1%/*}/ path=$1 mode=$3 new=${1%/*}/$4 data=$5
  [ -d "$parent" ] || mkdir -p -- "$parent" || return
  umask "$2"
  shift 5
  set -C
  true > "$new" || return
  set +C
  if [ $# = 0 ]; then printf %s "$data" | base64 -d > "$new"; else cat -- "$@" > "$new"; fi || said=full
  [ "$said" = denied ] && { [ -z "$mode" ] || chmod "$mode" "$new"; } &&
    mv -fT -- "$new" "$path" && said=written
  [ "$said" = written ] || rm -f -- "$new"
  [ $# = 0 ] || rm -f -- "$@"
}
write @ARGS@
printf '\nrollhook: %s\nrollhook: end\n' "$said"
"""

#: $1: the working directory; prints the processes that are there before anybody's command, and how many
_SETTLE = r"""
exec 2> /dev/null
[ -d "$1" ] || mkdir -p -- "$1" || { printf '\nrollhook: denied\nrollhook: end\n'; exit; }
up=$$ mine=" $$ "
while [ "$up" -gt 1 ]; do
  IFS= read -r stat < "/proc/$up/stat" || break
  stat=${stat##*) }
  stat=${stat#* }
  up=${stat%% *}
  mine="$mine$up "
done
printf '\nrollhook: settled'
for directory in /proc/[0-9]*; do
  pid=${directory#/proc/}
  case $mine in *" $pid "*) [ "$pid" = 1 ] || continue ;; esac
  printf ' %s' "$pid"
done
printf '\nrollhook: end\n'
"""

_ERRORS = {"absent": errno.ENOENT, "directory": errno.EISDIR, "denied": errno.EACCES, "full": errno.ENOSPC}


class DetachedSandbox(RawSandbox):
    """Base of sandboxes behind such a backend; fill `run`, `put`, `get` and `alive`."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, times: DetachedTimes | None = None) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.commands = Detached(self, times=times)
        self._numbers = itertools.count(1)

    @abstractmethod
    async def run(self, script: str, *, timeout: float) -> str:
        """Run a script; see `rollhook.sandbox.detached.Link`."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a file of at most 4 MiB; see `rollhook.sandbox.detached.Link`."""

    @abstractmethod
    async def get(self, path: str) -> bytes:
        """Return the bytes of a regular file that this class has made."""

    async def settle(self) -> None:
        """Make the working directory and note what runs before any command: once, after the create.

        Raises SandboxError(kind="user") where the directory cannot be made.
        """
        words = await self._ask(_SETTLE, self.spec.workdir)
        if words[0] != "settled":
            raise SandboxError(f"working directory {self.spec.workdir} cannot be made there", kind="user")
        self.own_pids = frozenset({1, *(int(word) for word in words[1:])})

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> DetachedProcess:
        """Start `argv` detached."""
        return await self.commands.start(
            argv, cwd=cwd or self.spec.workdir, env={**self.spec.env, **(env or {})}, user=user, stdin=stdin
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a file's bytes; a large one is copied first, so that what is checked is what is read."""
        most = min(limit, _INLINE_READ) + 1
        data = await self._read_inline(path, most)
        if len(data) > limit:
            raise SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
        return data if len(data) < most else await self._read_copy(path, limit)

    async def _read_inline(self, path: str, most: int) -> bytes:
        async def once() -> bytes:
            words = await self._ask_once(_READ, path, str(most), "")
            _check(words[0], "file", path)
            return _decoded(words[1:])

        return await self.commands.again(once)

    async def _read_copy(self, path: str, limit: int) -> bytes:
        copy = f"{self.commands.base}.read{next(self._numbers)}"
        words = await self._ask(_READ, path, str(limit + 1), copy)
        _check(words[0], "file", path)
        try:
            if int(words[1]) > limit:
                raise SandboxError(f"{path} holds more than the limit of {limit} bytes", kind="user")
            return await self.commands.again(lambda: self.get(copy))
        finally:
            self.commands.forget(copy, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file beside its place and move it there."""
        # created with it where that can be: a process less
        fine = mode & 0o7711 == 0o600
        modes = [f"{0o777 & ~mode:o}", ""] if fine else ["77", f"{mode:o}"]

        async def once() -> str:
            if len(data) <= _INLINE_WRITE:
                pieces = [base64.b64encode(data).decode()]
            else:
                pieces = ["", *await self._put_pieces(data)]
            words = shlex.join([path, *modes, f".rollhook-{secrets.token_hex(8)}", *pieces])
            return (await self._ask_once(_WRITE.replace("@ARGS@", words)))[0]

        _check(await self.commands.again(once), "written", path)

    async def _put_pieces(self, data: bytes) -> list[str]:
        view, stem = memoryview(data), f"{self.commands.base}.write{next(self._numbers)}"
        paths = []
        for start in range(0, len(view), _PIECE):
            paths.append(f"{stem}-{start}")
            await self.put(paths[-1], bytes(view[start : start + _PIECE]))
        return paths

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]]:
        """Kill with one script, sparing what runs it."""
        return await self.commands.kill_tree(mark, self.own_pids)

    async def _ask(self, script: str, *arguments: str) -> list[str]:
        return await self.commands.again(lambda: self._ask_once(script, *arguments))

    async def _ask_once(self, script: str, *arguments: str) -> list[str]:
        text = f"set -- {shlex.join(arguments)}\n{script}" if arguments else script
        said = await self.commands.send(text)
        lines = [line for line in (part.rstrip("\r") for part in said.split("\n")) if line]
        heads = [n for n, line in enumerate(lines) if line.startswith("rollhook: ")]
        if len(heads) < 2 or lines[heads[-1]] != "rollhook: end":
            raise SandboxError(f"sandbox {self.id} gave half an answer: {said[-200:]!r}", kind="retryable")
        return [*lines[heads[0]].split()[1:], *lines[heads[0] + 1 : heads[-1]]]


def _decoded(words: Sequence[str]) -> bytes:
    try:
        return base64.b64decode("".join(words), validate=True)
    except binascii.Error as error:
        raise SandboxError(f"a file arrived damaged: {error}", kind="retryable") from None


def _check(said: str, wanted: str, path: str) -> None:
    if said == wanted:
        return
    if said in _ERRORS:
        code = _ERRORS[said]
        raise OSError(code, os.strerror(code), path)
    raise SandboxError(f"{path} is not a regular file", kind="user")
