"""A double of Kubernetes for the tests here; the client that speaks to it is kr8s as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kuberay_site import MakeLauncher, launcher

from rollhook_kuberay.launcher import KubeRayLauncher

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def running() -> Iterator[Any]:
    pytest.importorskip("kr8s", reason="needs kr8s (pip install rollhook-kuberay)")
    doubles = pytest.importorskip(
        "doubles.kubernetes.client", reason="needs doubles (tests/doubles of the checkout)"
    )
    with doubles.cluster() as double:
        yield double


@pytest.fixture
def double(running: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double without faults and scripts; a request that it does not know fails the test that made it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    before = len(running.journal())
    yield running
    running.clear_faults()
    running.clear_scripts()
    running.options(accept_key=True, deny=[], page=None)
    assert [each for each in running.journal()[before:] if each.get("miss") or each.get("failed")] == []


@pytest.fixture
def namespace(double: Any) -> str:
    """Return a namespace of this test's own."""
    return str(double.namespace(f"t{next(_numbers)}"))


@pytest.fixture
def make(double: Any, namespace: str) -> MakeLauncher:
    """Return a function that makes a launcher for the test's namespace; its keys are the function's."""

    def made(**keys: Any) -> KubeRayLauncher:
        given = {"kubeconfig": str(double.kubeconfig), "namespace": namespace, "poll_seconds": 0.1, **keys}
        return launcher(**given)

    return made
