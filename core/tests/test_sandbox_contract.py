"""The contract of sandboxes: a backend without shortcuts passes it, broken ones fail just their cases."""

from __future__ import annotations

import pytest

from rollhook.testing.fakes_sandbox import FakeSandbox, FakeSandboxes
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend


class TestFake(SandboxContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        provider: dict[str, FakeSandbox] = {}
        return lambda: FakeSandboxes(provider)
