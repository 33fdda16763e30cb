"""What the groups of the sandbox contract share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollhook.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollhook.testing.contract import Contract, expect_failure

MakeBackend = Callable[[], SandboxBackend]

#: seconds that a kill, a close or the end of a short command may take beyond its limit
GRACE = 10.0


class SandboxCases(Contract):
    """A group of cases."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Return a function that makes a backend, not yet started."""
        raise NotImplementedError("define a fixture `make_backend` that returns a function making a backend")

    @pytest.fixture(autouse=True)
    def _declared_gap(self, request: pytest.FixtureRequest, make_backend: MakeBackend) -> None:
        gaps = {**make_backend().gaps, **self.gaps}
        expect_failure(request, gaps)


@asynccontextmanager
async def started(make_backend: MakeBackend) -> AsyncIterator[SandboxBackend]:
    """A started backend, closed in the end."""
    backend = make_backend()
    try:
        await backend.start()
        yield backend
    finally:
        await backend.aclose()


async def make(backend: SandboxBackend, **spec: Any) -> Sandbox:
    """Make one sandbox."""
    raw = await backend.create(SandboxSpec(**spec))
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    if "isolation" in backend.capabilities:
        await _must_be_alone(sandbox)
    return sandbox


async def _must_be_alone(sandbox: Sandbox) -> None:
    """Fail before a case kills "everything inside", should inside be this machine."""
    seen = (await sandbox.shell("set -- /proc/[0-9]*; echo $#", timeout=60)).text.strip()
    if not seen.isdecimal() or int(seen) > 20:
        await sandbox.close()
        pytest.fail(f"declares isolation, but a new sandbox sees {seen} processes")


@asynccontextmanager
async def one(make_backend: MakeBackend, **spec: Any) -> AsyncIterator[Sandbox]:
    """A live sandbox of a backend of its own; both are gone in the end."""
    async with started(make_backend) as backend:
        sandbox = await make(backend, **spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()


def require(holder: Sandbox | SandboxBackend, *capabilities: str) -> None:
    """Skip unless all these are declared."""
    missing = set(capabilities) - holder.capabilities
    if missing:
        pytest.skip(f"does not declare {', '.join(sorted(missing))}")


async def eventually(check: Callable[[], Any], seconds: float = GRACE) -> bool:
    """Ask an asynchronous question until the answer is yes, or the time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        if await check():
            return True
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.02)


async def grows(sandbox: Sandbox, path: str, seconds: float = 0.4) -> bool:
    """Return whether a file gets longer, as long as somebody writes to it."""
    before = len(await sandbox.read(path))
    await asyncio.sleep(seconds)
    return len(await sandbox.read(path)) > before
