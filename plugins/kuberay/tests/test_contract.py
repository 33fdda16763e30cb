"""The launcher's contract on real Ray: by the job API on a cluster that stays, by exec, and as RayJobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from kuberay_real import SMALL, Real
from kuberay_site import launcher

from rollhook.testing.launcher import LauncherContract, LauncherPlanContract, LauncherSite, MakeLauncher


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    pytest.importorskip("kr8s", reason="needs kr8s (pip install rollhook-kuberay)")
    pytest.importorskip("ray", reason="needs ray (pip install rollhook-kuberay)")
    doubles = pytest.importorskip(
        "doubles.kubernetes.client", reason="needs doubles (tests/doubles of the checkout)"
    )
    from doubles import machines

    if reason := machines.available():
        pytest.skip(f"needs bubblewrap: {reason}")
    with doubles.cluster(ray=True, second=0.2) as double:
        made = Real(double)
        asyncio.run(made.prepare())
        yield made


@pytest.fixture(scope="module")
def standing(real: Real) -> str:
    """Return the name of a cluster that is up."""
    asyncio.run(real.up("standing"))
    return "standing"


class TestPlans(LauncherPlanContract):
    @pytest.fixture(params=["rayjob", "port_forward", "exec"])
    def make_launcher(self, request: pytest.FixtureRequest) -> MakeLauncher:
        if request.param == "rayjob":
            return launcher
        clusters = {"training": {"name": "rc"}}
        return lambda: launcher(mode="raycluster", submit=request.param, clusters=clusters)


class TestByJobApi(LauncherContract):
    @pytest.fixture
    def make_launcher(self, real: Real) -> MakeLauncher:
        return lambda: real.standing("standing")

    @pytest.fixture
    def site(self, real: Real, standing: str, make_launcher: Any) -> LauncherSite:
        return real.site(make_launcher)


class TestByExec(LauncherContract):
    @pytest.fixture
    def make_launcher(self, real: Real) -> MakeLauncher:
        return lambda: real.standing("standing", submit="exec")

    @pytest.fixture
    def site(self, real: Real, standing: str, make_launcher: Any) -> LauncherSite:
        return real.site(make_launcher)


@pytest.mark.nightly
class TestAsRayJobs(LauncherContract):
    @pytest.fixture
    def make_launcher(self, real: Real) -> MakeLauncher:
        return lambda: launcher(**real.keys(clusters={"training": SMALL}, ttl_seconds=600))

    @pytest.fixture
    def site(self, real: Real, make_launcher: Any) -> LauncherSite:
        return real.site(make_launcher)
