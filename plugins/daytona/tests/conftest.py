"""The double, and backends that speak to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import machines
from doubles.client import Double, vendors

from rollhook.component import BuildContext
from rollhook_daytona import DaytonaConfig
from rollhook_daytona.backend import DaytonaSandboxes

MakeDaytona = Callable[..., DaytonaSandboxes]


@pytest.fixture(scope="session")
def double() -> Iterator[Double]:
    """One double for all tests of this directory."""
    pytest.importorskip("daytona", reason="needs daytona: pip install 'daytona>=0.180,<1'")
    if reason := machines.available():
        pytest.skip(f"needs bubblewrap: {reason}")
    with vendors() as running:
        yield running


@pytest.fixture
def make_daytona(double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDaytona:
    """Return a function that makes a backend, with keys of its configuration."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.chdir(tmp_path)

    def make(**keys: Any) -> DaytonaSandboxes:
        config = DaytonaConfig.model_validate({"api_url": double.url("daytona") + "/api", **keys})
        context = BuildContext(
            logging.getLogger("test"), tmp_path, tmp_path / "cache", secret=lambda reference: double.key
        )
        return DaytonaSandboxes(config, context)

    return make
