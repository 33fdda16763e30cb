"""The contract of sandboxes, in fair weather: chaos with all rates 0 over real sandboxes changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollhook.installed import installed
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook.testing.storm import build_backend

LOCAL = any((each.kind, each.name) == ("sandbox", "local") for each in installed())


@pytest.mark.skipif(not LOCAL, reason="needs rollhook-local (pip install rollhook-local)")
@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap (apt-get install bubblewrap)")
class TestFairWeather(SandboxContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        use = {"use": "chaos", "over": {"use": "local", "mode": "bubblewrap"}}
        return lambda: build_backend(use, tmp_path)
