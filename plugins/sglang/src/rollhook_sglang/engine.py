"""`engine.sglang`: starts SGLang's servers, watches over them and starts those anew that die."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext
from rollhook.engine.base import Engine, Placement
from rollhook.engine.client import EngineClient
from rollhook.engine.weights import update_workers
from rollhook.errors import EngineError, RollhookError
from rollhook.router import Worker
from rollhook_sglang import releases
from rollhook_sglang.command import shape
from rollhook_sglang.config import SGLangConfig
from rollhook_sglang.server import Server

#: seconds between looks at a server's processes
WATCH_SECONDS = 2.0
#: a server that has lived so long has its restarts forgiven
STEADY_SECONDS = 3600.0


class SGLangEngine(Engine):
    """One or several servers, one worker each, whatever its data-parallel ranks."""

    config: SGLangConfig

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self.servers: list[Server] = []
        self._client = EngineClient()
        self._watchers: list[asyncio.Task[None]] = []
        self._newest: tuple[Path, int] | None = None

    @classmethod
    def options(cls, config: SGLangConfig) -> Sequence[str]:
        """Return a server's arguments in the words of `version`, by default the oldest supported release."""
        return shape(config, config.version or ".".join(map(str, releases.OLDEST)))

    async def start(self, placement: Placement, model_dir: Path, weight_version: int) -> Sequence[Worker]:
        """Start the servers with these weights and return their workers, all of which have generated."""
        version = await self._release()
        self._newest = (model_dir, weight_version)
        self.servers = [
            Server(
                self.config,
                version,
                placement,
                self._client,
                name=f"sglang-{index}",
                directory=self.context.scratch,
                seed=(self.context.seed + index) % 2**31,
            )
            for index in range(self.config.engines)
        ]
        try:
            async with asyncio.TaskGroup() as starting:
                for server in self.servers:
                    starting.create_task(server.start(model_dir, weight_version))
        except ExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        self._watchers = [asyncio.ensure_future(self._watch(server)) for server in self.servers]
        return [server.worker for server in self.servers]

    def describe(self) -> Mapping[str, str]:
        """Say which release serves, and how it is cut up."""
        infos = [server.info for server in self.servers]
        releases_here = "/".join(sorted({info.version for info in infos}))
        ranks = {"ranks each": str(infos[0].dp_size)} if infos else {}
        return {"SGLang": releases_here, "servers": str(len(infos)), **ranks}

    async def stop(self) -> None:
        """Stop all servers."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers)
        await asyncio.gather(*(server.stop() for server in self.servers))
        await self._client.aclose()

    def published(self, model_dir: Path, weight_version: int) -> None:
        """Note the newest weights: a server that is started anew starts with them."""
        self._newest = (model_dir, weight_version)

    async def revive(self, worker: Worker, model_dir: Path, weight_version: int) -> bool:
        """Have a server serve these weights: started anew, unless it has just been."""
        server = next((each for each in self.servers if each.worker.url == worker.url), None)
        if server is None:
            return False
        self._newest = (model_dir, weight_version)
        async with server.lock:  # others may be published meanwhile
            if not await self._serves(server, self._newest[1]):
                await server.restart(*self._newest)
        return True

    async def _release(self) -> str:
        """Return the release of SGLang that is to run. Raises EngineError without one that is supported."""
        version = self.config.version
        if version is None:
            found = await asyncio.to_thread(releases.installed, self.config.python, self.config.env)
            if found is None:
                python = self.config.python or "this Python"
                raise EngineError(
                    f"{python} has no SGLang: set engine.python to an interpreter that has it", kind="user"
                )
            version = found.version
        if not releases.supported(version):
            raise EngineError(releases.unsupported(version), kind="user")
        return version

    async def _serves(self, server: Server, weight_version: int) -> bool:
        """Return whether a server generates, with these weights; one that hangs costs a few seconds."""
        if not await self._client.health(server.worker):
            return False
        try:
            served = await self._client.weight_version(server.worker)
        except EngineError:
            return False
        return served == weight_version and await self._client.health_generate(server.worker)

    async def _watch(self, server: Server) -> None:
        """Start a server anew whenever it has died, with growing pauses, until its restarts are used up."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                if server.lock.locked():
                    continue
                if await server.alive():
                    await server.rotate_logs()
                    continue
            except Exception:  # of the cluster or the disk: whatever it is, the server is looked at again
                self.context.logger.exception("%s could not be looked at", server.worker.url)
                continue
            if loop.time() - since > STEADY_SECONDS:
                server.restarts = 0
            if server.restarts == self.config.max_restarts:
                self.context.logger.error(
                    "%s died and is left so after %d restarts", server.worker.url, server.restarts
                )
                return
            pause = self.config.restart_seconds * 2**server.restarts
            server.restarts += 1
            self.context.logger.warning(
                "%s died and is started anew in %g s; its log ends: %s",
                server.worker.url,
                pause,
                server.last_words(),
            )
            await asyncio.sleep(pause)
            async with server.lock:
                await self._mend(server)
            since = loop.time()

    async def _mend(self, server: Server) -> None:
        """Start a dead server anew and give it the weights that were published meanwhile."""
        assert self._newest is not None
        try:
            if await server.alive():
                return
            await server.restart(*self._newest)
            served = await self._client.weight_version(server.worker)
            if served != self._newest[1]:
                await update_workers(self._client, [server.worker], *self._newest, "abort")
        except RollhookError as error:  # of the engine, or of the cluster: the next look tries again
            self.context.logger.error("%s", error)
        except Exception:  # a fault of ours or of the cluster's must not end the watch
            self.context.logger.exception("%s could not be started anew", server.worker.url)
