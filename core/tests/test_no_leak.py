"""No sandbox leaks from the pool, over a provider that keeps what it made when its clients die."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollhook.testing.distributions import write_distribution
from rollhook.testing.sandbox_leaks import NoLeakContract

MODULE = """
    import asyncio, json, os, random
    from pathlib import Path
    from rollhook import Component, Config, hookimpl
    from rollhook.errors import SandboxDead
    from rollhook.sandbox.backend import SandboxBackend, SandboxInfo
    from rollhook.testing.scripted import ScriptedRaw

    class CellarConfig(Config):
        directory: Path
        adopts: bool = False
        drops: str = ""

    class Bottle(ScriptedRaw):
        async def alive(self):
            return self.path.exists()

        async def kill_tree(self, mark):
            return []

    class Cellar(SandboxBackend):
        # a sandbox is a file with its labels; making one takes a while before and after it is there
        @property
        def capabilities(self):
            return frozenset({"adopt"} if self.config.adopts else ())

        async def create(self, spec):
            self.config.directory.mkdir(exist_ok=True)
            await asyncio.sleep(random.uniform(0, 0.01))
            path = self.config.directory / f"{os.urandom(6).hex()}.json"
            labels = {name: value for name, value in spec.labels.items() if name != self.config.drops}
            unfinished = path.with_suffix(".new")
            unfinished.write_text(json.dumps(labels))
            unfinished.rename(path)
            await asyncio.sleep(random.uniform(0, 0.01))
            return self.bottle(path, spec)

        async def adopt(self, sandbox_id, spec):
            path = self.config.directory / f"{sandbox_id}.json"
            if not path.exists():
                raise SandboxDead(f"{sandbox_id} is gone")
            return self.bottle(path, spec)

        def bottle(self, path, spec):
            raw = Bottle(path.stem, spec)
            raw.path = path
            return raw

        async def list(self, labels):
            await asyncio.sleep(0)
            found = []
            for path in self.config.directory.glob("*.json"):
                try:
                    found.append((path.stem, json.loads(path.read_bytes())))
                except FileNotFoundError:
                    continue
            return [SandboxInfo(name, held) for name, held in found if labels.items() <= held.items()]

        async def delete(self, sandbox_id):
            await asyncio.sleep(0)
            (self.config.directory / f"{sandbox_id}.json").unlink(missing_ok=True)

    @hookimpl
    def rollhook_sandboxes():
        return [Component("cellar", CellarConfig, "cellar:Cellar", "for a test")]
"""


@pytest.fixture(autouse=True)
def cellar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    write_distribution(
        site,
        "cellar",
        entry_points={"sandbox.cellar": "cellar"},
        modules={"cellar": textwrap.dedent(MODULE)},
    )
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("cellar", None)


class TestDeletes(NoLeakContract):
    """What a lost reply left is deleted."""

    @pytest.fixture
    def sandbox_use(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"use": "cellar", "directory": str(tmp_path / "provider")}


class TestAdopts(NoLeakContract):
    """What a lost reply left is taken over."""

    seed = 11

    @pytest.fixture
    def sandbox_use(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"use": "cellar", "directory": str(tmp_path / "provider"), "adopts": True}


class TestTheProofCanFail(NoLeakContract):
    """A provider that forgets a label of the lease leaks, and the contract sees it."""

    creates = 60
    kills = 1
    patience = 1.0
    gaps = {
        "test_cancelled_and_lost_creates_leave_nothing": "it is not found by its nonce",
        "test_what_killed_drivers_left_is_reaped_and_nothing_else": "it carries no whole lease",
    }

    @pytest.fixture
    def sandbox_use(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"use": "cellar", "directory": str(tmp_path / "provider"), "drops": "rollhook.nonce"}
