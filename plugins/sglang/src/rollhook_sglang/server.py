"""One server of SGLang, on one node or across several: its processes, from start to stop."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollhook.engine.base import Placement, Process
from rollhook.engine.client import EngineClient
from rollhook.engine.server_info import ServerInfo
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook_sglang.command import ENVIRONMENT, Start, command
from rollhook_sglang.config import SGLangConfig

POLL_SECONDS = 0.5
#: seconds of one try to have a token generated; SGLang itself gives up after 20
GENERATE_SECONDS = 25.0
PORTS_TRIED = 3
#: what the placement replaces in an argument with the address of the process's node
NODE = "{host}"
TAIL_BYTES = 3000
#: a server's log is cut when it is larger
LOG_BYTES = 256 * 1024**2


class PortTakenError(EngineError):
    """Another process took the port between choosing and binding it."""


class Server:
    """One server. What it is called, `worker`, stays over restarts; `lock` is held by who starts it anew."""

    def __init__(
        self,
        config: SGLangConfig,
        version: str,
        placement: Placement,
        client: EngineClient,
        *,
        name: str,
        directory: Path,
        seed: int,
    ) -> None:
        self.worker = Worker("")
        self.info = ServerInfo()
        self.restarts = 0
        self.lock = asyncio.Lock()
        self._config = config
        self._version = version
        self._placement = placement
        self._client = client
        self._name = name
        self._directory = directory
        self._seed = seed
        self._processes: list[Process] = []

    async def start(self, model_dir: Path, weight_version: int) -> None:
        """Start it on a free port. Raises EngineError, with the end of its log, when it does not come up."""
        for tried in range(1, PORTS_TRIED + 1):
            try:
                return await self._start(self._placement.free_port(), model_dir, weight_version)
            except PortTakenError:
                if tried == PORTS_TRIED:
                    raise
        raise AssertionError("unreachable")

    async def restart(self, model_dir: Path, weight_version: int) -> None:
        """Stop what is left of it and start it anew on its node and port; EngineError as from `start`."""
        await self.stop()
        address, _, port = self.worker.url.removeprefix("http://").rpartition(":")
        node = address.strip("[]") if self._host() == NODE else None
        await self._start(int(port), model_dir, weight_version, node)

    async def stop(self) -> None:
        """End its processes; safe to call twice."""
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.stop() for process in processes))

    async def alive(self) -> bool:
        """Return whether all its processes run."""
        return bool(self._processes) and all([await process.alive() for process in self._processes])

    def last_words(self) -> str:
        """Return the end of its logs."""
        return _said([(log, 0) for log in self._logs()])

    async def rotate_logs(self) -> None:
        """Move a log that has grown beyond `LOG_BYTES` to `<name>.log.1`, replacing what is there.

        The server appends to its log, so that it goes on writing to it, from the beginning; a line that comes
        between copying and cutting may be lost.
        """
        for log in self._logs():
            if _size(log) > LOG_BYTES:
                await asyncio.to_thread(_rotate, log)

    async def _start(self, port: int, model_dir: Path, weight_version: int, node: str | None = None) -> None:
        marks = [(log, _size(log)) for log in self._logs()]
        try:
            await self._placed(port, model_dir, weight_version, node)
            await self._until_it_generates(marks)
            await self._check(weight_version)
        except BaseException:
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self.stop())
            raise

    async def _placed(self, port: int, model_dir: Path, weight_version: int, node: str | None) -> None:
        """Start the processes. Raises EngineError when the cluster has no room for them in time."""
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._start_processes(port, model_dir, weight_version, node)
        except TimeoutError:
            gpus, nodes = self._config.gpus_needed / self._config.nnodes, self._config.nnodes
            raise EngineError(
                f"the SGLang server {self._name} found no {gpus:g} free GPUs on each of {nodes} nodes within"
                f" {self._config.start_timeout:g} s (engine.start_timeout)"
            ) from None

    def _host(self) -> str:
        """Return the address to listen on; NODE for that of the process's node."""
        host = self._config.host
        return {"auto": self._placement.address, "node": NODE}.get(host, host)

    async def _start_processes(
        self, port: int, model_dir: Path, weight_version: int, node: str | None
    ) -> None:
        """Start the process of each node, the first one on `node`; that says where the others find it."""
        config = self._config
        host = self._host()
        first = f"{{host}}:{self._placement.free_port()}" if config.nnodes > 1 else None
        for rank, log in enumerate(self._logs()):
            on = port if rank == 0 else self._placement.free_port()
            start = Start(model_dir, weight_version, host, on, self._seed, rank, first)
            process = await self._placement.start_process(
                f"{self._name}-{rank}",
                command(config, self._version, start),
                env=ENVIRONMENT | config.env,
                log=log,
                gpus=config.gpus_needed / config.nnodes,
                node=node if rank == 0 else None,
            )
            self._processes.append(process)
            if rank == 0:
                address = await process.host() if host == NODE else host
                self.worker = Worker(f"http://{_in_url(address)}:{port}")
                first = first and first.replace("{host}", _in_url(address))

    async def _until_it_generates(self, marks: Sequence[tuple[Path, int]]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.start_timeout
        while not await self._client.health_generate(self.worker, GENERATE_SECONDS):
            if not await self.alive():
                text = _said(marks)
                kind = PortTakenError if "address already in use" in text.lower() else EngineError
                raise kind(f"{self._named()} ended while starting; its log says: {text}")
            if loop.time() >= deadline:
                raise EngineError(
                    f"{self._named()} did not generate within {self._config.start_timeout:g} s"
                    f" (engine.start_timeout); its log says: {_said(marks)}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _check(self, weight_version: int) -> None:
        """Raise EngineError when what came up is not what was started."""
        self.info = await self._client.server_info(self.worker)
        served = await self._client.weight_version(self.worker)
        wanted = self._config.get("dp_size") or 1
        if self.info.dp_size != wanted:
            raise EngineError(
                f"{self._named()} has {self.info.dp_size} data-parallel ranks, not {wanted} (engine.dp_size)"
            )
        if served != weight_version:
            raise EngineError(f"{self._named()} serves weight version {served}, not {weight_version}")

    def _logs(self) -> list[Path]:
        names = [self._name, *(f"{self._name}-node-{rank}" for rank in range(1, self._config.nnodes))]
        return [self._directory / f"{name}.log" for name in names]

    def _named(self) -> str:
        return f"the SGLang server {self._name} at {self.worker.url} ({self._logs()[0]})"


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _rotate(log: Path) -> None:
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _said(marks: Sequence[tuple[Path, int]]) -> str:
    """Return the end of what was written to the logs since the marks, on one line."""
    lines: list[str] = []
    for log, offset in marks:
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(offset, _size(log) - TAIL_BYTES))
            lines += file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    return " | ".join(line.strip() for line in lines if line.strip()) or "nothing"
