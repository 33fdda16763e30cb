"""A scripted sandbox backend, a journal in memory, and a clock that passes only while somebody sleeps."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext, Config
from rollhook.errors import SandboxError
from rollhook.sandbox.backend import RawProcess, RawSandbox, SandboxBackend, SandboxInfo, SandboxSpec


class ThrottledError(SandboxError):
    """What this provider says when it is asked too much."""

    retry_after: float | None = None


class ScriptedRaw(RawSandbox):
    """A sandbox that runs nothing; `dead` makes it look gone."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.dead = False

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> RawProcess:
        raise NotImplementedError

    async def read(self, path: str, *, limit: int) -> bytes:
        raise NotImplementedError

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        raise NotImplementedError

    async def alive(self) -> bool:
        return not self.dead


class NeedyRaw(ScriptedRaw):
    """One whose provider stops what nobody touches; counts the touches."""

    touches = 0

    async def touch(self) -> None:
        self.touches += 1


class ScriptedBackend(SandboxBackend):
    """Creates at once, unless told otherwise by `plan`: one entry per create, called with the spec.

    An entry may raise (nothing is made), or return an awaitable to wait for before the sandbox is made.
    """

    raw: type[ScriptedRaw] = ScriptedRaw
    _numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__(Config(), BuildContext(logging.getLogger(__name__), scratch=Path(), cache=Path()))
        self.plan: list[Callable[[SandboxSpec], Any]] = []
        self.live: dict[str, ScriptedRaw] = {}
        self.specs: list[SandboxSpec] = []
        self.deleted: list[str] = []
        self.under_way = self.most_under_way = 0
        self.delete_errors: list[Exception] = []
        self.lists = 0
        #: so many of the next lists show nothing
        self.lag = 0

    async def create(self, spec: SandboxSpec) -> RawSandbox:
        self.specs.append(spec)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            step = self.plan.pop(0) if self.plan else None
            waited = step(spec) if step else None
            if waited is not None:
                await waited
            else:
                await asyncio.sleep(0)
            return self.make(spec)
        finally:
            self.under_way -= 1

    def make(self, spec: SandboxSpec) -> ScriptedRaw:
        raw = self.raw(f"s{next(self._numbers)}", spec)
        self.live[raw.id] = raw
        return raw

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        self.lists += 1
        if self.lag:
            self.lag -= 1
            return []
        return [
            SandboxInfo(raw.id, raw.spec.labels)
            for raw in self.live.values()
            if labels.items() <= raw.spec.labels.items()
        ]

    async def delete(self, sandbox_id: str) -> None:
        await asyncio.sleep(0)
        if self.delete_errors:
            raise self.delete_errors.pop(0)
        self.live.pop(sandbox_id, None)
        self.deleted.append(sandbox_id)

    def retryable(self, error: Exception) -> bool:
        return isinstance(error, ThrottledError)


class FakeTime:
    """A clock for code under test: a sleep returns at once and the clock has moved on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class ListJournal:
    """A lease journal in memory; `gate`, when set, is what durability waits for."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []
        self.durable = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    def append(self, event: str, /, **data: Any) -> int:
        if self.error is not None:
            raise self.error
        self.entries.append((event, data))
        return len(self.entries)

    async def append_durable(self, event: str, /, **data: Any) -> int:
        seq = self.append(event, **data)
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        self.durable += 1
        return seq

    def events(self, nonce: str | None = None) -> list[str]:
        return [event for event, data in self.entries if nonce in (None, data["nonce"])]


async def settle(turns: int = 20) -> None:
    """Let everything that can run, run."""
    for _ in range(turns):
        await asyncio.sleep(0)
