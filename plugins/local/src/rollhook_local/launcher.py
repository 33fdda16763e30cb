"""The launcher that launches nothing: the caller drives the run in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollhook.launcher import Job, Launcher


class LocalLauncher(Launcher):
    """Runs the driver in process."""

    in_process: ClassVar[bool] = True

    def plan(self, job: Job) -> Mapping[str, Any]:
        """Return the command line that would run here; secrets by reference."""
        return {
            "launcher": "local",
            "name": job.name,
            "argv": list(job.argv),
            "env": dict(job.env),
            "secrets": list(job.secrets),
        }
