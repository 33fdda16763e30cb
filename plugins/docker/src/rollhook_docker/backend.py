"""Sandboxes in containers of Docker or Podman."""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import re
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec
from rollhook_docker.engine import WAY_OUT, Engine, EngineApiError, address
from rollhook_docker.images import Images
from rollhook_docker.sandbox import DockerSandbox

if TYPE_CHECKING:
    from rollhook_docker import DockerSandboxConfig

LABEL = "rollhook.sandbox"
NONCE = "rollhook.nonce"
#: what root inside keeps: owning and reading any file, becoming another user, ending processes, low ports
BASIC_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID",
    "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
_CAPABILITIES = frozenset(
    {
        "image", "image_build", "isolation", "network_off", "network_on", "separate_streams", "user",
        "memory_limit", "pids_limit", "cpu_limit", "adopt",
    }
)  # fmt: skip
#: a limit -> what the engine's information says when its kernel cannot enforce it
_LIMITS = {"memory_limit": "MemoryLimit", "pids_limit": "PidsLimit", "cpu_limit": "CpuCfsQuota"}


class DockerSandboxes(SandboxBackend):
    """Containers, through the Engine API of Docker or Podman."""

    config: DockerSandboxConfig

    def __init__(self, config: DockerSandboxConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._engine: Engine | None = None
        self._images: Images | None = None
        self._starting = asyncio.Lock()
        self._undoing: set[asyncio.Task[Any]] = set()
        self._unlimited: frozenset[str] = frozenset()

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        """What containers can do; once started, without the limits that the engine's kernel lacks."""
        return (_CAPABILITIES | ({"disk_limit"} if self.config.disk_quota else set())) - self._unlimited

    def missing(self) -> Sequence[str]:
        """Return that there is no socket of an engine, or what is wrong with its address."""
        try:
            where = address(self.config, os.environ)
        except SandboxError as error:
            return [str(error)]
        if where.path and not Path(where.path).is_socket():
            return [f"no container engine: there is no socket at {where.path}; {WAY_OUT}"]
        return []

    async def start(self) -> None:
        """Reach the engine."""
        await self._connected()

    async def _connected(self) -> Engine:
        async with self._starting:
            if self._engine is None:
                engine = await Engine.connect(self.config)
                self._unlimited = frozenset(
                    limit for limit, word in _LIMITS.items() if engine.info.get(word) is False
                )
                self._images = Images(
                    engine, self.config, self.context.cache / "docker-builds", self.context.secret
                )
                self._engine = engine
            return self._engine

    async def _image(self, spec: SandboxSpec) -> str:
        await self._connected()
        assert self._images is not None
        return await self._images.have(spec)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Make one container and start it."""
        self.refuse(spec)
        engine = await self._connected()
        image = await self._image(spec)
        name = f"rollhook-{_nonce(spec.labels) or secrets.token_hex(8)}"
        making = asyncio.create_task(self._make(engine, name, image, spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._later(self._undo(engine, name, making))
            raise

    async def _make(self, engine: Engine, name: str, image: str, spec: SandboxSpec) -> DockerSandbox:
        wanted = self._container(image, spec)
        try:
            container_id = await self._create(engine, name, image, wanted)
            async with engine.asked("the start of a sandbox"):
                await engine.client.containers.container(container_id).start()
        except BaseException:
            await asyncio.shield(self._remove(engine, name))
            raise
        return DockerSandbox(engine, container_id, spec)

    async def _create(self, engine: Engine, name: str, image: str, wanted: dict[str, Any]) -> str:
        """Create the container; one of the same nonce is from a try whose answer was lost, and goes."""
        for again in (False, True):
            try:
                async with engine.asked("a sandbox"):
                    return str((await engine.client.containers.create(wanted, name=name)).id)
            except EngineApiError as error:
                if again:
                    raise
                if error.status == 409 or "already in use" in str(error):
                    await self._remove(engine, name)
                elif error.status == 404:
                    assert self._images is not None
                    self._images.forget(image)
                    raise SandboxError(f"{error}; it has just been there", kind="retryable") from error
                else:
                    raise
        raise AssertionError("unreachable")

    def _container(self, image: str, spec: SandboxSpec) -> dict[str, Any]:
        """Return the request that makes the container (`POST /containers/create`)."""
        config = self.config
        memory = spec.memory_bytes or config.memory_bytes
        cpus = spec.cpus or config.cpus
        lifetime = spec.lifetime_seconds or config.lifetime_seconds
        host: dict[str, Any] = {
            "Init": True,
            "NetworkMode": "bridge" if spec.network else "none",
            "PidsLimit": spec.pids or config.pids,
            "CapDrop": ["ALL"],
            "CapAdd": [*BASIC_CAPABILITIES, *config.capabilities],
            "SecurityOpt": ["no-new-privileges"],
        }
        if memory:
            host |= {"Memory": memory, "MemorySwap": memory}
        if cpus:
            host["NanoCpus"] = int(cpus * 1e9)
        if config.runtime:
            host["Runtime"] = config.runtime
        if spec.disk_bytes and config.disk_quota:
            host["StorageOpt"] = {"size": str(spec.disk_bytes)}
        return {
            "Image": image,
            "Entrypoint": ["sleep"],
            "Cmd": [str(max(1, round(lifetime)))],
            "WorkingDir": spec.workdir,
            "Env": [f"{key}={value}" for key, value in spec.env.items()],
            "Labels": {**spec.labels, LABEL: "docker"},
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }

    def refuse(self, spec: SandboxSpec) -> None:
        """Say what these sandboxes cannot do."""
        super().refuse(spec)
        if not posixpath.isabs(spec.workdir):
            raise SandboxError(f"workdir {spec.workdir!r} is not an absolute path", kind="user")

    async def _undo(self, engine: Engine, name: str, making: asyncio.Task[DockerSandbox]) -> None:
        await asyncio.wait({making})
        if not making.cancelled() and making.exception() is None:
            await self._remove(engine, name)

    async def _remove(self, engine: Engine, name: str) -> None:
        try:
            async with engine.asked("the end of a sandbox"):
                await engine.client.containers.container(name).delete(force=True, v=True)
        except EngineApiError as error:
            # 409: its removal is under way
            if error.status != 409 and not error.gone:
                raise

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> DockerSandbox:
        """Attach to a container whose create gave no answer, and start it if it was not."""
        engine = await self._connected()
        container = engine.client.containers.container(sandbox_id)
        try:
            async with engine.asked("a sandbox"):
                state = (await container.show())["State"]["Status"]
                if state == "created":
                    await container.start()
                elif state != "running":
                    raise SandboxDead(f"sandbox {sandbox_id} is {state}")
        except EngineApiError as error:
            if error.gone:
                raise SandboxDead(f"sandbox {sandbox_id} is gone") from error
            raise
        return DockerSandbox(engine, sandbox_id, spec)

    async def bake(self, spec: SandboxSpec) -> str:
        """Fetch or build the image."""
        self.refuse(spec)
        return await self._image(spec)

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the containers that carry all these labels, ended ones too."""
        engine = await self._connected()
        wanted = [LABEL, *(f"{key}={value}" for key, value in labels.items())]
        async with engine.asked("its sandboxes"):
            found = await engine.client.containers.list(all=True, filters=json.dumps({"label": wanted}))
        return [
            SandboxInfo(
                str(entry.id),
                {key: value for key, value in (entry["Labels"] or {}).items() if key != LABEL},
                float(entry["Created"]),
            )
            for entry in found
        ]

    async def delete(self, sandbox_id: str) -> None:
        """Delete a container with all that runs in it."""
        if not re.fullmatch(r"[0-9a-f]{12,64}", sandbox_id):
            raise SandboxError(f"{sandbox_id!r} is not the id of a container", kind="user")
        await self._remove(await self._connected(), sandbox_id)

    def retryable(self, error: Exception) -> bool:
        """Return whether another try may help."""
        return isinstance(error, SandboxError) and error.kind == "retryable"

    def ambiguous(self, error: Exception) -> bool:
        """Return whether a container may have been made all the same: not where the engine answered."""
        return not (isinstance(error, EngineApiError) and error.status) and super().ambiguous(error)

    def describe(self) -> Mapping[str, str]:
        """Return which engine this is and what it can enforce."""
        if self._engine is None:
            return {}
        info = self._engine.info
        disk = "by the storage driver" if self.config.disk_quota else "not limited"
        return {
            "engine": f"{self._engine.name} {info.get('ServerVersion', '?')} at {self._engine.where.shown}",
            "runtime": self.config.runtime or str(info.get("DefaultRuntime") or "the engine's default"),
            "limits": f"cgroup v{info.get('CgroupVersion', '?')}, disk {disk}"
            + "".join(f", no {limit}" for limit in sorted(self._unlimited)),
        }

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undone)

    def _undone(self, task: asyncio.Task[Any]) -> None:
        self._undoing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.context.logger.warning("a cancelled create is left to the reaper: %s", error)

    async def aclose(self) -> None:
        """Finish what was cancelled, and disconnect."""
        while self._undoing:
            await asyncio.wait(set(self._undoing))
        if self._engine is not None:
            engine, self._engine = self._engine, None
            if self._images is not None:
                await self._images.aclose()
            await engine.aclose()


def _nonce(labels: Mapping[str, str]) -> str:
    nonce = labels.get(NONCE, "")
    return nonce if re.fullmatch(r"[0-9a-f]{8,32}", nonce) else ""
