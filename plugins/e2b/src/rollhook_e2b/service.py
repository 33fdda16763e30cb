"""The E2B service through its SDK: the only module that calls it, each call under a limit of our own.

Why every call runs in a task of its own that is let go when its time is up (measured, e2b 2.34 to 2.63): on
Python 3.11 `commands.run(timeout=T)` knows no limit once its stream is open; on 3.12 and later the limit of
a background command cancels the task that started it; reads and writes of files take twice their limit.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Mapping
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxInfo
from rollhook_e2b.errors import ServiceError, translate
from rollhook_e2b.templates import Parser, Plan, fill

if TYPE_CHECKING:
    from rollhook_e2b import E2BConfig

T = TypeVar("T")
#: the service's own page, at most
_PAGE = 100
#: beyond the SDK's own limit, in seconds
_GRACE = 5.0
#: before each question whether a sandbox runs whose envd does not answer though the service says so
_ASK_AGAIN = (0.0, 0.3, 1.0)


def _load() -> ModuleType:
    import e2b

    module: ModuleType = e2b
    return module


class Service:
    """One client of the service, for one event loop. Errors are SandboxError; the key is in none of them."""

    def __init__(self, sdk: ModuleType, config: E2BConfig, key: str) -> None:
        self._sdk: Any = sdk
        self._config = config
        self._key = key
        #: of one request, in seconds
        self.request_seconds = config.request_seconds
        #: how long an answer about a command that runs may be waited for, in seconds
        self.poll_seconds = config.poll_seconds
        self._places = asyncio.Semaphore(config.max_concurrent_requests)
        self._client: Any = sdk.E2B(
            api_key=key,
            domain=config.domain,
            api_url=config.api_url or f"https://api.{config.domain}",
            sandbox_url=config.sandbox_url,
            request_timeout=config.request_seconds,
            debug=False,
        )
        self._box: Any = self._client.AsyncSandbox
        taken = inspect.signature(self._box.create).parameters
        self._idempotent = "idempotency_key" in taken
        self._left: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, config: E2BConfig, key: str) -> Service:
        """Load the SDK, on a thread. Raises SandboxError(kind="user") where it is not installed."""
        try:
            sdk = await asyncio.to_thread(_load)
        except ImportError as error:
            raise SandboxError(
                f"the E2B SDK cannot be imported ({error}); pip install 'e2b>=2.53,<3'", kind="user"
            ) from error
        return cls(sdk, config, key)

    @property
    def version(self) -> str:
        """The SDK's version."""
        return version("e2b")

    @property
    def parse(self) -> Parser:
        """The SDK's Dockerfile parser."""
        from e2b.template.dockerfile_parser import parse_dockerfile

        parser: Parser = parse_dockerfile
        return parser

    async def call(self, what: str, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Await a call of the SDK for at most `seconds`, among `max_concurrent_requests`; see `within`."""
        try:
            await self._places.acquire()
        except BaseException:
            work.close()
            raise
        try:
            return await self.within(what, work, self.request_seconds if seconds is None else seconds)
        finally:
            self._places.release()

    async def within(self, what: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await a call of the SDK for at most `seconds` and a little more.

        Raises what `rollhook_e2b.errors` makes of its failure. A call that is out of time, or whose caller
        is cancelled, is cancelled and let go: it is not waited for.
        """
        task = asyncio.ensure_future(work)
        self._left.add(task)
        task.add_done_callback(self._ended)
        limit = seconds + _GRACE
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise ServiceError(f"{what}: no answer from E2B within {limit:g} s")
        if task.cancelled():  # by the SDK itself: its own limit of a stream
            raise ServiceError(f"{what}: the SDK gave up")
        if (error := task.exception()) is not None:
            raise translate(error, what, self._key) from error
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()

    # sandboxes

    async def create(
        self,
        template: str,
        *,
        seconds: int,
        labels: Mapping[str, str],
        env: Mapping[str, str],
        network: bool,
        nonce: str,
    ) -> Any:
        """Create a sandbox; asked again with the same nonce, the service answers with the same one.

        Where the SDK has no key for that, it may not send the request again by itself either.
        """
        once = {"idempotency_key": nonce} if self._idempotent else {"retries": 0}
        return await self.call(
            "creating a sandbox",
            self._box.create(
                template=template,
                timeout=seconds,
                metadata=dict(labels),
                envs=dict(env),
                allow_internet_access=network,
                **once,
            ),
        )

    async def connect(self, sandbox_id: str, seconds: int) -> Any:
        """Attach to a sandbox that is there."""
        return await self.call(
            f"sandbox {sandbox_id}: attaching", self._box.connect(sandbox_id, timeout=seconds)
        )

    async def listed(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        """Return the sandboxes that carry all these labels, paused ones too."""
        state = self._sdk.SandboxState
        query = self._sdk.SandboxQuery(metadata=dict(labels) or None, state=[state.RUNNING, state.PAUSED])
        pages = self._box.list(query=query, limit=_PAGE)
        found: dict[str, SandboxInfo] = {}
        while pages.has_next:
            for info in await self.call("listing sandboxes", pages.next_items()):
                kept = {str(name): str(value) for name, value in (info.metadata or {}).items()}
                if labels.items() <= kept.items():
                    started = info.started_at.timestamp() if info.started_at else None
                    found[info.sandbox_id] = SandboxInfo(info.sandbox_id, kept, started)
        return list(found.values())

    async def kill(self, sandbox_id: str) -> None:
        """Kill a sandbox; one that is gone is a success."""
        await self.call(f"deleting sandbox {sandbox_id}", self._box.kill(sandbox_id))

    async def extend(self, sandbox_id: str, seconds: int) -> None:
        """Let a sandbox live for so long from now."""
        await self.call(
            f"sandbox {sandbox_id}: extending its time", self._box.set_timeout(sandbox_id, seconds)
        )

    async def running(self, box: Any) -> bool:
        """Return whether commands can be run: its envd answers, if need be a moment later."""
        what = f"sandbox {box.sandbox_id}: asking"
        for pause in _ASK_AGAIN:
            await asyncio.sleep(pause)
            try:
                if await self.call(what, box.is_running()):
                    return True
                info = await self.call(what, self._box.get_info(box.sandbox_id))
            except SandboxDead:
                return False
            if info.state != self._sdk.SandboxState.RUNNING:
                return False
        return False

    # inside

    async def run(self, box: Any, script: str, seconds: float) -> str:
        """Run a short script as root with `bash -l -c` and return its stdout, whatever its exit code.

        Sent once. Raises ServiceError(kind="retryable") when it was killed (by the service, once its time is
        up) or nothing was heard of its end.
        """
        what = f"sandbox {box.sandbox_id}: running a command"
        work = box.commands.run(script, user="root", timeout=seconds, request_timeout=self.request_seconds)
        try:
            done = await self.within(what, work, seconds)
        except ServiceError as error:
            done = error.__cause__
            if not isinstance(done, self._sdk.CommandExitException):
                raise
            if done.exit_code < 0:
                raise ServiceError(f"{what}: it was killed before it ended") from done
        return str(done.stdout)

    async def upload(self, box: Any, path: str, data: bytes) -> None:
        """Write a file, as root."""
        seconds = self._config.transfer_seconds
        await self.call(
            f"sandbox {box.sandbox_id}: writing {path}",
            box.files.write(path, data, user="root", request_timeout=seconds),
            seconds,
        )

    async def download(self, box: Any, path: str) -> bytes:
        """Return a file's bytes, as root."""
        seconds = self._config.transfer_seconds
        return await self.call(
            f"sandbox {box.sandbox_id}: reading {path}", self._download(box, path, seconds), seconds
        )

    async def _download(self, box: Any, path: str, seconds: float) -> bytes:
        stream = await box.files.read(path, format="stream", user="root", request_timeout=seconds)
        async with stream as chunks:
            data = [chunk async for chunk in chunks]
        return await asyncio.to_thread(b"".join, data)

    # templates

    async def ready(self, alias: str) -> bool:
        """Return whether a template has a finished build: with a tag in its name E2B looks for one."""
        return bool(
            await self.call(
                f"template {alias}: asking", self._client.AsyncTemplate.exists(f"{alias}:default")
            )
        )

    async def start_build(self, plan: Plan, alias: str) -> Any:
        """Ask for a build, uploading its files, and return what it is known by; on a thread, it blocks."""
        return await self.call(
            f"template {alias}: asking for a build",
            asyncio.to_thread(self._start_build, plan, alias),
            self._config.transfer_seconds,
        )

    def _start_build(self, plan: Plan, alias: str) -> Any:
        sized = {"cpu_count": plan.cpus, "memory_mb": plan.memory_mib}
        template = self._client.Template
        builder = fill(template(file_context_path=plan.context or "/nonexistent"), plan)
        return template.build_in_background(
            builder, alias, **{name: value for name, value in sized.items() if value is not None}
        )

    async def build_status(self, build: Any, seen: int) -> tuple[str, list[str], str]:
        """Return a build's status, the lines of its log after the first `seen`, and why it failed."""
        status = await self.call(
            f"template {build.name}: asking for its build",
            self._client.AsyncTemplate.get_build_status(build, logs_offset=seen),
        )
        reason = status.reason.message if status.reason else ""
        return str(status.status.value), [entry.message for entry in status.log_entries], reason

    async def aclose(self) -> None:
        """Let go of calls that are still under way; the SDK's connections are the process's."""
        for task in list(self._left):
            task.cancel()
        if self._left:
            await asyncio.wait(set(self._left), timeout=_GRACE)
