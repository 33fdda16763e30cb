"""A running double for the tests here, and backends that speak to it with the SDK as it is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook_e2b import E2BConfig
from rollhook_e2b.backend import E2BSandboxes

MakeE2B = Callable[..., E2BSandboxes]


@pytest.fixture(scope="session")
def running() -> Iterator[Any]:
    pytest.importorskip("e2b", reason="needs e2b (pip install 'e2b>=2.53,<3')")
    doubles = pytest.importorskip("doubles.client", reason="needs doubles (tests/doubles of the checkout)")
    from doubles import machines

    if machines.available():
        pytest.skip(f"needs bubblewrap: {machines.available()}")
    with doubles.vendors() as double:
        yield double


@pytest.fixture
def double(running: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double without faults; requests that it does not know fail the test that made them."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN", "E2B_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    running.clear_faults()
    options = {"page": 100, "list_lag": 0.0, "most_live": None, "obey_timeout": True, "accept_key": True}
    running.options(**options)
    before = len(running.journal())
    yield running
    running.clear_faults()
    running.options(**options)
    assert [e for e in running.journal()[before:] if e.get("miss") or e.get("failed")] == []


@pytest.fixture
def make_e2b(double: Any, tmp_path: Path) -> MakeE2B:
    """Return a function that makes a backend, not yet started; its keys are the function's."""

    def make(**keys: Any) -> E2BSandboxes:
        urls = {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")}
        config = E2BConfig.model_validate({**urls, **keys})
        log = logging.getLogger("rollhook.test")
        context = BuildContext(log, tmp_path, tmp_path / "cache", secret=lambda reference: double.key)
        return E2BSandboxes(config, context)

    return make


@pytest.fixture
def one_box(make_e2b: MakeE2B) -> Any:
    """Return a context manager of one sandbox with its backend: `async with one_box(spec keys) as (b, s)`."""

    @asynccontextmanager
    async def one(config: dict[str, Any] | None = None, **spec: Any) -> AsyncIterator[Any]:
        backend = make_e2b(**(config or {}))
        try:
            raw = await backend.create(SandboxSpec(**spec))
            sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
            try:
                yield backend, sandbox
            finally:
                await sandbox.close()
        finally:
            await backend.aclose()

    return one
