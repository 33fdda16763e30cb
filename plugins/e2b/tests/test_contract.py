"""The contract of sandboxes against the double, with the SDK as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import machines
from doubles.client import Double, vendors

from rollhook.component import BuildContext
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook_e2b import E2BConfig
from rollhook_e2b.backend import E2BSandboxes

pytest.importorskip("e2b", reason="needs the E2B SDK (pip install 'e2b>=2.53,<3')")
pytestmark = pytest.mark.skipif(
    bool(machines.available()), reason=f"needs bubblewrap: {machines.available()}"
)


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with vendors() as running:
        yield running


class TestE2B(SandboxContract):
    @pytest.fixture
    def make_backend(self, double: Double, tmp_path: Path) -> MakeBackend:
        urls = {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")}
        config = E2BConfig.model_validate(urls)
        context = BuildContext(
            logging.getLogger("test"), tmp_path, tmp_path / "cache", secret=lambda reference: double.key
        )
        return lambda: E2BSandboxes(config, context)
