"""Jobs on a real Slurm; Ray is a double, but in test_slurm_ray.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.launcher import Handle
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import SENTINEL, LauncherContract, LauncherSite, MakeLauncher
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.launcher import SlurmLauncher

DOUBLE = Path(__file__).parent / "ray_double"
SETUP = f'export PATH="{DOUBLE}/bin:$PATH" PYTHONPATH="{DOUBLE}/lib"'


def make(scratch: Path, **keys: Any) -> SlurmLauncher:
    given = {"exclusive": False, "cpus_per_node": 1, "export": ("PATH", "HOME"), **keys}
    return SlurmLauncher(SlurmLauncherConfig(**given), build_context(scratch))


class Site(LauncherSite):
    """A site whose jobs are ended with the test, and have the double of Ray."""

    handles: list[Handle]

    def job(self, script: str, **options: Any) -> Any:
        setup = "\n".join(filter(None, [SETUP, options.pop("setup", "")]))
        return super().job(script, setup=setup, **options)

    async def submit(self, job: Any) -> Handle:
        handle = await super().submit(job)
        self.handles.append(handle)
        return handle


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials.env"
    path.touch(mode=0o600)
    path.write_text(f"SLURM_TEST_KEY={SENTINEL}\n")
    return path


@pytest.fixture
async def site(slurm: Any, tmp_path: Path, credentials: Path) -> AsyncIterator[Site]:
    key = tmp_path / "a key"
    key.write_text(f"{SENTINEL}\n")
    root = tmp_path / "job's 100% root"
    root.mkdir()

    async def view() -> str:
        said = await asyncio.to_thread(slurm.run, "scontrol", "show", "job", "--details")
        return said + await asyncio.to_thread(slurm.run, "squeue", "--long")

    references = {"env": "env:SLURM_TEST_KEY", "file": f"file:{key}"}
    launcher = make(tmp_path, credentials=(str(credentials),))
    kept = Site(launcher, root, references, unknown, view, seconds=60)
    kept.handles = []
    yield kept
    for handle in kept.handles:
        await launcher.stop(handle, force=True)


def unknown(handle: Handle) -> Handle:
    return replace(handle, data={"job": "999999"})


class TestSlurmLauncher(LauncherContract):
    @pytest.fixture
    def make_launcher(self, tmp_path: Path) -> MakeLauncher:
        return lambda: make(tmp_path)

    @pytest.fixture
    def site(self, site: Site) -> LauncherSite:
        return site
