"""The backend: making, finding and deleting sandboxes of Daytona through the SDK 0.x."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec
from rollhook.sandbox.lease import PREFIX
from rollhook_daytona import DaytonaConfig
from rollhook_daytona.dockerfile import embed, parse
from rollhook_daytona.errors import RefusedForNow, translate
from rollhook_daytona.rest import Rest
from rollhook_daytona.sandbox import DaytonaSandbox

logger = logging.getLogger(__name__)

#: a label of our own: what a create without an answer has made is found by it
_CREATE = PREFIX + "create"
_GIB = 1 << 30
#: seconds after which leftovers of a create are looked for; lists lag
_LOOKS = (0.0, 1.0, 3.0, 10.0)
_LAST_LOOK = 10.0
#: looks, `request_seconds` apart, that may show nothing of a create before it is given up
_UNSEEN = 2
_LOG_TAIL = 2000


class DaytonaSandboxes(SandboxBackend):
    """Sandboxes of one organisation. The SDK's client belongs to the loop that first uses it."""

    config: DaytonaConfig
    elsewhere = True
    capabilities = frozenset(
        {
            "image",
            "image_build",
            "isolation",
            "network_off",
            "network_on",
            "network_allowlist",
            "adopt",
            "separate_streams",
            "user",
        }
    )

    def __init__(self, config: DaytonaConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.account = f"{config.api_url} {config.target or ''}".strip()
        self.requests = asyncio.Semaphore(config.max_requests)
        self._key = ""
        self._client: Any = None
        self._sdk: ModuleType | None = None
        self._rest: Rest | None = None
        self._opening = asyncio.Lock()
        self._chores: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Load the SDK and ask for one page of sandboxes: raises for a key that is not valid."""
        await self._open()
        await (await self.rest()).list({_CREATE: "nobody"})

    async def _open(self) -> tuple[Any, ModuleType]:
        """Return the client and the SDK; both are made on a thread, for they take a second."""
        async with self._opening:
            if self._closed:
                raise SandboxError("the Daytona backend is closed")
            if self._client is None:
                self._client, self._sdk = await asyncio.to_thread(self._build)
            assert self._sdk is not None
            return self._client, self._sdk

    def _build(self) -> tuple[Any, ModuleType]:
        try:
            import daytona
        except ImportError as error:
            raise SandboxError(
                f"the Daytona SDK cannot be loaded ({error}); run: pip install 'daytona>=0.180,<1'",
                kind="user",
            ) from error
        settings = daytona.DaytonaConfig(
            api_key=self._secret(),
            api_url=self.config.api_url,
            target=self.config.target,
            connection_pool_maxsize=None,
        )
        return daytona.AsyncDaytona(settings), daytona

    def _secret(self) -> str:
        if not self._key:
            self._key = self.context.secret(str(self.config.api_key))
        return self._key

    async def rest(self) -> Rest:
        """Return the session for what the SDK does not do well."""
        if self._rest is None:
            key = await asyncio.to_thread(self._secret)
            if self._rest is None:
                self._rest = Rest(self.config.api_url, key, self.config.request_seconds)
        return self._rest

    def translate(self, error: Exception, what: str) -> SandboxError:
        """Return what an error means; see `rollhook_daytona.errors`."""
        return translate(error, what, key=self._key, quota_wait=self.config.quota_wait_seconds)

    # making

    async def create(self, spec: SandboxSpec) -> DaytonaSandbox:
        """Make a sandbox; what a failed or cancelled call has made is deleted in the background.

        But for one under a lease whose reply was lost: that is the pool's to adopt.
        """
        self.refuse(spec)
        client, sdk = await self._open()
        nonce = secrets.token_hex(8)
        params = await asyncio.to_thread(self._params, sdk, spec, nonce)
        limit = self.config.create_seconds + (spec.build_seconds or self.config.build_seconds)
        try:
            async with asyncio.timeout(limit + self.config.request_seconds):
                handle = await self._created(client.create(params, timeout=math.ceil(limit)), nonce)
            return await self._attach(handle, spec)
        except asyncio.CancelledError:
            self._reclaim(nonce)
            raise
        except Exception as error:
            failure = await self._explain(error, nonce)
            refused = 400 <= (getattr(error, "status_code", None) or 0) < 500
            if not refused and not (self.ambiguous(failure) and PREFIX + "nonce" in spec.labels):
                self._reclaim(nonce)
            raise failure from error

    async def _created(self, creating: Coroutine[Any, Any, Any], nonce: str) -> Any:
        """Wait for a create, but not for one of which the service shows nothing: its request was lost."""
        call, unseen = asyncio.create_task(creating), 0
        try:
            while not (await asyncio.wait({call}, timeout=self.config.request_seconds))[0]:
                try:
                    unseen = 0 if await (await self.rest()).list({_CREATE: nonce}) else unseen + 1
                except SandboxError as error:
                    logger.info("whether a create goes on is not known: %s", error)
                if unseen >= _UNSEEN:
                    raise SandboxError("Daytona, making a sandbox: no answer in time", kind="retryable")
            return call.result()
        finally:
            call.cancel()
            await asyncio.wait({call})

    async def _attach(self, handle: Any, spec: SandboxSpec) -> DaytonaSandbox:
        sandbox = DaytonaSandbox(self, handle, spec)
        await sandbox.settle()
        return sandbox

    def _params(self, sdk: ModuleType, spec: SandboxSpec, nonce: str) -> Any:
        """Return the SDK's description of this sandbox; reads the build context, so runs on a thread."""
        wanted: dict[str, Any] = {
            "image": self._image(sdk, spec),
            "resources": sdk.Resources(**resources(self.config, spec)),
            "os_user": self.config.os_user,
            "env_vars": dict(spec.env),
            "labels": {**spec.labels, _CREATE: nonce},
            "auto_stop_interval": self.config.auto_stop_minutes,
            "auto_delete_interval": self.config.auto_delete_minutes,
            "network_block_all": not (spec.network or spec.network_allow),
        }
        known = sdk.CreateSandboxFromImageParams.model_fields
        if spec.network_allow and not spec.network:
            wanted["domain_allow_list"] = ",".join(spec.network_allow)
            if "domain_allow_list" not in known:
                raise SandboxError(
                    f"the Daytona SDK {version('daytona')} is too old to allow only certain hosts on the "
                    "network; run: pip install --upgrade 'daytona<1'",
                    kind="user",
                )
        if spec.lifetime_seconds is not None and "ttl_minutes" in known:
            wanted["ttl_minutes"] = max(1, math.ceil(spec.lifetime_seconds / 60))
        return sdk.CreateSandboxFromImageParams(**wanted)

    def _image(self, sdk: ModuleType, spec: SandboxSpec) -> Any:
        if spec.dockerfile is None:
            return spec.image or self.config.image
        context = None if spec.context_dir is None else Path(spec.context_dir)
        base, commands = split_base(embed(spec.dockerfile, context, self.config.context_bytes))
        return sdk.Image.base(base).dockerfile_commands(commands)

    async def _explain(self, error: Exception, nonce: str) -> SandboxError:
        """Return what a create's failure means; a failed build is the caller's, with the end of its log."""
        failure = self.translate(error, "making a sandbox")
        if isinstance(failure, SandboxDead):  # 404: what it is made of, or it died at once
            failure = SandboxError(str(failure), kind="user")
        status = getattr(error, "status_code", None)
        if failure.kind != "retryable" or isinstance(failure, RefusedForNow) or status is not None:
            return failure
        try:
            built = await self._failed_build(nonce)
        except SandboxError:
            return failure
        return failure if built is None else SandboxError(f"Daytona, building an image: {built}", kind="user")

    async def _failed_build(self, nonce: str) -> str | None:
        """Return the end of the log of the sandbox that this create has left, if its build failed."""
        rest = await self.rest()
        for info in await rest.list({_CREATE: nonce}):
            if await rest.state(info.id) == "build_failed":
                return await rest.build_log(info.id, _LOG_TAIL)
        return None

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> DaytonaSandbox:
        """Attach to a sandbox that is up, or comes up in time."""
        client, _ = await self._open()
        rest = await self.rest()
        try:
            async with asyncio.timeout(self.config.create_seconds):
                while (state := await rest.state(sandbox_id)) != "started":
                    if state not in COMING:
                        raise SandboxDead(f"sandbox {sandbox_id} is {state}")
                    await asyncio.sleep(0.2)
                return await self._attach(await client.get(sandbox_id), spec)
        except TimeoutError as error:
            raise SandboxDead(f"sandbox {sandbox_id} does not come up") from error
        except SandboxError:
            raise
        except Exception as error:
            raise self.translate(error, "attaching to a sandbox") from error

    # finding and deleting

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the sandboxes that carry these labels."""
        found = await (await self.rest()).list(labels)
        return [
            SandboxInfo(info.id, {k: v for k, v in info.labels.items() if k != _CREATE}, info.created_at)
            for info in found
        ]

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox and wait until the service shows it no more."""
        await (await self.rest()).delete(sandbox_id)

    def _reclaim(self, nonce: str) -> None:
        if not self._closed:
            task = asyncio.create_task(self._delete_made(nonce))
            self._chores.add(task)
            task.add_done_callback(self._chores.discard)

    async def _delete_made(self, nonce: str) -> None:
        """Delete what a create without an answer has made, also if lists show it only later."""
        for pause in _LOOKS:
            if self._closing.is_set():
                return
            with contextlib.suppress(TimeoutError):  # the last look comes early when the client is closed
                await asyncio.wait_for(self._closing.wait(), pause)
            try:
                rest = await self.rest()
                for info in await rest.list({_CREATE: nonce}):
                    await rest.delete(info.id)
                    return
            except SandboxError as error:
                logger.info("what a create left is looked for again: %s", error)

    # what is known of it

    def retryable(self, error: Exception) -> bool:
        """Return whether another create may succeed: throttled, out of quota, or not reached."""
        return isinstance(error, SandboxError) and error.kind == "retryable"

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        """Return the price of the size that a sandbox of this spec gets."""
        size = resources(self.config, spec)
        return self.config.prices.per_second(size["cpu"], size["memory"] * _GIB)

    def describe(self) -> Mapping[str, str]:
        """Return the address, the region and what ends a forgotten sandbox."""
        config = self.config
        return {
            "api": config.api_url,
            "target": config.target or "of the organisation",
            "forgotten": f"stopped after {config.auto_stop_minutes} min without use, "
            f"deleted {config.auto_delete_minutes} min later",
        }

    async def aclose(self) -> None:
        """Close the client, after a last look for what failed creates have left."""
        self._closing.set()
        if self._chores:
            await asyncio.wait(set(self._chores), timeout=_LAST_LOOK)
        self._closed = True
        for task in set(self._chores):
            task.cancel()
        async with self._opening:
            client, self._client = self._client, None
            rest, self._rest = self._rest, None
        if client is not None:
            try:
                async with asyncio.timeout(_LAST_LOOK):
                    await client.close()
            except Exception as error:  # noqa: BLE001 - nothing depends on it any more
                logger.warning("the Daytona client did not close: %s", self.translate(error, "closing"))
        if rest is not None:
            await rest.aclose()


#: states from which a sandbox comes up by itself
COMING = frozenset(
    {
        "creating",
        "restoring",
        "starting",
        "pending_build",
        "building_snapshot",
        "pulling_snapshot",
        "resuming",
        "unknown",
    }
)


def resources(config: DaytonaConfig, spec: SandboxSpec) -> dict[str, int]:
    """Return processors, GiB of memory and GiB of disk: whole numbers, at least the floors."""
    return {
        "cpu": max(config.min_cpus, math.ceil(spec.cpus or 0)),
        "memory": max(config.min_memory_gib, math.ceil((spec.memory_bytes or 0) / _GIB)),
        "disk": max(config.min_disk_gib, math.ceil((spec.disk_bytes or 0) / _GIB)),
    }


def split_base(text: str) -> tuple[str, list[str]]:
    """Return what follows the first FROM, and the rest, with ARGs before it put into it.

    Raises SandboxError(kind="user") for a Dockerfile that does not begin with FROM.
    """
    arguments: dict[str, str] = {}
    instructions = parse(text)
    for number, instruction in enumerate(instructions):
        if instruction.word == "ARG":
            name, _, value = instruction.rest.partition("=")
            arguments[name] = value.strip("\"'")
        elif instruction.word == "FROM":
            base = re.sub(
                r"\$\{?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}?",
                lambda found: arguments.get(found[1]) or found[2] or "",
                instruction.rest,
            )
            return base, [following.text for following in instructions[number + 1 :]]
        else:
            break
    raise SandboxError("the Dockerfile does not begin with FROM", kind="user")
