"""No container leaks under cancellation, lost replies and kill -9 of drivers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rollhook.testing.podman import Engine
from rollhook.testing.sandbox_leaks import NoLeakContract


class TestDockerLeaksNothing(NoLeakContract):
    creates: ClassVar[int] = 24
    kills: ClassVar[int] = 1
    concurrency: ClassVar[int] = 6

    @pytest.fixture
    def sandbox_use(self, engine: Engine) -> Mapping[str, Any]:
        return {"use": "docker", "host": engine.host, "image": engine.image}
