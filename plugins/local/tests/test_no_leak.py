"""No local sandbox leaks under cancellation, lost replies and kill -9 of drivers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollhook.testing.sandbox_leaks import NoLeakContract
from rollhook_local.programs import which


@pytest.mark.skipif(which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)")
class TestLocalLeaksNothing(NoLeakContract):
    creates = 60
    kills = 2
    concurrency = 8

    @pytest.fixture
    def sandbox_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
        runtime = tmp_path / "runtime"
        runtime.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        return {"use": "local", "mode": "bubblewrap"}
