"""A server that the environment starts itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from rollhook.errors import TaskError

_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")
_PAUSE = 0.1


class OwnServer:
    """One process, started at the first `url()`, ended by `aclose`; its output is in `log`."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], directory: Path, seconds: float) -> None:
        self._argv = argv
        self._env = env
        self._directory = directory
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self._starting = asyncio.Lock()

    async def url(self) -> str:
        """Return its base URL once it answers; one that has died is started again. Raises TaskError."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        return self._url

    async def aclose(self) -> None:
        """Kill it and what it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [part.replace("{port}", str(port)) for part in self._argv]
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(self._env)
        self._directory.mkdir(parents=True, exist_ok=True)
        log = self._directory / "openenv-server.log"
        try:
            with log.open("ab") as file:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        except OSError as error:
            raise TaskError(f"environment.argv: {argv[0]} cannot be started: {error.strerror}") from error
        self._url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(self._seconds):
                await self._answers()
        except TimeoutError:
            await self.aclose()
            raise TaskError(f"{argv[0]} did not answer within {self._seconds:g} s; see {log}") from None

    async def _answers(self) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession() as http:
            while self._process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self._url}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(_PAUSE)
        raise TaskError(
            f"{self._argv[0]} ended with exit code {self._process.returncode}; see "
            f"{self._directory / 'openenv-server.log'}"
        )
