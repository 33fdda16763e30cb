"""No container leaks under cancellation, lost replies and kill -9 of drivers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rollhook.testing.podman import Engine
from rollhook.testing.sandbox_leaks import NoLeakContract


class TestDockerLeaksNothing(NoLeakContract):
    creates: ClassVar[int] = 8
    kills: ClassVar[int] = 1
    concurrency: ClassVar[int] = 4
    patience: ClassVar[float] = 120.0

    @pytest.fixture
    def sandbox_use(self, engine: Engine) -> Mapping[str, Any]:
        return {"use": "docker", "host": engine.host, "image": engine.image}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
class TestDockerLeaksNothingInAGreatStorm(TestDockerLeaksNothing):
    creates: ClassVar[int] = 200
    kills: ClassVar[int] = 3
    concurrency: ClassVar[int] = 8
    patience: ClassVar[float] = 300.0
