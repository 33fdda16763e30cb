"""Processes as envd runs them: output goes to whoever listens, and only the process itself is killed.

After its time limit the process (not its children) is killed; a client that goes away changes nothing. The
end is told once the process has ended and its pipes are closed, and kept for a while for late listeners.
Pids are the double's own numbers.
"""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Mapping
from typing import Any

from doubles.e2b_state import Box
from doubles.machines import Machine

CHUNK = 32 << 10
_KEPT_SECONDS = 30.0
_CUT: dict[str, Any] = {"cut": True}


class Listener:
    """One stream of events; a slow one holds the process up."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(64)
        self.closed = False

    async def put(self, event: dict[str, Any]) -> None:
        """Hand on an event unless nobody listens any more."""
        if not self.closed:
            await self.events.put(event)

    def close(self) -> None:
        """Stop listening, and let go of who waits."""
        self.closed = True
        while not self.events.empty():
            self.events.get_nowait()


class Process:
    """A running command of a sandbox."""

    def __init__(self, box: Box, process: asyncio.subprocess.Process, config: Mapping[str, Any]) -> None:
        self.pid = process.pid
        self.config = config
        self.end: dict[str, Any] | None = None
        self._box = box
        self._process = process
        self._listeners: list[Listener] = []
        self._pumps: list[asyncio.Task[None]] = []

    def listen(self) -> Listener:
        """Return a listener that gets what comes from now on."""
        listener = Listener()
        self._listeners.append(listener)
        return listener

    async def watch(self, limit: float | None) -> None:
        """Serve it to its end."""
        self._pumps = [asyncio.ensure_future(self._pump(name)) for name in ("stdout", "stderr")]
        _, pending = await asyncio.wait(self._pumps, timeout=limit)
        if pending:
            Machine.kill(self._process)
            for pump in pending:
                pump.cancel()
        while self._process.returncode is None:
            await asyncio.sleep(0.002)
        self.end = _end(self._process.returncode)
        for listener in list(self._listeners):
            await listener.put({"end": self.end})
        await asyncio.sleep(_KEPT_SECONDS)
        self._box.processes.pop(self.pid, None)

    async def _pump(self, name: str) -> None:
        stream = self._process.stdout if name == "stdout" else self._process.stderr
        assert stream is not None
        while chunk := await stream.read(CHUNK):
            event = {"data": {name: base64.b64encode(chunk).decode()}}
            for listener in list(self._listeners):
                await listener.put(event)

    async def write(self, data: bytes) -> None:
        """Write to its stdin; BrokenPipeError where there is none (any more)."""
        if self._process.stdin is None or self._process.stdin.is_closing():
            raise BrokenPipeError("stdin not enabled or closed")
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    def close_stdin(self) -> None:
        """End its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process itself."""
        Machine.kill(self._process, number)

    def cut(self) -> None:
        """Let every stream of it break, as when its sandbox goes."""
        for listener in self._listeners:
            listener.close()
            listener.events.put_nowait(_CUT)


def is_cut(event: dict[str, Any]) -> bool:
    """Whether an event says that the sandbox has gone."""
    return event is _CUT


def _end(code: int) -> dict[str, Any]:
    if code < 0:
        status = f"signal: {signal.Signals(-code).name.removeprefix('SIG').lower()}"
        status = "signal: killed" if -code == signal.SIGKILL else status
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    status = f"exit status {code}"
    return {"exitCode": code, "exited": True, "status": status} | ({"error": status} if code else {})
