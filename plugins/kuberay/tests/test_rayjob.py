"""A RayJob's life against the double: its jobs are scripted, the API and its client are not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from kuberay_site import MakeLauncher
from kuberay_site import job as job_of

from rollhook.errors import LauncherError
from rollhook.launcher import ENDED, Handle, Job, JobStatus
from rollhook_kuberay.launcher import KubeRayLauncher
from rollhook_kuberay.port import KubeError

MakeJob = Callable[..., Job]
SHORT: dict[str, Any] = {"ttl_seconds": 0}


@pytest.fixture
def run_id(namespace: str) -> str:
    return f"run-{namespace}"


@pytest.fixture
def job(run_id: str) -> Callable[..., Job]:
    return lambda **given: job_of(run_id=run_id, directory=f"/runs/{run_id}/attempts/1", **given)


async def until(ask: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := await asyncio.to_thread(ask)):
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.05)
    return found


async def ended(launcher: KubeRayLauncher, handle: Handle, seconds: float = 20.0) -> JobStatus:
    async with asyncio.timeout(seconds):
        while (status := await launcher.status(handle)).state not in {*ENDED, "lost"}:
            await asyncio.sleep(0.05)
        return status


async def running(launcher: KubeRayLauncher, handle: Handle) -> None:
    async with asyncio.timeout(20):
        while (await launcher.status(handle)).state != "running":
            await asyncio.sleep(0.05)


async def test_what_is_created_is_what_the_plan_says_and_belongs_to_the_rayjob(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    launcher = make(claims={"compute-domain-channel": {"kind": "compute_domain"}})
    plan = launcher.plan(job(files={"note.txt": "x"}))
    assert list(await launcher.preflight(plan)) == []
    handle = await launcher.submit(plan)
    (made,) = double.objects("RayJob", namespace)
    planned = plan.requests[f"RayJob {run_id}-a1"]
    assert made["metadata"]["annotations"] == planned["metadata"]["annotations"]
    assert made["spec"]["entrypoint"] == planned["spec"]["entrypoint"]
    for kind in ("ConfigMap", "ComputeDomain"):
        (each,) = double.objects(kind, namespace)
        assert each["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert json.loads(json.dumps(handle.data))["namespace"] == namespace
    assert (await ended(launcher, handle)).state == "succeeded"
    assert await launcher.stop(handle) == f"{run_id}-a1 has ended already"
    assert await launcher.cleanup(handle) == [
        f"removed the RayJob {run_id}-a1 with its cluster, files and claims"
    ]
    for kind in ("RayJob", "ConfigMap", "ComputeDomain", "RayCluster", "Pod"):
        await until(lambda kind=kind: not double.objects(kind, namespace))
    assert (await launcher.status(handle)).state == "lost"
    assert await launcher.cleanup(handle) == []


async def test_the_cluster_goes_when_the_job_has_ended_and_the_rayjob_stays(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    launcher = make(**SHORT)
    handle = await launcher.submit(launcher.plan(job()))
    assert (await ended(launcher, handle)).state == "succeeded"
    await until(lambda: not double.objects("RayCluster", namespace))
    assert double.objects("RayJob", namespace)
    kept = f"output with it; it is kept in /runs/{run_id}/attempts/1/logs/driver.log"
    with pytest.raises(LauncherError, match=kept):
        async for _ in launcher.logs(handle):
            pass
    assert kept in b"".join([chunk async for chunk in launcher.logs(handle, follow=True)]).decode()


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        (
            {"status": "FAILED", "message": "Job entrypoint command failed with exit code 7, last logs:\nx"},
            "failed",
            7,
        ),
        (
            {"status": "FAILED", "message": "Job entrypoint command failed with exit code 3, last logs:"},
            "stopped",
            3,
        ),
        ({"status": "STOPPED"}, "stopped", None),
    ],
)
async def test_how_it_ended(
    double: Any,
    make: MakeLauncher,
    script: dict[str, Any],
    state: str,
    code: int | None,
    job: MakeJob,
    run_id: str,
) -> None:
    double.jobs(**script)
    launcher = make()
    handle = await launcher.submit(launcher.plan(job(stopped_code=3)))
    status = await ended(launcher, Handle(handle.launcher, handle.job_id, handle.directory, handle.data, 3))
    assert (status.state, status.exit_code) == (state, code)


async def test_what_kuberay_finds_invalid_fails_at_once_with_its_words(
    double: Any, make: MakeLauncher, job: MakeJob, run_id: str
) -> None:
    launcher = make()
    plan = launcher.plan(job())
    plan.requests[f"RayJob {run_id}-a1"]["spec"]["runtimeEnvYAML"] = "- no\n- mapping"
    handle = await launcher.submit(plan)
    status = await ended(launcher, handle)
    assert status.state == "failed"
    assert "ValidationFailed" in status.message


async def test_a_job_that_does_not_run_yet_is_stopped_by_ending_its_cluster(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    double.pods(pending=None, reason="Unschedulable")
    launcher = make(shutdown=False)
    handle = await launcher.submit(launcher.plan(job()))
    await until(lambda: double.objects("RayCluster", namespace))
    assert (await launcher.status(handle)).state == "pending"
    assert "suspends it" in await launcher.stop(handle)
    assert (await ended(launcher, handle)).state == "stopped"
    await until(lambda: not double.objects("RayCluster", namespace))
    assert await launcher.stop(handle) == f"{run_id}-a1 has ended already"
    assert await launcher.cleanup(handle)


async def test_force_frees_the_nodes_of_a_running_job(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    double.jobs(seconds=None)
    launcher = make(deletion={})
    handle = await launcher.submit(launcher.plan(job()))
    await running(launcher, handle)
    with pytest.raises(LauncherError, match="not over"):
        await launcher.cleanup(handle)
    assert await launcher.stop(handle, force=True)
    assert (await ended(launcher, handle)).state == "stopped"
    await until(lambda: not double.objects("RayCluster", namespace))


async def test_a_name_in_use_is_found_before_and_replaced_on_request(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    launcher = make(**SHORT)
    plan = launcher.plan(job())
    handle = await launcher.submit(plan)
    await ended(launcher, handle)
    (problem, left) = await launcher.preflight(plan)
    assert f"RayJob {run_id}-a1 is there already (Complete)" in problem
    assert f"ConfigMap {run_id}-a1-files is left" in left
    with pytest.raises(LauncherError, match=r"launcher\.replace=true"):
        await launcher.submit(plan)
    uid = double.objects("RayJob", namespace)[0]["metadata"]["uid"]
    again = make(**SHORT, replace=True)
    assert list(await again.preflight(plan)) == []
    double.pods(pending=None)
    await again.submit(plan)
    assert double.objects("RayJob", namespace)[0]["metadata"]["uid"] != uid
    await until(lambda: double.objects("RayCluster", namespace))
    with pytest.raises(LauncherError, match="is there and not over"):
        await again.submit(plan)


async def test_when_a_dependant_cannot_be_made_the_rayjob_does_not_stay(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    double.fault(
        method="POST", path="/configmaps", status=403, body={"kind": "Status", "message": "no quota"}
    )
    double.fault(
        method="POST", path="/configmaps", status=403, body={"kind": "Status", "message": "no quota"}
    )
    double.fault(
        method="POST", path="/configmaps", status=403, body={"kind": "Status", "message": "no quota"}
    )
    double.fault(
        method="POST", path="/configmaps", status=403, body={"kind": "Status", "message": "no quota"}
    )
    launcher = make()
    with pytest.raises(KubeError, match="no quota"):
        await launcher.submit(launcher.plan(job()))
    await until(lambda: not double.objects("RayJob", namespace))


async def test_preflight_says_all_that_is_missing_at_once(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    double.options(
        deny=[{"verb": "create", "resource": "rayjobs"}, {"verb": "create", "resource": "configmaps"}]
    )
    launcher = make(
        image_pull_secrets=["pull"], service_account="runner", env_from=["tokens"],
        secrets={"KEY": "k8s:wandb/key"}, mounts=[{"path": "/runs", "claim": "ws"}],
    )  # fmt: skip
    found = "\n".join(await launcher.preflight(launcher.plan(job(secrets={"KEY": "k8s:wandb/key"}))))
    for word in (
        "you may not create rayjobs", "you may not create configmaps", "Secret pull is not",
        "Secret tokens is not", "Secret wandb is not", "ServiceAccount runner is not",
        "PersistentVolumeClaim ws is not",
    ):  # fmt: skip
        assert word in found, found
    assert "files is not" not in found


async def test_a_cluster_with_the_name_of_the_job_would_make_it_hang(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    standing = make(mode="raycluster", clusters={"training": {"name": f"{run_id}-a1"}})
    from rollhook.launcher import ClusterOptions

    await standing.cluster_up([], ClusterOptions(timeout=20), print)
    launcher = make()
    (found,) = await launcher.preflight(launcher.plan(job()))
    assert f"{run_id}-a1-head-svc" in found


async def test_kuberay_that_is_not_installed_is_said(
    double: Any, make: MakeLauncher, job: MakeJob, run_id: str
) -> None:
    body = {"kind": "Status", "message": "the server could not find the requested resource"}
    double.fault(path="/rayjobs", times=None, status=404, body=body)
    launcher = make()
    found = await launcher.preflight(launcher.plan(job()))
    assert any("have KubeRay installed" in each for each in found), found


async def test_debug_tells_and_never_raises(
    double: Any, make: MakeLauncher, namespace: str, job: MakeJob, run_id: str
) -> None:
    double.jobs(seconds=None)
    launcher = make()
    handle = await launcher.submit(launcher.plan(job()))
    await running(launcher, handle)
    files = await launcher.debug(handle)
    assert json.loads(files["rayjob.json"])["status"]["jobDeploymentStatus"] == "Running"
    assert json.loads(files["pods.json"])
    assert "ray-nodes.json" in files
    double.fault(path="/", times=None, drop="before")
    files = await launcher.debug(handle)
    assert "does not answer" in files["kubernetes.txt"] or "broke" in files["kubernetes.txt"]
