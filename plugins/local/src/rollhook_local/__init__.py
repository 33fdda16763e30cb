"""Sandboxes on this machine, and the launcher that runs here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rollhook import Component, Config, hookimpl
from rollhook.sandbox.prices import Prices


class LocalSandboxConfig(Config):
    """Keys of `sandbox: {use: local}`."""

    mode: Annotated[
        Literal["auto", "bubblewrap", "unshare", "process"],
        Field(description="auto: bubblewrap, else unshare; process: no isolation, never for training"),
    ] = "auto"
    memory_bytes: Annotated[PositiveInt | None, Field(description="memory of a sandbox; null: no limit")] = (
        None
    )
    pids: Annotated[PositiveInt | None, Field(description="processes and threads of a sandbox")] = 512
    cpus: Annotated[PositiveFloat | None, Field(description="processors of a sandbox; null: no limit")] = None
    disk_bytes: Annotated[PositiveInt, Field(description="files of a sandbox, held in memory")] = 1 << 30
    file_bytes: Annotated[PositiveInt | None, Field(description="one file; null: no limit")] = None
    read_only: Annotated[
        tuple[str, ...], Field(description="further host paths that sandboxes see, read-only")
    ] = ()
    writable: Annotated[
        tuple[str, ...], Field(description="further directories of its own in every sandbox, absolute")
    ] = ()
    prices: Annotated[Prices, Field(description="what a sandbox costs; null prices: not known")] = Prices()


class LocalLauncherConfig(Config):
    """Keys of `launcher: {use: local}`."""

    stop_grace_seconds: Annotated[
        NonNegativeFloat,
        Field(description="what a detached run that is stopped is given to write its checkpoint"),
    ] = 60.0


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [
        Component(
            name="local",
            config=LocalSandboxConfig,
            load="rollhook_local.backend:LocalSandboxes",
            summary="bubblewrap or unshare on this machine",
        )
    ]


@hookimpl
def rollhook_launchers() -> list[Component]:
    """Supply the launcher."""
    return [
        Component(
            name="local",
            config=LocalLauncherConfig,
            load="rollhook_local.launcher:LocalLauncher",
            summary="this process drives the run, or a detached one of its own",
        )
    ]
