"""The contract of sandboxes, in fair weather: chaos with all rates 0 changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rollhook.component import BuildContext
from rollhook.testing.fakes_sandbox import FakeSandbox, FakeSandboxes
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook_chaos import ChaosConfig
from rollhook_chaos.backend import ChaosSandboxes


class TestFairWeather(SandboxContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        provider: dict[str, FakeSandbox] = {}
        config = ChaosConfig.model_validate({"over": "fake"})
        context = BuildContext(
            logging.getLogger("test"), tmp_path, tmp_path, build=lambda kind, use: FakeSandboxes(provider)
        )
        return lambda: ChaosSandboxes(config, context)
