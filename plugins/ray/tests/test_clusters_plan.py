"""How the nodes of a cluster are started, and what is rendered; nothing is contacted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollhook.errors import UsageError
from rollhook.testing.environment import build_context
from rollhook_ray import RayLauncherConfig
from rollhook_ray.cluster_keys import ClusterKeys, Host
from rollhook_ray.clusters_plan import Node, plan_nodes
from rollhook_ray.clusters_record import new_record
from rollhook_ray.clusters_site import Site
from rollhook_ray.compose import render
from rollhook_ray.launcher import RayLauncher


def option(node: Node, name: str) -> str | None:
    found = [each.partition("=")[2] for each in node.argv if each.startswith(f"--{name}=")]
    return found[0] if found else None


def test_the_head_offers_nothing_and_workers_carry_the_resource() -> None:
    head, *workers = plan_nodes(ClusterKeys(gpus_per_worker=4), nonce="n", cpus=64)
    assert "--head" in head.argv
    assert (option(head, "num-cpus"), option(head, "num-gpus"), option(head, "resources")) == ("0", "0", None)
    assert option(head, "dashboard-host") == "127.0.0.1"
    for number, worker in enumerate(workers):
        assert option(worker, "address") == "127.0.0.2:6379"
        assert option(worker, "resources") == '{"worker_node": 100.0}'
        assert (option(worker, "num-cpus"), option(worker, "num-gpus")) == ("32", "4")
        assert worker.env["CUDA_VISIBLE_DEVICES"] == ["0,1,2,3", "4,5,6,7"][number]
    assert all(node.env["RAY_AUTH_MODE"] == "token" for node in (head, *workers))


def test_hosts_have_addresses_of_their_own_and_overrides() -> None:
    keys = ClusterKeys(
        by="ssh",
        hosts=(
            "ops@head",
            Host(host="gpu-1", address="10.0.0.7", gpus=8, python="/opt/bin/python"),
            "gpu-2",
        ),
        cpus_per_worker=96,
    )
    head, first, second = plan_nodes(
        keys, nonce="n", resolve={"head": "10.0.0.5", "gpu-2": "10.0.0.8"}.__getitem__
    )
    assert [node.host for node in (head, first, second)] == ["ops@head", "gpu-1", "gpu-2"]
    assert option(first, "node-ip-address") == "10.0.0.7"
    assert option(first, "address") == option(second, "address") == "10.0.0.5:6379"
    assert (first.argv[0], second.argv[0]) == ("/opt/bin/python", "python3")
    assert (option(first, "num-gpus"), option(second, "num-gpus")) == ("8", None)
    assert "CUDA_VISIBLE_DEVICES" not in first.env  # a machine of its own sees all of its GPUs


@given(st.lists(st.sampled_from(["a", "b", "127.0.0.2", "127.0.0.3"]), min_size=2, max_size=20))
def test_no_two_nodes_of_a_machine_share_a_port(hosts: list[str]) -> None:
    nodes = plan_nodes(ClusterKeys(by="ssh", hosts=tuple(hosts)), nonce="n")
    for machine in {node.machine for node in nodes}:
        taken: set[int] = set()
        for node in (node for node in nodes if node.machine == machine):
            low, high = int(option(node, "min-worker-port") or 0), int(option(node, "max-worker-port") or 0)
            ports = set(node.ports) | set(range(low, high + 1))
            assert len(ports) == len(node.ports) + high + 1 - low
            assert not ports & taken
            assert node.agent in node.ports
            assert max(ports) < 65536
            taken |= ports


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"by": "ssh", "hosts": ["alone"]}, "the head and at least one worker"),
        ({"hosts": ["a", "b"]}, "needs `by: ssh`"),
        ({"by": "ssh", "hosts": ["-oProxyCommand=x", "b"]}, "hosts"),
        ({"name": "../up"}, "name"),
        ({"temp_root": "relative"}, "temp_root"),
        ({"ports": {"gcs": 80}}, "gcs"),
        ({"ports": {"gcs": 11002}}, "below node"),
        ({"ports": {"gcs": 8265}}, "have to differ"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_keys_that_make_no_cluster_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterKeys.model_validate(keys)


def test_without_a_token_nothing_but_loopback_is_used() -> None:
    with pytest.raises(UsageError, match="auth: none is for loopback addresses"):
        plan_nodes(ClusterKeys(by="ssh", hosts=("10.0.0.1", "10.0.0.2"), auth="none"), nonce="n")
    with pytest.raises(UsageError, match="auth: none is for loopback addresses"):
        plan_nodes(ClusterKeys(auth="none", dashboard_host="0.0.0.0"), nonce="n")
    assert plan_nodes(ClusterKeys(auth="none"), nonce="n")[0].env["RAY_AUTH_MODE"] == "disabled"


def test_ray_keeps_its_files_where_the_recipe_says_now() -> None:
    record = new_record(ClusterKeys(temp_root="/old"))
    site = Site(ClusterKeys(temp_root="/new"), record, None, print)
    assert {option(node, "temp-dir") for node in site.nodes} == {f"/new/rh-{record.nonce[:10]}/ray"}


def test_a_plan_is_the_same_each_time_and_says_all(tmp_path: Path) -> None:
    hosts = ["head.example", "gpu.example"]
    config = RayLauncherConfig.model_validate(
        {"token": "env:NEVER_SET", "cluster": {"by": "ssh", "hosts": hosts, "setup": ". /etc/profile"}}
    )
    plan = RayLauncher(config, build_context(tmp_path)).cluster_plan()
    assert plan == RayLauncher(config, build_context(tmp_path)).cluster_plan()
    data = plan.to_data()
    assert list(data["requests"]) == ["head", "worker-0"]
    assert data["commands"] == [data["requests"][name]["argv"] for name in ("head", "worker-0")]
    assert data["requests"]["worker-0"]["setup"] == ". /etc/profile"
    assert "worker-0 on gpu.example, address gpu.example" in data["notes"]


def test_the_compose_project_has_the_topology_and_keeps_dollars(tmp_path: Path) -> None:
    keys = {
        "by": "compose",
        "name": "mvp",
        "gpus_per_worker": 4,
        "setup": 'export A="$HOME"',
        "env": {"B": "c$d"},
    }
    config = RayLauncherConfig.model_validate({"cluster": keys})
    plan = RayLauncher(config, build_context(tmp_path)).cluster_plan()
    project = yaml.safe_load(plan.files["docker-compose.yaml"])
    services = project["services"]
    assert list(services) == ["head", "worker-0", "worker-1"]
    assert [each["container_name"] for each in services.values()] == [f"mvp-ray-{name}" for name in services]
    head, worker = services["head"], services["worker-1"]
    assert {"--num-cpus=0", "--num-gpus=0"} <= set(head["command"])
    assert head["ports"] == ["127.0.0.1:8265:8265"]
    assert '--resources={"worker_node": 100.0}' in worker["command"]
    assert worker["depends_on"] == {"head": {"condition": "service_healthy"}}
    devices = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["4", "5", "6", "7"], "capabilities": ["gpu"]}]
    assert all(each["volumes"][0]["target"] == "/private" for each in services.values())
    # Compose reads $$ as one $, and a lone one as a variable
    assert worker["environment"]["B"] == "c$$d"
    assert worker["command"][:2] == ["bash", "-c"]
    assert 'export A="$$HOME"' in worker["command"][2]
    assert not [each for each in worker["command"] if "$" in each.replace("$$", "")]
    assert project["secrets"] == {"ray_token": {"file": "./mvp.token"}}
    assert worker["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
    assert "secrets" not in yaml.safe_load(
        render(ClusterKeys(by="compose", auth="none"))["docker-compose.yaml"]
    )
