"""Images: fetched by reference, or built from a Dockerfile under a name made of what goes into it."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxSpec, transfer
from rollhook_docker.engine import Engine, EngineApiError

if TYPE_CHECKING:
    from rollhook_docker import DockerSandboxConfig

REPOSITORY = "localhost/rollhook-build"
#: name of the Dockerfile within the context, which may hold another one
_DOCKERFILE = ".rollhook.Dockerfile"
_TAIL = 2000
_LOCK_POLL = 0.1
_PIECE = 1 << 18
# what the engines say where the reference or its registry is at fault
_USER = (
    "not found",
    "no such image",
    "manifest unknown",
    "denied",
    "unauthorized",
    "authentication required",
)


class Images:
    """The images of one engine; each is made once, however many ask."""

    def __init__(
        self, engine: Engine, config: DockerSandboxConfig, locks: Path, secret: Callable[[str], str]
    ) -> None:
        self._engine = engine
        self._config = config
        self._locks = locks
        self._secret = secret
        self._making: dict[str, asyncio.Task[None]] = {}
        self._present: set[str] = set()
        self._tags: dict[object, str] = {}

    async def have(self, spec: SandboxSpec) -> str:
        """Return the name of the image that a sandbox of this spec needs; it is there then."""
        limit = spec.build_seconds or self._config.build_seconds
        if spec.dockerfile is None:
            name = spec.image or self._config.image
            await self._once(name, lambda: self._fetch(name, limit))
            return name
        return await self._built(spec.dockerfile, spec.context_dir, limit)

    def forget(self, name: str) -> None:
        """Ask the engine again for an image that it turned out not to have."""
        self._present.discard(name)

    async def _once(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the one making of an image, which goes on when its first asker is cancelled."""
        if name in self._present:
            return
        task = self._making.get(name)
        if task is None:
            task = self._making[name] = asyncio.create_task(make())
            task.add_done_callback(lambda _: self._making.pop(name, None))
        await asyncio.shield(task)
        self._present.add(name)

    # by reference

    async def _fetch(self, name: str, limit: float) -> None:
        there = self._config.pull != "always" and await self._there(name)
        if there:
            return
        if self._config.pull == "never":
            raise SandboxError(
                f"the container engine has no image {name}, and `pull: never` forbids fetching it",
                kind="user",
            )
        try:
            async with asyncio.timeout(limit):
                await self._engine.make(
                    f"the image {name}",
                    "images/create",
                    lambda _: None,
                    params={"fromImage": _with_tag(name)},
                    headers=self._login(_registry(name)),
                )
        except EngineApiError as error:
            if error.kind != "retryable" and any(word in str(error).lower() for word in _USER):
                raise SandboxError(str(error), kind="user") from error
            raise
        except TimeoutError:
            raise SandboxError(f"the image {name} was not fetched within {limit:g} s", kind="user") from None

    def _login(self, registry: str) -> dict[str, str]:
        """Return the header that carries a user and a password for a registry, if the recipe names one."""
        reference = self._config.registry_auth.get(registry)
        if reference is None:
            return {}
        user, _, password = self._secret(str(reference)).partition(":")
        auth = {"username": user, "password": password, "serveraddress": registry}
        return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(auth).encode()).decode()}

    async def _there(self, name: str) -> bool:
        try:
            async with self._engine.asked(f"the image {name}"):
                await self._engine.client.images.inspect(name)
        except EngineApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    # from a Dockerfile

    async def _built(self, dockerfile: str, context_dir: str | None, limit: float) -> str:
        root = Path(context_dir) if context_dir is not None else None
        state = await asyncio.to_thread(_state, root)
        key = (dockerfile, context_dir, state)
        name = self._tags.get(key)
        if name is None:
            with tempfile.TemporaryFile() as archive:
                digest = await asyncio.to_thread(_pack, dockerfile, root, cast(BinaryIO, archive))
            name = self._tags[key] = f"{REPOSITORY}:{digest}"
        await self._once(name, lambda: self._build(name, dockerfile, root, limit))
        return name

    async def _build(self, name: str, dockerfile: str, root: Path | None, limit: float) -> None:
        async with _locked(self._locks / f"{name.rpartition(':')[2]}.lock"):
            if await self._there(name):
                return
            log: deque[str] = deque(maxlen=400)
            try:
                with tempfile.TemporaryFile() as archive:
                    stream = cast(BinaryIO, archive)
                    await asyncio.to_thread(_pack, dockerfile, root, stream)
                    stream.seek(0)
                    async with asyncio.timeout(limit):
                        await self._engine.make(
                            "a build",
                            "build",
                            log.append,
                            params={"t": name, "dockerfile": _DOCKERFILE, "rm": "1", "forcerm": "1"},
                            headers={"Content-Type": "application/x-tar"},
                            data=_pieces(stream),
                        )
            except TimeoutError:
                raise SandboxError(
                    f"the image was not built within {limit:g} s; its log ends: {_tail(log)}", kind="user"
                ) from None
            except EngineApiError as error:
                if error.kind == "retryable":
                    raise
                raise SandboxError(
                    f"the image could not be built: {error}; the log ends: {_tail(log)}", kind="user"
                ) from error
            if not await self._there(name):
                raise SandboxError(
                    f"the build of the image broke off; its log ends: {_tail(log)}", kind="retryable"
                )

    async def aclose(self) -> None:
        """Break off what is being made."""
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a lock that other processes on this host respect; it ends with this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL)
        yield
    finally:
        os.close(fd)


def _state(root: Path | None) -> object:
    """Return what changes when a file of the context does, without reading them."""
    if root is None:
        return None
    plan = _plan(root)
    stats = [
        (name, mode, (info := source.stat()).st_mtime_ns, info.st_size) for name, source, mode in plan.files
    ]
    return (tuple(stats), tuple(plan.directories), tuple(plan.links))


def _plan(root: Path) -> transfer.UploadPlan:
    try:
        plan, report = transfer.plan_upload(root)
    except OSError as error:
        raise SandboxError(f"the build context {root} cannot be used: {error}", kind="user") from error
    if report.skipped:
        names = ", ".join(name for name, _ in report.skipped)
        raise SandboxError(f"the build context {root} holds what no image can: {names}", kind="user")
    if any(name == _DOCKERFILE for name, _, _ in plan.files):
        raise SandboxError(f"the build context {root} may not hold {_DOCKERFILE}", kind="user")
    return plan


def _pack(dockerfile: str, root: Path | None, archive: BinaryIO) -> str:
    """Write the context as a tar that depends on nothing but names, modes and contents; return its digest."""
    with tempfile.TemporaryDirectory(prefix="rollhook-build-") as scratch:
        extra = Path(scratch) / _DOCKERFILE
        extra.write_text(dockerfile)
        plan = _plan(root) if root is not None else transfer.UploadPlan(Path(scratch))
        plan.files.append((_DOCKERFILE, extra, 0o644))
        for part in (plan.files, plan.directories, plan.links):
            part.sort(key=lambda entry: entry[0])
        transfer.pack(plan, archive)
    archive.seek(0)
    digest = hashlib.sha256()
    while piece := archive.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()[:24]


def _registry(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def _with_tag(name: str) -> str:
    """Name one image: without a tag or a digest, the engine would fetch every tag."""
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


async def _pieces(stream: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(stream.read, _PIECE):
        yield piece


def _tail(log: deque[str]) -> str:
    return "".join(log).strip()[-_TAIL:] or "(empty)"
