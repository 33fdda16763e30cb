"""The contract of sandboxes against the double, with the SDK as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
    #: as many as elsewhere at night
    creates: ClassVar[int] = 200 if os.environ.get("ROLLHOOK_NIGHTLY") else 80
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

    @pytest.fixture
    def weather(self, double: Any) -> AbstractContextManager[object]:
        """Lost replies, throttling and faults of the service, now and then."""

        @contextmanager
        def bad() -> Iterator[None]:
            create = {"surface": "e2b_api", "method": "POST", "path": "/v2/sandboxes"}
            for number in range(8):
                double.fault(**create, skip=20 * number, drop="after")
                double.fault(
                    **create, skip=25 * number, status=429, body={"code": 429, "message": "slow down"}
                )
            for number in range(4):
                body = {"code": 500, "message": "oops"}
                double.fault(surface="e2b_api", method="DELETE", skip=30 * number, status=500, body=body)
            yield
            double.clear_faults()

        return bad()
