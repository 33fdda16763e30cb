"""The contract of sandboxes against the double, with the SDK as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook.testing.sandbox_leaks import NoLeakContract


class TestE2B(SandboxContract):
    @pytest.fixture
    def make_backend(self, make_e2b: Any) -> MakeBackend:
        return lambda: make_e2b()  # noqa: PLW0108 - takes nothing


class TestE2BLeaksNothing(NoLeakContract):
    kills: ClassVar[int] = 2

    @pytest.fixture
    def sandbox_use(self, double: Any, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
        monkeypatch.setenv("E2B_API_KEY", double.key)
        return {
            "use": "e2b",
            "api_url": double.url("e2b_api"),
            "sandbox_url": double.url("e2b_envd"),
            "api_key": "env:E2B_API_KEY",
        }
