"""A real Ray cluster over a real ssh, beside another Ray that is none of its business."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import ADDRESSES, Site, alive_with, free_ports, sshd, until

from rollhook.errors import LauncherError
from rollhook.launcher import ClusterOptions
from rollhook.ray_jobs import RayJobs
from rollhook.testing.ray_cluster import RayCluster
from rollhook_ray import clusters_node
from rollhook_ray.clusters_record import token_path

_LEAVES_A_DAEMON = "; ".join(
    [
        "import ray, subprocess",
        "subprocess.Popen(['sleep', '4321'], start_new_session=True, env={})",
        "print('done')",
    ]
)


@pytest.fixture
def short() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    yield path
    for state in clusters_node.read_states("real").values():
        clusters_node.end_node(state)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def site(tmp_path: Path, short: Path) -> Site:
    keys = {
        "name": "real",
        "ports": free_ports(),
        "temp_root": str(short),
        "python": sys.executable,
        "cpus_per_worker": 2,
        "object_store_bytes": 100_000_000,
        "old_sessions": f"{short}/*",
        "old_containers": (),
        "env": {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"},
    }
    return Site(tmp_path, keys)


def belonging() -> list[int]:
    table = clusters_node.processes()
    states = clusters_node.read_states("real").values()
    return [each.pid for state in states for each in clusters_node.belonging(state, table)]


@pytest.mark.timeout(400)
async def test_three_hosts_by_ssh_beside_another_ray(
    site: Site, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = set(cluster.head.processes())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with sshd(tmp_path / "sshd", tmp_path / "state") as server:
        site.keys |= {"by": "ssh", "hosts": list(ADDRESSES), "ssh": server.keys()}
        clash = site.keys["ports"] | {"node": cluster.head.agent_port - 2, "gcs": 20001}
        with pytest.raises(
            LauncherError, match=rf"port {cluster.head.agent_port} .* taken by process \d+ \(ray::"
        ):
            await site.up(ports=clash)
        info = await site.up(timeout=300)
        assert (info.state, info.nodes, info.address.partition(":")[0]) == ("ready", 3, "127.0.0.2")

        token = token_path("real").read_text()
        client = RayJobs(info.dashboard, token=lambda: token)
        nodes = {node.ip: node for node in await client.nodes()}
        assert sorted(nodes) == list(ADDRESSES)
        assert not {"CPU", "GPU"} & set(nodes["127.0.0.2"].resources)
        assert sum(node.resources.get("worker_node", 0) for node in nodes.values()) == 200
        body = {
            "submission_id": "leaves-a-daemon",
            "entrypoint": f'python3 -c "{_LEAVES_A_DAEMON}"',  # that beside the Python of the nodes
            "entrypoint_resources": {"worker_node": 1},
            "entrypoint_num_cpus": 1,
        }
        await client.submit(body)
        job = await client.wait("leaves-a-daemon", 60)
        assert job.status == "SUCCEEDED", await client.log("leaves-a-daemon")
        assert job.node_id in {nodes["127.0.0.3"].id, nodes["127.0.0.4"].id}
        (daemon,) = alive_with("sleep 4321")
        assert daemon in belonging()

        state = clusters_node.read_states("real")["worker-1"]
        raylet = next(
            each.pid
            for each in clusters_node.belonging(state, clusters_node.processes())
            if "/raylet/raylet" in clusters_node.command(each.pid)
        )
        os.kill(raylet, signal.SIGKILL)
        while (status := await site.status()).state != "degraded":
            await asyncio.sleep(0.2)
        assert status.message == "worker-1 is missing"
        assert (await site.up(timeout=300)).state == "ready"
        assert sum("runs already" in line for line in site.said) == 2

        pids = belonging()
        assert len(await site.down()) == 3
        assert not [pid for pid in pids if clusters_node.process(pid)]
        assert not alive_with("sleep 4321")
    assert other <= set(cluster.head.processes())
    assert len([node for node in await RayJobs(cluster.dashboard).nodes() if node.alive]) >= 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_an_old_ray_is_removed_on_confirmation_and_no_other(
    site: Site, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.up(workers=1, timeout=200)
    pids = belonging()
    elsewhere = tmp_path / "elsewhere"
    with monkeypatch.context() as other_user:
        other_user.setenv("XDG_STATE_HOME", str(elsewhere))
        assert await site.launcher().clusters() == []
        options = ClusterOptions(old=True, confirm=lambda question: True)
        done = await site.launcher().cluster_down([], options, site.said.append)
        assert [each.startswith("removed on this machine: Ray in ") for each in done] == [True]
    until(lambda: not [pid for pid in pids if clusters_node.process(pid)])
    assert (await site.status()).state == "stopped"
    assert len([node for node in await RayJobs(cluster.dashboard).nodes() if node.alive]) >= 3
