"""The backend: what it passes on, and what it lets go wrong on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollhook.component import BuildContext
from rollhook.sandbox import RawSandbox, SandboxBackend, SandboxInfo, SandboxSpec
from rollhook_chaos.sandbox import ChaosSandbox
from rollhook_chaos.weather import FULL_BYTES, ChaosError, Weather

if TYPE_CHECKING:
    from rollhook_chaos import ChaosConfig

_LATENCY_MOST = 10.0


class ChaosSandboxes(SandboxBackend):
    """Another backend in bad weather.

    It can do what the other can. Deleting and listing only take longer: what is left over must be found.
    """

    config: ChaosConfig

    def __init__(self, config: ChaosConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.inner: SandboxBackend = context.build("sandbox", config.over)
        self.account = self.inner.account or config.over.use
        self.gaps = self.inner.gaps
        self._weather = Weather(config)
        self._creates = itertools.count()
        self._calls = itertools.count()
        self._deaths: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        """What the other can do."""
        return self.inner.capabilities

    @property
    def unsafe(self) -> bool:  # type: ignore[override]
        """Whether the other is not isolated from the host."""
        return self.inner.unsafe

    def missing(self) -> Sequence[str]:
        """Return what the other misses."""
        return self.inner.missing()

    async def start(self) -> None:
        """Start the other."""
        await self.inner.start()

    async def create(self, spec: SandboxSpec) -> RawSandbox:
        """Make a sandbox; raises ChaosError for one that is refused, or whose reply is lost."""
        number = next(self._creates)
        fate = self._weather.create(number)
        await self._wait()
        if fate.throttled:
            raise ChaosError("chaos: too many creates", retry_after=self.config.retry_after)
        if fate.full_after is not None and "disk_limit" in self.capabilities:
            spec = dataclasses.replace(spec, disk_bytes=FULL_BYTES)
        raw = await self.inner.create(spec)
        if fate.lost:
            raise ChaosError("chaos: the connection was reset before the reply to a create")
        return self._wrapped(raw, number, fate.full_after)

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> RawSandbox:
        """Attach to a sandbox; it counts as a create of its own."""
        await self._wait()
        raw = await self.inner.adopt(sandbox_id, spec)
        number = next(self._creates)
        return self._wrapped(raw, number, self._weather.create(number).full_after)

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """List as the other does."""
        await self._wait()
        return await self.inner.list(labels)

    async def delete(self, sandbox_id: str) -> None:
        """Delete as the other does."""
        await self._wait()
        await self.inner.delete(sandbox_id)

    async def bake(self, spec: SandboxSpec) -> str:
        """Bake as the other does."""
        await self._wait()
        return await self.inner.bake(spec)

    def refuse(self, spec: SandboxSpec) -> None:
        """Refuse what the other cannot do."""
        self.inner.refuse(spec)

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        """Return the other's price."""
        return self.inner.price_per_second(spec)

    def retryable(self, error: Exception) -> bool:
        """Return whether another try may help."""
        return isinstance(error, ChaosError) or self.inner.retryable(error)

    def ambiguous(self, error: Exception) -> bool:
        """Return whether there may be a sandbox all the same: a lost reply is not told from a failure."""
        return super().ambiguous(error) if isinstance(error, ChaosError) else self.inner.ambiguous(error)

    def describe(self) -> Mapping[str, str]:
        """Return what the other says, and the weather."""
        said = self.config.model_dump(exclude={"over"}, exclude_defaults=True)
        weather = ", ".join(f"{name} {value}" for name, value in said.items()) or "none"
        return {**self.inner.describe(), "over": self.config.over.use, "weather": weather}

    async def aclose(self) -> None:
        """Let deaths that are due come, and close the other."""
        while self._deaths:
            await asyncio.wait(set(self._deaths))
        await self.inner.aclose()

    def _wrapped(self, raw: RawSandbox, number: int, full_after: int | None) -> ChaosSandbox:
        return ChaosSandbox(raw, number, full_after, self._weather, self._wait, self._die)

    async def _wait(self) -> None:
        if self.config.latency:
            draw = self._weather.draw("latency", next(self._calls))
            await asyncio.sleep(self.config.latency * min(-math.log1p(-draw), _LATENCY_MOST))

    def _die(self, sandbox_id: str, seconds: float) -> None:
        """Delete a sandbox after a while, whatever it does then."""

        async def die() -> None:
            await asyncio.sleep(seconds)
            await self.inner.delete(sandbox_id)

        death = asyncio.create_task(die())
        self._deaths.add(death)
        death.add_done_callback(self._died)

    def _died(self, death: asyncio.Task[None]) -> None:
        self._deaths.discard(death)
        if not death.cancelled() and (error := death.exception()) is not None:
            self.context.logger.warning("chaos: a sandbox did not die: %s", error)
