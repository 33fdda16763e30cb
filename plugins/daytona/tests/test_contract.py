"""The contract of sandboxes against the double, with the SDK as it is."""

from __future__ import annotations

from typing import Any

import pytest

from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook_daytona.backend import DaytonaSandboxes


class TestDaytona(SandboxContract):
    gaps = DaytonaSandboxes.gaps

    @pytest.fixture
    def make_backend(self, make_daytona: Any) -> MakeBackend:
        return make_daytona
