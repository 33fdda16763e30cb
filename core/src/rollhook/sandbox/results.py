"""What commands in a sandbox give back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollhook.sandbox.backend import RawProcess


@dataclass(frozen=True)
class ExecResult:
    """How a command ended; `exit_code` is None when it was killed for its timeout, 128 + n after signal n.

    `stdout` and `stderr` hold at most the `max_output` that was asked for, each: the first half and the
    last half of what was written when it was more (then `truncated`). `stdout_bytes` and `stderr_bytes`
    count everything. `duration` is in seconds.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    duration: float = 0.0
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class Census:
    """What was still running when a sandbox was made quiet, all of it killed: (pid inside, command)."""

    killed: Sequence[tuple[int, str]] = field(default_factory=tuple)


class Spawned:
    """A command that runs beside the caller, with its streams; ends at the latest with its sandbox."""

    def __init__(self, process: RawProcess, kill: Callable[[], Awaitable[None]]) -> None:
        self._process = process
        self._kill = kill

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""
        return self._process.stdout()

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""
        return self._process.stderr()

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain; BrokenPipeError once nobody reads."""
        await self._process.write_stdin(data)

    async def close_stdin(self) -> None:
        """Signal end of file."""
        await self._process.close_stdin()

    async def wait(self) -> int:
        """Return the exit code of the command itself (128 + n for signal n)."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the command and everything that it started."""
        await self._kill()

    async def aclose(self) -> None:
        """Drop the handle; the command goes on."""
        await self._process.aclose()
