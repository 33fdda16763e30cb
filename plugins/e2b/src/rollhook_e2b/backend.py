"""Sandboxes of E2B as the core uses them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec
from rollhook.sandbox.lease import PREFIX
from rollhook_e2b.builds import Builds
from rollhook_e2b.errors import ServiceError
from rollhook_e2b.sandbox import E2BSandbox
from rollhook_e2b.service import Service
from rollhook_e2b.templates import Plan, plan_for

if TYPE_CHECKING:
    from rollhook_e2b import E2BConfig

#: label of a sandbox: the create that made it
_CREATE = PREFIX + "create"
_MIB = 1 << 20


class E2BSandboxes(SandboxBackend):
    """Sandboxes of E2B, or of a service that speaks its protocol. One client per backend."""

    config: E2BConfig
    elsewhere = True
    capabilities = frozenset(
        {
            "image",
            "image_build",
            "isolation",
            "network_off",
            "network_on",
            "adopt",
            "separate_streams",
            "user",
        }
    )

    def __init__(self, config: E2BConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.account = config.api_url or config.domain
        self._service: Service | None = None
        self._builds: Builds | None = None
        self._opening = asyncio.Lock()
        self._undoing: set[asyncio.Task[None]] = set()
        self._made: WeakSet[E2BSandbox] = WeakSet()

    async def start(self) -> None:
        """Load the SDK and ask the service for a list, so that a key that it refuses is told at once."""
        service = await self._open()
        await service.listed({_CREATE: "none"})

    async def _open(self) -> Service:
        async with self._opening:
            if self._service is None:
                key = await asyncio.to_thread(self.context.secret, str(self.config.api_key))
                self._service = await Service.open(self.config, key)
                directory = self.context.cache / "e2b"
                self._builds = Builds(self._service, directory, self.context.logger)
            return self._service

    # templates

    async def bake(self, spec: SandboxSpec) -> str:
        """Build the template that a sandbox of this spec needs, unless it is there; return its name."""
        self.refuse(spec)
        plan = await self._plan(spec)
        return "" if plan is None else await self._ensure(plan, spec)

    async def _plan(self, spec: SandboxSpec) -> Plan | None:
        service = await self._open()
        return await asyncio.to_thread(plan_for, spec, self.config, service.parse)

    async def _ensure(self, plan: Plan, spec: SandboxSpec) -> str:
        assert self._builds is not None
        alias = plan.alias(self.config.template_prefix)
        await self._builds.ensure(plan, alias, spec.build_seconds or self.config.build_seconds)
        return alias

    # sandboxes

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        """Make one sandbox, its template first; a call that is cancelled ends what it has made."""
        self.refuse(spec)
        plan = await self._plan(spec)
        if plan is None:
            return await self._create(self.config.template, spec)
        spec = dataclasses.replace(spec, user=spec.user or plan.user)
        alias = await self._ensure(plan, spec)
        try:
            return await self._create(alias, spec)
        except ServiceError as error:
            if error.status != 404:
                raise
        assert self._builds is not None
        self._builds.forget(alias)  # somebody has deleted it
        return await self._create(await self._ensure(plan, spec), spec)

    async def _create(self, template: str, spec: SandboxSpec) -> E2BSandbox:
        nonce = spec.labels.get(PREFIX + "nonce") or secrets.token_hex(8)
        mark = secrets.token_hex(8)
        making = asyncio.create_task(self._make(template, spec, nonce, mark))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if not making.cancelled():
                undoing = asyncio.create_task(self._undo(making, mark))
                self._undoing.add(undoing)
                undoing.add_done_callback(self._undoing.discard)
            raise

    async def _make(self, template: str, spec: SandboxSpec, nonce: str, mark: str) -> E2BSandbox:
        service = await self._open()
        box = await service.create(
            template,
            seconds=self._lease(spec, 0.0),
            labels={**spec.labels, _CREATE: mark},
            env=spec.env,
            network=spec.network,
            nonce=nonce,
        )
        return await self._attach(service, box, spec)

    async def _attach(self, service: Service, box: Any, spec: SandboxSpec) -> E2BSandbox:
        """Make a new sandbox ready; one that does not get so is deleted."""
        sandbox = E2BSandbox(service, box, spec, lambda age: self._lease(spec, age))
        try:
            await sandbox.settle()
        except SandboxDead as error:
            raise ServiceError(f"it ended while it was being made: {error}") from error
        except BaseException:
            try:
                await service.kill(box.sandbox_id)
            except SandboxError as error:
                self.context.logger.warning("%s; its lease ends it", error)
            raise
        self._made.add(sandbox)
        return sandbox

    def _lease(self, spec: SandboxSpec, age: float) -> int:
        """Return for how many seconds a sandbox of this age may live on, 0 when its lifetime is over."""
        if spec.lifetime_seconds is None:
            return self.config.lease_seconds
        return max(0, min(self.config.lease_seconds, math.ceil(spec.lifetime_seconds - age)))

    async def _undo(self, making: asyncio.Task[E2BSandbox], mark: str) -> None:
        """End what a cancelled create makes after all; where its reply is lost it is found by its label."""
        await asyncio.wait({making})
        try:
            if not making.cancelled() and making.exception() is None:
                await self.delete(making.result().id)
            else:
                for info in await self.list({_CREATE: mark}):
                    await self.delete(info.id)
        except SandboxError as error:
            self.context.logger.warning("a cancelled create was not undone: %s; its lease ends it", error)

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> E2BSandbox:
        """Attach to a sandbox whose create gave no answer."""
        service = await self._open()
        try:
            box = await service.connect(sandbox_id, self._lease(spec, 0.0))
        except ServiceError as error:
            if error.status == 404:
                raise SandboxDead(str(error)) from error
            raise
        plan = await self._plan(spec)
        user = spec.user or (plan.user if plan else None)
        return await self._attach(service, box, dataclasses.replace(spec, user=user))

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the sandboxes of the key's team that carry all these labels, over all pages."""
        return await (await self._open()).listed(labels)

    async def delete(self, sandbox_id: str) -> None:
        """Kill a sandbox."""
        await (await self._open()).kill(sandbox_id)

    def retryable(self, error: Exception) -> bool:
        """Return whether another try may help: limits, faults of the service and of the way to it."""
        return isinstance(error, SandboxError) and error.kind == "retryable"

    def ambiguous(self, error: Exception) -> bool:
        """Return whether a sandbox may have been made all the same: not where the service refused."""
        return not (isinstance(error, ServiceError) and error.refused) and super().ambiguous(error)

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        """Return the price of a sandbox of this spec, by the size that it gets."""
        cpus = spec.cpus if spec.cpus is not None else self.config.cpus
        memory = spec.memory_bytes
        if memory is None and self.config.memory_mib is not None:
            memory = self.config.memory_mib * _MIB
        return self.config.prices.per_second(cpus, memory)

    def describe(self) -> Mapping[str, str]:
        """Return what is in force here."""
        found = {"service": self.account, "template": self.config.template}
        if self._service is not None:
            found["sdk"] = f"e2b {self._service.version}"
        return found

    async def aclose(self) -> None:
        """Finish what cancelled creates have left and let the client go."""
        left = {asyncio.ensure_future(sandbox.commands.aclose()) for sandbox in self._made} | self._undoing
        if left:
            await asyncio.wait(left, timeout=2 * self.config.request_seconds)
        if self._builds is not None:
            await self._builds.aclose()
        if self._service is not None:
            await self._service.aclose()
        self._service = self._builds = None
