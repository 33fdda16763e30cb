"""A program of the agent's, in its sandbox or on this machine: started, fed, killed with its tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rollhook.errors import AgentError
from rollhook.sandbox.output import Capture

if TYPE_CHECKING:
    from rollhook.sandbox.agent_view import AgentSandbox

#: environment variable by which a program and all that it starts are known on this machine
MARK = "ROLLHOOK_AGENT"
_CHUNK = 1 << 16
#: seconds that its output may take to arrive once it has ended
_DRAIN = 1.0
_KILL_ROUNDS = 50


class Program:
    """One run of a program; `stdout` and `stderr` keep the head and the tail of what it writes.

    Cancelled, `run` kills it and all that it started, and then passes the cancellation on.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stdin: bytes | None, keep: int
    ) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.cwd = cwd
        self.stdin = stdin
        self.stdout, self.stderr = Capture(keep), Capture(keep)
        self.exit_code: int | None = None

    async def run_in(self, sandbox: AgentSandbox) -> int:
        """Run it in a sandbox and return its exit code; what it leaves in the background lives on."""
        process = await sandbox.spawn(self.argv, cwd=self.cwd, env=self.env, stdin=self.stdin is not None)
        pumps = [
            asyncio.create_task(_keep(process.stdout(), self.stdout)),
            asyncio.create_task(_keep(process.stderr(), self.stderr)),
        ]
        try:
            if self.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    await process.write_stdin(self.stdin)
                    await process.close_stdin()
            self.exit_code = await process.wait()
            await asyncio.wait(pumps, timeout=_DRAIN)
            return self.exit_code
        finally:
            if self.exit_code is None:
                await process.kill()
            await _end(pumps)
            await process.aclose()

    async def run_here(self) -> int:
        """Run it on this machine and return its exit code; nothing that it started lives on.

        It dies with this process. What it started is known by a variable of its environment: a program that
        empties that and detaches itself is not found.
        """
        mark = secrets.token_hex(16)
        with_parent = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        try:
            process = await asyncio.create_subprocess_exec(
                *with_parent,
                *self.argv,
                cwd=self.cwd,
                env={**self.env, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL if self.stdin is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(
                f"agent.argv: {self.argv[0]} cannot be started: {error.strerror}", kind="user"
            ) from None
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(_keep(_chunks(process.stdout), self.stdout)),
            asyncio.create_task(_keep(_chunks(process.stderr), self.stderr)),
        ]
        try:
            if self.stdin is not None and process.stdin is not None:
                process.stdin.write(self.stdin)
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                process.stdin.close()
            self.exit_code = await process.wait()
            await asyncio.wait(pumps, timeout=_DRAIN)
            return self.exit_code
        finally:
            await asyncio.shield(asyncio.to_thread(kill_marked, mark))
            await process.wait()
            await _end(pumps)


def kill_marked(mark: str) -> int:
    """Kill the processes of this machine that carry a mark, until none is left; return how many."""
    wanted, killed = f"{MARK}={mark}".encode(), set()
    for _ in range(_KILL_ROUNDS):
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, wanted)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        if not found:
            break
    return len(killed)


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(_CHUNK):
        yield chunk


async def _keep(chunks: AsyncIterator[bytes], capture: Capture) -> None:
    async for chunk in chunks:
        capture.feed(chunk)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
