"""`engine.transformers`: starts server processes and waits until they are healthy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext
from rollhook.engine.base import Engine, Placement, Process
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook_torch import quiet
from rollhook_torch.config import EngineConfig

POLL_SECONDS = 0.1
STARTS_PER_PROCESS = 3
#: what the placement replaces in an argument with the address of the process's node
NODE = "{host}"


class TransformersEngine(Engine):
    """One or several `rollhook_torch.server` processes, one worker each."""

    config: EngineConfig

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self._processes: dict[Worker, Process] = {}
        self._logs: dict[Worker, Path] = {}
        self._placement: Placement | None = None

    async def start(self, placement: Placement, model_dir: Path, weight_version: int) -> Sequence[Worker]:
        """Start the servers with these weights and return their workers, all healthy."""
        self._placement = placement
        starts = (self._start(index, model_dir, weight_version) for index in range(self.config.processes))
        results = await asyncio.gather(*starts, return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException)]
        if failures:
            await self.stop()
            raise failures[0]
        return [r for r in results if isinstance(r, Worker)]

    async def stop(self) -> None:
        """Stop all servers."""
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(process.stop() for process in processes))

    async def revive(self, worker: Worker, model_dir: Path, weight_version: int) -> bool:
        """Start a new server on the port of a dead worker."""
        process = self._processes.pop(worker, None)
        if process is None or self._placement is None:
            return False
        log = self._logs[worker]
        await process.stop()
        host, _, port = worker.url.removeprefix("http://").rpartition(":")
        node = host.strip("[]") if self._host() == NODE else None
        await self._start_on(int(port), log, model_dir, weight_version, node)
        return True

    async def _start(self, index: int, model_dir: Path, weight_version: int) -> Worker:
        assert self._placement is not None
        log = self.context.scratch / f"engine-{index}.log"
        for attempt in range(STARTS_PER_PROCESS):
            port = self._placement.free_port()
            try:
                return await self._start_on(port, log, model_dir, weight_version)
            except PortTakenError:
                if attempt + 1 == STARTS_PER_PROCESS:
                    raise
        raise AssertionError("unreachable")

    async def _start_on(
        self, port: int, log: Path, model_dir: Path, weight_version: int, node: str | None = None
    ) -> Worker:
        assert self._placement is not None
        offset = _size(log)
        process = await self._placement.start_process(
            f"engine-{port}",
            self._argv(port, model_dir, weight_version),
            env=quiet.ENVIRONMENT,
            log=log,
            gpus=self.config.gpus,
            node=node,
        )
        host = await process.host() if self._host() == NODE else self._host()
        worker = Worker(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        self._processes[worker] = process
        self._logs[worker] = log
        try:
            await self._until_healthy(worker, process, log, offset)
        except BaseException:
            del self._processes[worker]
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(process.stop())
            raise
        return worker

    def _host(self) -> str:
        """Return the address to listen on; NODE for that of the process's node."""
        assert self._placement is not None
        return {"auto": self._placement.address, "node": NODE}.get(self.config.host, self.config.host)

    async def _until_healthy(self, worker: Worker, process: Process, log: Path, offset: int) -> None:
        import aiohttp

        deadline = asyncio.get_running_loop().time() + self.config.start_timeout
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(worker.url + "/health") as response:
                        if response.status == 200:
                            return
                if not await process.alive():
                    text = _since(log, offset)
                    error = PortTakenError if "address already in use" in text else EngineError
                    raise error(
                        f"the engine at {worker.url} ended while starting; its log {log} says: {text}"
                    )
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(
                        f"the engine at {worker.url} was not healthy within {self.config.start_timeout:g} s; "
                        f"its log {log} says: {_since(log, offset)}"
                    )
                await asyncio.sleep(POLL_SECONDS)

    def _argv(self, port: int, model_dir: Path, weight_version: int) -> list[str]:
        config = self.config
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.processes)
        argv = [sys.executable, "-m", "rollhook_torch.server", "--model", str(model_dir)]
        argv += ["--host", self._host(), "--port", str(port), "--weight-version", str(weight_version)]
        argv += ["--threads", str(threads), "--dtype", config.dtype, "--device", config.device]
        argv += ["--max-batch", str(config.max_batch), "--prefill-tokens", str(config.prefill_tokens)]
        argv += ["--prefix-cache-bytes", str(config.prefix_cache_bytes)]
        if config.context_length is not None:
            argv += ["--context-length", str(config.context_length)]
        return argv


class PortTakenError(EngineError):
    """Another process took the port between choosing and binding it."""


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _since(log: Path, offset: int, size: int = 2000) -> str:
    """Return the end of what was written to a log since `offset`, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(offset, _size(log) - size))
            text = file.read(size).decode("utf-8", "replace")
    except OSError:
        return "nothing"
    return " | ".join(line.strip() for line in text.splitlines() if line.strip()) or "nothing"
