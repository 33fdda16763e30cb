"""The contract of launchers: what a plan says, and what it never says.

The life cycle beyond the plan (submit, status, logs, stop) is not part of this release's interface.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from rollhook.launcher import Job, Launcher, Resources
from rollhook.testing.contract import Contract

MakeLauncher = Callable[[], Launcher]

SENTINEL = "sentinel-7d1f0c"
JOB = Job(
    name="demo-0a1b2c-a1",
    argv=("rollhook", "drive", "a b/recipe.lock.yaml", "--run-id", "demo-0a1b2c"),
    env={"RUN": "demo-0a1b2c", "GREETING": 'it\'s "here"'},
    secrets=("env:LAUNCHER_CONTRACT_KEY",),
    resources=Resources(nodes=1, gpus_per_node=0),
)


class LauncherContract(Contract):
    """What every launcher must do. A suite gives the fixture `make_launcher`."""

    @pytest.fixture
    def make_launcher(self) -> MakeLauncher:
        """Build the launcher under test, each time anew."""
        raise NotImplementedError("give the contract a fixture make_launcher that returns a builder")

    def test_a_plan_is_data(self, make_launcher: MakeLauncher) -> None:
        assert json.loads(json.dumps(dict(make_launcher().plan(JOB))))

    def test_the_same_job_gives_the_same_plan(self, make_launcher: MakeLauncher) -> None:
        assert make_launcher().plan(JOB) == make_launcher().plan(JOB)

    def test_a_plan_holds_every_word_and_every_variable(self, make_launcher: MakeLauncher) -> None:
        text = json.dumps(dict(make_launcher().plan(JOB)))
        for word in (JOB.name, "recipe.lock.yaml", *JOB.env):
            assert word in text, f"the plan lacks {word!r}"

    def test_a_plan_names_secrets_and_never_holds_one(
        self, make_launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LAUNCHER_CONTRACT_KEY", SENTINEL)
        text = json.dumps(dict(make_launcher().plan(JOB)))
        assert "LAUNCHER_CONTRACT_KEY" in text
        assert SENTINEL not in text

    def test_planning_changes_nothing_here(self, make_launcher: MakeLauncher) -> None:
        before = dict(os.environ), os.getcwd(), sorted(os.listdir())
        make_launcher().plan(JOB)
        assert (dict(os.environ), os.getcwd(), sorted(os.listdir())) == before
