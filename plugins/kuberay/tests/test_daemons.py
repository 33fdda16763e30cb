"""Daemons, replacing and the dashboard: a job API that a test scripts, behind the double's port-forward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kuberay_site import MakeLauncher, job

from rollhook.errors import LauncherError
from rollhook.launcher import ClusterOptions
from rollhook_kuberay.daemons import newest, request
from rollhook_kuberay.heads import reach
from rollhook_kuberay.launcher import KubeRayLauncher


@dataclass
class Dashboard:
    """The job API of a Ray cluster without Ray: jobs by id, RUNNING once submitted, STOPPED once stopped."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def add(self, job_id: str, status: str) -> None:
        self.jobs[job_id] = {"submission_id": job_id, "status": status, "message": "as scripted",
                             "type": "SUBMISSION", "start_time": len(self.jobs) + 1}  # fmt: skip

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{id}", self._one)
        app.router.add_post("/api/jobs/{id}/stop", self._stop)
        app.router.add_route("*", "/api/packages/gcs/{name}", self._package)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server: Any = site._server
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            await runner.cleanup()

    async def _list(self, asked: web.Request) -> web.Response:
        return web.json_response(list(self.jobs.values()))

    async def _submit(self, asked: web.Request) -> web.Response:
        body = await asked.json()
        self.bodies.append(body)
        self.add(body["submission_id"], "RUNNING")
        return web.json_response({"submission_id": body["submission_id"]})

    async def _one(self, asked: web.Request) -> web.Response:
        found = self.jobs.get(asked.match_info["id"])
        return web.json_response(found) if found else web.json_response({}, status=404)

    async def _stop(self, asked: web.Request) -> web.Response:
        found = self.jobs[asked.match_info["id"]]
        if found["status"] == "RUNNING":
            found["status"] = "STOPPED"
        return web.json_response({"stopped": True})

    async def _package(self, asked: web.Request) -> web.Response:
        name = asked.match_info["name"]
        if asked.method == "PUT":
            self.packages.add(name)
        return web.json_response({}, status=200 if name in self.packages else 404)


@pytest.fixture
async def dashboard() -> AsyncIterator[Dashboard]:
    made = Dashboard()
    async with made.serving():
        yield made


DAEMON = {"id": "server", "entrypoint": "serve", "env": {"A": "1"}}


async def standing(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard, **keys: Any
) -> KubeRayLauncher:
    """Bring a cluster up whose head pod's dashboard is the scripted one."""
    bare = make(mode="raycluster", clusters={"training": {"name": "train"}})
    await bare.cluster_up([], ClusterOptions(timeout=20), print)
    for pod in double.objects("Pod", namespace):
        if pod["metadata"]["labels"]["ray.io/node-type"] == "head":
            double.serve(namespace, pod["metadata"]["name"], {8265: dashboard.port, 30000: dashboard.port})
    return make(
        **{"mode": "raycluster", "clusters": {"training": {"name": "train", "daemon": DAEMON}}, **keys}
    )


async def up(launcher: KubeRayLauncher) -> list[str]:
    said: list[str] = []
    await launcher.cluster_up([], ClusterOptions(timeout=20), said.append)
    return said


async def test_a_daemon_is_started_once_and_found_running(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard
) -> None:
    launcher = await standing(double, make, namespace, dashboard)
    assert "the daemon server was started on train" in await up(launcher)
    assert dashboard.bodies == [request(launcher.keys.clusters["training"].daemon, "server")]  # type: ignore[arg-type]
    for status in ("RUNNING", "PENDING", "SUCCEEDED"):
        dashboard.jobs["server"]["status"] = status
        assert f"the daemon server on train is {status}" in await up(launcher)
    assert len(dashboard.bodies) == 1
    (info,) = await launcher.cluster_status()
    assert "daemon server: SUCCEEDED as server" in info.message


@pytest.mark.parametrize("status", ["FAILED", "STOPPED"])
async def test_a_daemon_that_ended_is_said_and_replaced_on_request(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard, status: str
) -> None:
    dashboard.add("server", status)
    launcher = await standing(double, make, namespace, dashboard)
    with pytest.raises(LauncherError, match=rf"server on train is {status}.*launcher\.replace=true"):
        await up(launcher)
    again = await standing(double, make, namespace, dashboard, replace=True)
    await up(again)
    (fresh,) = [name for name in dashboard.jobs if name != "server"]
    assert fresh.startswith("server-")
    # the next plain one finds what the replacement started, though the first id is an ended job's
    assert f"the daemon {fresh} on train is RUNNING" in await up(launcher)


async def test_a_running_daemon_that_is_replaced_is_stopped_first(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard
) -> None:
    dashboard.add("server", "RUNNING")
    await up(await standing(double, make, namespace, dashboard, replace=True))
    assert dashboard.jobs["server"]["status"] == "STOPPED"
    assert len(dashboard.bodies) == 1


async def test_daemons_can_be_left_alone(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard
) -> None:
    await up(await standing(double, make, namespace, dashboard, skip_daemons=True))
    assert dashboard.bodies == []


async def test_a_daemon_is_waited_for_until_it_answers(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard
) -> None:
    clusters = {
        "training": {"name": "train", "daemon": {**DAEMON, "health": "30000/any", "health_seconds": 10}}
    }
    await up(await standing(double, make, namespace, dashboard, clusters=clusters))
    late = {
        "training": {
            "name": "train",
            "daemon": {**DAEMON, "id": "other", "health": "1/any", "health_seconds": 1},
        }
    }
    with pytest.raises(TimeoutError, match="the daemon other does not serve after 1 s"):
        await up(await standing(double, make, namespace, dashboard, clusters=late))


async def test_a_replacing_run_stops_what_runs_and_waits_and_submits_its_own(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard, tmp_path: Any
) -> None:
    for name, status in (("old", "RUNNING"), ("waiting", "PENDING"), ("ended", "SUCCEEDED")):
        dashboard.add(name, status)
    (tmp_path / "mine.py").write_text("x = 1\n")
    given = {
        "code": "upload",
        "code_path": str(tmp_path),
        "replace": True,
        "clusters": {"training": {"name": "train"}},
    }
    launcher = await standing(double, make, namespace, dashboard, **given)
    plan = launcher.plan(job())
    handle = await launcher.submit(plan)
    assert dashboard.jobs["old"]["status"] == "STOPPED"
    assert dashboard.jobs["waiting"]["status"] == "PENDING"
    assert dashboard.jobs["ended"]["status"] == "SUCCEEDED"
    (body,) = dashboard.bodies
    assert body["submission_id"] == "demo-a1"
    (package,) = dashboard.packages
    assert body["runtime_env"]["working_dir"] == f"gcs://{package}"
    assert (await launcher.status(handle)).state == "running"
    assert await launcher.stop(handle) == "demo-a1 was asked to stop"
    assert (await launcher.status(handle)).state == "stopped"


async def test_the_dashboard_of_a_cluster_by_role_and_by_name(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard
) -> None:
    launcher = await standing(double, make, namespace, dashboard)
    for target in (None, "training", "clusters.training", "train"):
        async with (
            launcher.dashboard(target, 0) as address,
            aiohttp.ClientSession() as session,
            session.get(f"{address}/api/jobs/") as reply,
        ):
            assert await reply.json() == []
    with pytest.raises(LauncherError, match="nobody has no head pod"):
        async with launcher.dashboard("nobody", 0):
            pass


async def test_inside_a_pod_services_are_asked_by_name(
    double: Any, make: MakeLauncher, namespace: str, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = await standing(double, make, namespace, dashboard)
    async with launcher._site.port() as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        async with reach(port, "train", 8265) as address:
            assert address == f"train-head-svc.{namespace}.svc.cluster.local:8265"


def test_the_newest_of_a_daemons_jobs_is_the_one_that_started_last() -> None:
    from rollhook.ray_jobs import RayJob

    jobs = [RayJob(name, "RUNNING", raw={"start_time": start}) for name, start in
            (("a", 1), ("a-17", 3), ("a-b", 9), ("ab", 9), ("a-18", 2))]  # fmt: skip
    found = newest(jobs, "a")
    assert found is not None
    assert found.id == "a-17"
    assert newest(jobs, "none") is None
