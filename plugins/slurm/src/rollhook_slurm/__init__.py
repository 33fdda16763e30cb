"""A launcher that brings a Ray cluster up inside a Slurm job and runs the job on it."""

from __future__ import annotations

from rollhook import Component, hookimpl
from rollhook_slurm.config import SlurmLauncherConfig


@hookimpl
def rollhook_launchers() -> list[Component]:
    """Supply the launcher."""
    return [
        Component(
            name="slurm",
            config=SlurmLauncherConfig,
            load="rollhook_slurm.launcher:SlurmLauncher",
            summary="a Slurm job with a Ray cluster of its own",
        )
    ]
