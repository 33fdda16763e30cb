"""The proof that a backend under the pool leaks no sandbox, and that none is deleted which has an owner.

    class TestMineLeaksNothing(NoLeakContract):
        @pytest.fixture
        def sandbox_use(self):
            return {"use": "mine", "api_url": ..., "api_key": "env:MINE_API_KEY"}

The backend must be installed, since driver processes that are killed build it too. A suite over a service
that can lose replies by itself fills the fixture `weather` as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollhook import journal
from rollhook.rundir import RunDir
from rollhook.sandbox.backend import SandboxBackend, SandboxSpec
from rollhook.sandbox.lease import leases
from rollhook.sandbox.reap import reap
from rollhook.testing.contract import Contract
from rollhook.testing.sandbox_case import eventually
from rollhook.testing.storm import Unreliable, build_backend, make_pool, storm


class NoLeakContract(Contract):
    """Sandboxes under random cancellation, lost replies and kill -9 of their driver."""

    #: sandboxes asked for by each case
    creates: ClassVar[int] = 200
    #: drivers that are killed, one after the other
    kills: ClassVar[int] = 3
    concurrency: ClassVar[int] = 16
    seed: ClassVar[int] = 7
    #: seconds until the service must show that nothing is left
    patience: ClassVar[float] = 60.0

    @pytest.fixture
    def sandbox_use(self) -> Mapping[str, Any]:
        """Return the `sandbox` section of a recipe: an installed backend with its keys."""
        raise NotImplementedError(
            "define a fixture `sandbox_use` that returns {'use': NAME, KEY: VALUE, ...}"
        )

    @pytest.fixture
    def weather(self) -> AbstractContextManager[object]:
        """Return what makes the service itself unreliable while a storm goes on; by default nothing does."""
        return nullcontext()

    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A place for runs that no other knows of."""
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        return tmp_path / "runs"

    async def test_cancelled_and_lost_creates_leave_nothing(
        self, sandbox_use: Mapping[str, Any], weather: AbstractContextManager[object], runs: Path
    ) -> None:
        rng, mark = random.Random(self.seed), {"test": uuid.uuid4().hex}
        attempt = RunDir.create(runs, "storm", run_id="storm").claim()
        backend = build_backend(sandbox_use, attempt.path)
        try:
            await backend.start()
            stranger = await backend.create(SandboxSpec(labels=mark))
            line = Unreliable(backend, rng, refused=0.05, lost=0.15)
            pool = make_pool(line, attempt, create_concurrency=self.concurrency, warm=3, create_retries=20)
            with weather:
                spec = SandboxSpec(labels=mark, lifetime_seconds=600.0)
                await storm(pool, spec, self.creates, self.concurrency, rng)
            await pool.aclose()
            assert line.asked >= self.creates / 2
            assert line.replies_lost > 0
            assert await eventually(lambda: _only(backend, mark, {stranger.id}), self.patience)
            assert await stranger.alive(), "a sandbox of somebody else was deleted"
            stats = pool.stats()
            assert (stats["sandbox/live"], stats["sandbox/leaked"]) == (0, 0)
            attempt.finish("stopped")
            held = leases(journal.read(attempt.path / "journal.jsonl"))
            left = [state for state in held.values() if state.open]
            assert left == []
            await backend.delete(stranger.id)
        finally:
            await backend.aclose()

    async def test_what_killed_drivers_left_is_reaped_and_nothing_else(
        self, sandbox_use: Mapping[str, Any], weather: AbstractContextManager[object], runs: Path
    ) -> None:
        rng, mark = random.Random(self.seed), {"test": uuid.uuid4().hex}
        attempt = RunDir.create(runs, "owner", run_id="owner").claim()
        backend = build_backend(sandbox_use, attempt.path)
        pool = make_pool(backend, attempt)
        try:
            await backend.start()
            stranger = await backend.create(SandboxSpec(labels=mark))
            spec = SandboxSpec(labels=mark, lifetime_seconds=600.0)
            owned = [await pool.acquire(spec, episode_id=f"e{number}") for number in range(3)]
            ours = {stranger.id, *(sandbox.id for sandbox in owned)}
            with weather:
                for number in range(self.kills):
                    dead = RunDir.create(runs, "dead", run_id=f"dead-{number}")
                    await asyncio.to_thread(self._drive_and_kill, dead, sandbox_use, mark, rng)
            deleted: set[str] = set()

            async def reaped() -> bool:
                report = await reap(backend, labels=mark)
                deleted.update(report.deleted)
                return not report.failed and await _only(backend, mark, ours)

            assert await eventually(reaped, self.patience)
            assert not deleted & ours
            assert all([await sandbox.alive() for sandbox in owned]), "a sandbox with an owner was deleted"
            assert await stranger.alive(), "a sandbox of somebody else was deleted"
            await pool.aclose()
            assert await _only(backend, mark, {stranger.id})
            await backend.delete(stranger.id)
        finally:
            await backend.aclose()
            attempt.finish("stopped")

    def _drive_and_kill(
        self, run: RunDir, use: Mapping[str, Any], labels: Mapping[str, str], rng: random.Random
    ) -> None:
        """Let a driver process do its share of the creates, and kill it amid them."""
        share = self.creates // self.kills
        argv = [sys.executable, "-m", "rollhook.testing.storm", str(run.path), json.dumps(dict(use))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with subprocess.Popen(
            [*argv, json.dumps(dict(labels)), str(rng.randrange(1 << 30))],
            stdout=subprocess.PIPE,
            env=environment,
        ) as driver:
            assert driver.stdout is not None
            try:
                for _ in range(rng.randint(share // 2, share)):
                    assert driver.stdout.readline(), "the driver process ended by itself"
            finally:
                driver.kill()


async def _only(backend: SandboxBackend, mark: Mapping[str, str], ids: set[str]) -> bool:
    return {info.id for info in await backend.list(mark)} == ids
