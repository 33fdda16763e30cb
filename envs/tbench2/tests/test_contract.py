"""Environment tbench2 keeps the contract of environments, in real sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollhook.testing.environment import EnvironmentContract, MakeEnvironment, OpenBox, build_context
from rollhook_tbench2.config import PocketConfig, TBench2Config
from rollhook_tbench2.environment import TBench2
from rollhook_tbench2.pocket.pack import PocketPack


class TestTBench2(EnvironmentContract):
    @pytest.fixture
    def tasks_dir(self, tmp_path: Path) -> Path:
        root = tmp_path / "tasks"
        root.mkdir()
        PocketPack(PocketConfig(train_per_family=1, heldout_per_family=1), build_context()).write(root)
        for name in ("unjudged", "broken"):
            (root / "create-train-0000").rename(root / name)
            PocketPack(PocketConfig(train_per_family=1, heldout_per_family=1), build_context()).write(root)
        (root / "unjudged/tests/test.sh").write_text("#!/bin/sh\n")
        (root / "broken/task.toml").write_text("[environment]\ngpus = 8\n")
        return root

    @pytest.fixture
    def make_environment(self, tasks_dir: Path) -> MakeEnvironment:
        return lambda: TBench2(TBench2Config(tasks_dir=str(tasks_dir)), build_context())

    @pytest.fixture
    def open_box(self, local_box: OpenBox) -> OpenBox:
        return local_box

    @pytest.fixture
    def problem_task(self) -> str:
        return "broken"

    @pytest.fixture
    def no_reward_task(self) -> str:
        return "unjudged"
