"""Clusters that stay and deployments beside them, on the double: made, found, compared, replaced, ended."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from kuberay_site import DEPLOYMENT, MakeLauncher, job, spec

from rollhook.errors import LauncherError, Unsupported, UsageError
from rollhook.launcher import ClusterOptions
from rollhook_kuberay.launcher import KubeRayLauncher

OPTIONS = ClusterOptions(timeout=20)


def deployment() -> dict[str, Any]:
    told = copy.deepcopy(DEPLOYMENT)
    told["template"]["metadata"]["labels"]["app"] = "sandbox"
    return {"name": "sandbox", "spec": told}


@pytest.fixture
def three(make: MakeLauncher) -> KubeRayLauncher:
    clusters = {"training": {"name": "train", "spec": spec(2)}, "generation": {"name": "gen"}}
    return make(mode="raycluster", clusters=clusters, deployments={"box": deployment()})


async def up(launcher: KubeRayLauncher, *targets: str, **options: Any) -> list[str]:
    said: list[str] = []
    await launcher.cluster_up(targets, ClusterOptions(**{"timeout": 20, **options}), said.append)
    return said


async def test_all_is_brought_up_found_up_and_ended(
    double: Any, three: KubeRayLauncher, namespace: str
) -> None:
    assert list(three.cluster_targets()) == ["deployments.box", "clusters.generation", "clusters.training"]
    said = await up(three)
    assert "RayCluster train was created" in said
    states = {each.target: each.state for each in await three.cluster_status()}
    assert states == dict.fromkeys(three.cluster_targets(), "ready")
    assert {each.name for each in await three.clusters()} == {"train", "gen"}
    again = await up(three)
    assert "RayCluster train is there and as the recipe says" in again
    assert "Deployment sandbox is there and as the recipe says" in again
    ended = await three.cluster_down([], OPTIONS, print)
    assert list(ended) == [
        "RayCluster train was deleted", "RayCluster gen was deleted", "Deployment sandbox was deleted",
        "Service sandbox was deleted",
    ]  # fmt: skip
    for kind in ("RayCluster", "Deployment", "Service"):
        assert double.objects(kind, namespace) == []
    assert list(await three.cluster_down([], OPTIONS, print)) == []
    assert {each.state for each in await three.cluster_status()} == {"absent"}


async def test_targets_are_brought_up_and_ended_alone(
    double: Any, three: KubeRayLauncher, namespace: str
) -> None:
    await up(three, "training")
    assert [each["metadata"]["name"] for each in double.objects("RayCluster", namespace)] == ["train"]
    await up(three, "deployments.box")
    await three.cluster_down(["clusters.training"], OPTIONS, print)
    assert double.objects("Deployment", namespace)
    with pytest.raises(UsageError, match=r"no target 'gym'; it has deployments\.box, clusters\.generation"):
        three.cluster_plan(["gym"])
    plan = three.cluster_plan(["generation"])
    assert list(plan.requests) == ["RayCluster gen"]


async def test_what_the_cluster_fills_in_is_no_drift_and_a_change_is(
    double: Any, make: MakeLauncher, namespace: str
) -> None:
    one = {"training": {"name": "train", "spec": spec(1)}}
    await up(make(mode="raycluster", clusters=one))
    live = double.objects("RayCluster", namespace)[0]
    assert live["spec"]["workerGroupSpecs"][0]["numOfHosts"] == 1  # a default of the CRD
    changed = make(mode="raycluster", clusters=one, service_account="default")
    said = await up(changed)
    assert any("is not as the recipe says now, and is used as it is" in line for line in said)
    assert double.objects("RayCluster", namespace)[0]["metadata"]["uid"] == live["metadata"]["uid"]
    said = await up(changed, recreate=True)
    assert any("it is replaced" in line for line in said)
    assert double.objects("RayCluster", namespace)[0]["metadata"]["uid"] != live["metadata"]["uid"]
    assert "RayCluster train is there and as the recipe says" in await up(changed)


async def test_a_deployment_that_changed_is_changed(double: Any, make: MakeLauncher, namespace: str) -> None:
    told = deployment()
    keys = {"mode": "raycluster", "clusters": {"training": {"name": "train"}}}
    await up(make(**keys, deployments={"box": told}), "deployments.box")
    told["spec"]["replicas"] = 1
    said = await up(make(**keys, deployments={"box": told}), "deployments.box")
    assert "Deployment sandbox was changed" in said
    assert double.objects("Deployment", namespace)[0]["spec"]["replicas"] == 1


async def test_claims_belong_to_their_cluster_and_go_with_it(
    double: Any, make: MakeLauncher, namespace: str
) -> None:
    claims = {"compute-domain-channel": {"kind": "compute_domain"}, "nic": {"device_class": "nic.x"}}
    launcher = make(mode="raycluster", clusters={"training": {"name": "train"}}, claims=claims)
    await up(launcher)
    await up(launcher)
    uid = double.objects("RayCluster", namespace)[0]["metadata"]["uid"]
    for kind in ("ComputeDomain", "ResourceClaimTemplate"):
        (each,) = double.objects(kind, namespace)
        assert each["metadata"]["ownerReferences"][0]["uid"] == uid
    await launcher.cluster_down([], OPTIONS, print)
    async with asyncio.timeout(20):
        while double.objects("ComputeDomain", namespace) + double.objects("ResourceClaimTemplate", namespace):
            await asyncio.sleep(0.05)


async def test_someone_elses_is_left_alone(double: Any, make: MakeLauncher) -> None:
    one: dict[str, Any] = {"mode": "raycluster", "clusters": {"training": {"name": "train"}}}
    await up(make(**one, user="jane_d"))
    mine = make(**one)
    with pytest.raises(LauncherError, match="belongs to jane-d"):
        await up(mine)
    with pytest.raises(LauncherError, match="belongs to jane-d"):
        await mine.cluster_down([], OPTIONS, print)
    (problem,) = await mine.preflight(mine.plan(job()))
    assert "belongs to jane-d" in problem


async def test_what_is_not_ready_in_time_is_said_with_the_reason(double: Any, make: MakeLauncher) -> None:
    double.pods(match="worker", pending=None, reason="Unschedulable")
    launcher = make(mode="raycluster", clusters={"training": {"name": "train"}})
    with pytest.raises(
        TimeoutError, match=r"RayCluster train is not ready after 1 s: .*0 of 1 workers are ready"
    ):
        await up(launcher, timeout=1.0)
    (info,) = await launcher.cluster_status()
    assert info.state == "pending"
    assert "Unschedulable" in info.message


async def test_a_cluster_that_lost_its_workers_is_degraded_though_kuberay_calls_it_ready(
    double: Any, make: MakeLauncher, namespace: str
) -> None:
    launcher = make(mode="raycluster", clusters={"training": {"name": "train"}})
    await up(launcher)
    double.pods(match="worker", pending=None)
    (worker,) = (
        p for p in double.objects("Pod", namespace) if p["metadata"]["labels"]["ray.io/node-type"] == "worker"
    )
    async with launcher._site.port() as port:
        await port.delete("Pod", worker["metadata"]["name"])
    async with asyncio.timeout(20):
        while (await launcher.cluster_status())[0].state != "degraded":
            await asyncio.sleep(0.05)


async def test_mode_rayjob_keeps_no_clusters(make: MakeLauncher) -> None:
    launcher = make()
    with pytest.raises(Unsupported, match="mode=raycluster"):
        launcher.cluster_targets()
    with pytest.raises(Unsupported, match="mode=raycluster"):
        await launcher.cluster_up([], OPTIONS, print)
    assert list(await launcher.clusters()) == []


async def test_options_of_other_launchers_are_refused(make: MakeLauncher) -> None:
    launcher = make(mode="raycluster", clusters={"training": {"name": "train"}})
    with pytest.raises(Unsupported, match="--install"):
        await launcher.cluster_up([], ClusterOptions(install=True), print)


def test_a_plan_of_clusters_has_daemons_too() -> None:
    from kuberay_site import launcher

    daemon = {"id": "server", "entrypoint": "serve --port 1", "env": {"A": "it's"}}
    made = launcher(
        mode="raycluster", clusters={"training": {"name": "t"}, "generation": {"name": "g", "daemon": daemon}}
    )
    body = made.cluster_plan().requests["Ray job server on g"]
    assert body["submission_id"] == "server"
    assert body["entrypoint"] == "export A='it'\"'\"'s'\nserve --port 1"
