"""Sandboxes for a suite, made with whatever backend is installed under a name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollhook import plugins
from rollhook.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollhook.testing.environment import OpenBox, build_context


@asynccontextmanager
async def started(backend: str, scratch: Path, **keys: Any) -> AsyncIterator[SandboxBackend]:
    """Start an installed backend; it ends with the block."""
    loaded = plugins.load([("sandbox", backend)])
    made: SandboxBackend = loaded.build("sandbox", backend, keys, build_context(scratch))
    try:
        await made.start()
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def open_box(backend: SandboxBackend, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """Make a sandbox with a backend that is started; it is deleted with the block."""
    raw = await backend.create(spec)
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def open_box_with(backend: str, scratch: Path, **keys: Any) -> OpenBox:
    """Return what the `open_box` fixture of `EnvironmentContract` returns, for an installed backend.

    Each sandbox has a backend of its own; where there are many, `started` and `open_box` share one.
    """

    @asynccontextmanager
    async def opened(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with started(backend, scratch, **keys) as made, open_box(made, spec) as sandbox:
            yield sandbox

    return opened
