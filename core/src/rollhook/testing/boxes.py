"""Sandboxes for a suite, made with whatever backend is installed under a name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollhook import plugins
from rollhook.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollhook.testing.environment import OpenBox, build_context


def open_box_with(backend: str, scratch: Path, **keys: Any) -> OpenBox:
    """Return what the `open_box` fixture of `EnvironmentContract` returns, for an installed backend."""

    @asynccontextmanager
    async def open_box(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        loaded = plugins.load([("sandbox", backend)])
        made: SandboxBackend = loaded.build("sandbox", backend, keys, build_context(scratch))
        try:
            await made.start()
            raw = await made.create(spec)
            sandbox = Sandbox(raw, capabilities=made.capabilities, delete=made.delete)
            try:
                yield sandbox
            finally:
                await sandbox.close()
        finally:
            await made.aclose()

    return open_box
