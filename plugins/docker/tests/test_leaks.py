"""Nothing is left in the engine after a storm, and nothing with an owner is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollhook.testing.podman import Engine
from rollhook.testing.sandbox_leaks import NoLeakContract


class TestDockerLeaksNothing(NoLeakContract):
    creates = 8
    kills = 1
    concurrency = 4
    patience = 120.0

    @pytest.fixture
    def sandbox_use(self, engine: Engine) -> Mapping[str, Any]:
        return {"use": "docker", "host": engine.host, "image": engine.image}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
class TestDockerLeaksNothingInAGreatStorm(TestDockerLeaksNothing):
    creates = 200
    kills = 3
    concurrency = 8
    patience = 300.0
