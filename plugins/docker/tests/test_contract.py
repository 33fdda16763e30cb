"""The contract of sandboxes, against a real engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook_docker.backend import DockerSandboxes


class TestDocker(SandboxContract):
    @pytest.fixture
    def make_backend(self, make_docker: Callable[..., DockerSandboxes]) -> MakeBackend:
        return make_docker
