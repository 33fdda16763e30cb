"""A placement without a cluster: processes are children of this one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollhook.engine.base import Process

LOOPBACK = "127.0.0.1"


class LocalPlacement:
    """Starts processes as children of this one; for engines' tests without a cluster."""

    address = LOOPBACK

    async def start_process(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        gpus: float = 0,
        node: str | None = None,
    ) -> Process:
        """Start a program here."""
        process = LocalProcess(argv, env, log)
        await process.restart()
        return process

    def free_port(self) -> int:
        """Return a port that is free now."""
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return int(probe.getsockname()[1])


class LocalProcess:
    """A child process whose output goes to a file."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._argv, self._env, self._log = argv, env, log
        self._process: asyncio.subprocess.Process | None = None

    async def restart(self) -> None:
        """Kill it if it lives and start it anew."""
        await self.stop()
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(argument.replace("{host}", LOOPBACK) for argument in self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self._env},
            )

    async def stop(self) -> None:
        """Terminate it, and kill it when that does not help."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def alive(self) -> bool:
        """Return whether it runs."""
        return self._process is not None and self._process.returncode is None

    async def host(self) -> str:
        """Return the address of this machine, for itself."""
        return LOOPBACK
