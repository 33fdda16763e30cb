"""Keys and jobs as Kubernetes objects; what they say, and that KubeRay's CRDs take them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kuberay_site import DEPLOYMENT, faults, job, keys, launcher, spec

from rollhook.errors import LauncherError
from rollhook.ray_jobs import TELLS_ALL
from rollhook_kuberay.marks import sanitise, spec_hash, with_hash
from rollhook_kuberay.render import Renderer


def cluster(**given: Any) -> dict[str, Any]:
    role = given.pop("role", "training")
    made = keys(mode="raycluster", **given)
    name = made.clusters[role].name
    assert name is not None
    return Renderer(made, "tester").ray_cluster(role, name)


def templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    found = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return [found["headGroupSpec"]["template"], *(each["template"] for each in found["workerGroupSpecs"])]


def test_a_cluster_without_a_spec_has_a_head_without_cpus_and_the_nodes_asked_for() -> None:
    made = cluster(nodes=3, gpus_per_node=8, clusters={"training": {"name": "rc"}})
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("ray.io/v1", "RayCluster", "rc")
    assert made["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = made["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert faults(made) == []


def test_what_is_ours_is_patched_into_free_form_specs_and_the_rest_is_left() -> None:
    own = spec(2, 4, tolerations=[{"operator": "Exists"}], imagePullSecrets=[{"name": "old"}])
    own["workerGroupSpecs"][0]["template"]["metadata"] = {
        "labels": {"team": "pods"},
        "annotations": {"a": "b"},
    }
    own["workerGroupSpecs"][0]["template"]["spec"]["containers"].append({"name": "side", "image": "side:1"})
    before = copy.deepcopy(own)
    made = cluster(
        image_pull_secrets=["one", "two"], service_account="runner", labels={"team": "all", "x": "1"},
        annotations={"note": "all"}, namespace="ns-a",
        placement={"tolerations": [{"key": "gpu", "operator": "Exists"}], "node_selector": {"pool": "gpu"}},
        clusters={
            "training": {"name": "rc", "spec": own, "labels": {"x": "2"}, "annotations": {"note": "mine"}}
        },
    )  # fmt: skip
    assert own == before
    assert made["metadata"]["namespace"] == "ns-a"
    labels = made["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "rollhook"
    assert (labels["team"], labels["x"], labels["rollhook/owner"]) == ("all", "2", "tester")
    assert made["metadata"]["annotations"]["note"] == "mine"
    head, worker = templates(made)
    for each in (head, worker):
        assert each["spec"]["containers"][0]["image"] == "img:1"
        assert each["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
        assert each["spec"]["serviceAccountName"] == "runner"
    assert worker["spec"]["containers"][1]["image"] == "side:1"
    assert worker["metadata"]["labels"]["team"] == "pods"
    assert worker["metadata"]["annotations"] == {"a": "b"}
    assert worker["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert "nodeSelector" not in head["spec"]
    assert {"key": "gpu", "operator": "Exists"} in worker["spec"]["tolerations"]
    assert {"operator": "Exists"} in worker["spec"]["tolerations"]
    assert faults(made) == []


def test_without_pull_secrets_and_account_the_specs_keep_theirs() -> None:
    own = spec(1, 0, imagePullSecrets=[{"name": "old"}], serviceAccountName="mine")
    worker = templates(cluster(clusters={"training": {"name": "rc", "spec": own}}))[1]
    assert worker["spec"]["imagePullSecrets"] == [{"name": "old"}]
    assert worker["spec"]["serviceAccountName"] == "mine"


def test_annotations_are_absent_when_there_are_none_but_the_hash() -> None:
    made = Renderer(keys(), "tester").metadata("x")
    assert "annotations" not in made


@pytest.mark.parametrize(
    ("replicas", "size", "groups"),
    [
        (64, None, [("gpu-workers", 64)]),
        (64, 16, [(f"gpu-workers-segment-{number}", 16) for number in range(4)]),
        (8, 16, [("gpu-workers", 8)]),
    ],
)
def test_segments(replicas: int, size: int | None, groups: list[tuple[str, int]]) -> None:
    own = spec(
        replicas, 4, resourceClaims=[{"name": "compute-domain-channel", "resourceClaimTemplateName": "x"}]
    )
    own["workerGroupSpecs"][0]["template"]["metadata"] = {"annotations": {"kept": "yes"}}
    made = cluster(clusters={"training": {"name": "rc-test", "spec": own, "segment_size": size}})
    found = made["spec"]["workerGroupSpecs"]
    assert [(each["groupName"], each["replicas"]) for each in found] == groups
    for each in found:
        assert each["minReplicas"] == each["maxReplicas"] == each["replicas"]
        assert each["template"]["metadata"]["annotations"] == {"kept": "yes"}
        claim = each["template"]["spec"]["resourceClaims"][0]
        assert claim["resourceClaimTemplateName"] == "compute-domain-rc-test-training"
        assert each["template"]["spec"]["containers"][0]["image"] == "img:1"


def test_a_segment_size_that_does_not_divide_is_a_sentence() -> None:
    with pytest.raises(LauncherError, match=r"segment_size 16 does not divide the 65 replicas .*gpu-workers"):
        cluster(clusters={"training": {"name": "rc", "spec": spec(65), "segment_size": 16}})


def test_claims_are_made_for_what_pods_name_and_for_what_keys_say() -> None:
    own = spec(2, 4, resourceClaims=[{"name": "roce-channel", "resourceClaimTemplateName": "whatever"}])
    made = keys(
        mode="raycluster",
        clusters={"training": {"name": "rc", "spec": own}},
        claims={
            "compute-domain-channel": {"kind": "compute_domain"},
            "nic": {"device_class": "nic.x", "count": 2},
        },
    )
    renderer = Renderer(made, "tester")
    objects = {each["metadata"]["name"]: each for each in renderer.claims("training", "rc")}
    assert list(objects) == ["compute-domain-rc-training", "nic-rc-training", "roce-rc-training"]
    domain = objects["compute-domain-rc-training"]
    assert domain["kind"] == "ComputeDomain"
    assert domain["spec"]["channel"]["resourceClaimTemplate"]["name"] == "compute-domain-rc-training"
    (request,) = objects["roce-rc-training"]["spec"]["spec"]["devices"]["requests"]
    assert (request["exactly"]["deviceClassName"], request["exactly"]["count"]) == (
        "roce.networking.k8s.aws",
        8,
    )
    worker = renderer.cluster_spec("training", "rc")["workerGroupSpecs"][0]["template"]["spec"]
    assert {each["name"] for each in worker["resourceClaims"]} == {
        "roce-channel",
        "compute-domain-channel",
        "nic",
    }
    assert {"name": "nic"} in worker["containers"][0]["resources"]["claims"]
    assert faults(renderer.ray_cluster("training", "rc")) == []


def test_kai_is_on_every_pod_with_its_queue_and_topology() -> None:
    scheduler = {"kind": "kai", "queue": "team-a", "topology": "rack", "topology_placement": "gpu.clique"}
    made = cluster(scheduler=scheduler, clusters={"training": {"name": "rc"}})
    assert made["metadata"]["labels"]["kai.scheduler/queue"] == "team-a"
    head, worker = templates(made)
    for each in (head, worker):
        assert each["spec"]["schedulerName"] == "kai-scheduler"
        assert each["metadata"]["labels"]["kai.scheduler/queue"] == "team-a"
    assert worker["metadata"]["annotations"]["kai.scheduler/topology-required-placement"] == "gpu.clique"
    assert "annotations" not in head["metadata"]
    assert faults(made) == []


def test_kueue_admits_a_rayjob_that_begins_suspended() -> None:
    plan = launcher(scheduler={"kind": "kueue", "queue": "q"}).plan(job())
    made = plan.requests["RayJob demo-a1"]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert made["spec"]["suspend"] is True
    assert made["spec"]["shutdownAfterJobFinishes"] is True


def test_a_rayjob_says_whose_it_is_where_its_driver_goes_and_how_it_is_stopped() -> None:
    plan = launcher(nodes=2, gpus_per_node=4, retries=1, active_seconds=7200).plan(
        job(stop_grace_seconds=30.0)
    )
    made = plan.requests["RayJob demo-a1"]
    told = made["spec"]
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayJob")
    assert (told["jobId"], told["submissionMode"]) == ("demo-a1", "HTTPMode")
    assert told["entrypoint"] == f"exec env {TELLS_ALL} bash /var/run/rollhook/job/job.sh"
    assert told["entrypointNumCpus"] == 1.0
    assert json.loads(told["entrypointResources"]) == {"worker_node": 0.001}
    variables = yaml.safe_load(told["runtimeEnvYAML"])["env_vars"]
    assert variables["RAY_JOB_STOP_SIGNAL"] == "SIGINT"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 30
    assert variables["ROLLHOOK_WORKER_RESOURCE"] == "worker_node"
    group = told["rayClusterSpec"]["workerGroupSpecs"][0]
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"worker_node": 100}
    assert (told["backoffLimit"], told["activeDeadlineSeconds"]) == (1, 7200)
    assert made["metadata"]["labels"]["rollhook/run"] == "demo"
    assert faults(made) == []


@pytest.mark.parametrize(
    ("given", "shutdown", "ttl"),
    [({}, True, 60), ({"ttl_seconds": 0}, True, None), ({"shutdown": False}, False, None)],
)
def test_ttl_goes_with_shutdown_alone(given: dict[str, Any], shutdown: bool, ttl: int | None) -> None:
    told = launcher(**given).plan(job()).requests["RayJob demo-a1"]["spec"]
    assert told["shutdownAfterJobFinishes"] is shutdown
    assert told.get("ttlSecondsAfterFinished") == ttl


def test_deletion_rules_stand_in_for_shutdown() -> None:
    made = (
        launcher(deletion={"cluster_seconds": 300, "self_seconds": 86400})
        .plan(job())
        .requests["RayJob demo-a1"]
    )
    rules = made["spec"]["deletionStrategy"]["deletionRules"]
    assert made["spec"]["shutdownAfterJobFinishes"] is False
    assert {(each["policy"], each["condition"]["jobStatus"]) for each in rules} == {
        (policy, status)
        for policy in ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
        for status in ("SUCCEEDED", "FAILED")
    }
    assert faults(made) == []


def test_files_ride_in_a_config_map_that_belongs_to_the_rayjob() -> None:
    plan = launcher().plan(job(files={"recipe.lock.yaml": "lock: 1\n", "deep/note.txt": "n"}))
    made = plan.requests["ConfigMap demo-a1-files"]
    assert made["data"]["recipe.lock.yaml"] == "lock: 1\n"
    assert made["data"]["deep--note.txt"] == "n"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RayJob", "demo-a1", "(uid of the RayJob)")
    for template in templates(plan.requests["RayJob demo-a1"]):
        volume = next(each for each in template["spec"]["volumes"] if each["name"] == "rollhook-job")
        paths = {each["key"]: each["path"] for each in volume["configMap"]["items"]}
        assert paths["deep--note.txt"] == "deep/note.txt"
        assert set(paths) == set(made["data"])
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "rollhook-job", "mountPath": "/var/run/rollhook/job", "readOnly": True} in mounts


def test_files_that_no_object_can_hold_are_named_largest_first() -> None:
    files = {"small.txt": "x", "huge.bin": "y" * 1_200_000}
    with pytest.raises(LauncherError, match=r"largest are job/huge\.bin \(1200002 bytes\)"):
        launcher().plan(job(files=files))


def test_secrets_are_references_of_kubernetes_on_every_pod() -> None:
    plan = launcher(env_from=["tester-secrets"], secrets={"WANDB_API_KEY": "k8s:wandb/key"}).plan(
        job(
            secrets={"WANDB_API_KEY": "k8s:wandb/key", "OTHER": "k8s:more/token"},
            references=["k8s:files/a", "k8s:files/b", "env:HOME_TOKEN"],
        )
    )
    for template in templates(plan.requests["RayJob demo-a1"]):
        container = template["spec"]["containers"][0]
        variables = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"]}
        assert variables == {
            "WANDB_API_KEY": {"name": "wandb", "key": "key"},
            "OTHER": {"name": "more", "key": "token"},
        }
        assert container["envFrom"] == [{"secretRef": {"name": "tester-secrets"}}]
        volume = next(each["secret"] for each in template["spec"]["volumes"] if "secret" in each)
        assert volume == {
            "secretName": "files",
            "items": [{"key": "a", "path": "a"}, {"key": "b", "path": "b"}],
        }
        assert any(
            each["mountPath"] == "/var/run/rollhook/secrets/files" for each in container["volumeMounts"]
        )


def test_mounts_of_one_claim_are_one_volume() -> None:
    mounts = [
        {"path": "/runs", "claim": "ws"},
        {"path": "/opt/code", "claim": "ws", "sub_path": "tester/code", "read_only": True},
        {"path": "/cache", "host_path": "/var/cache"},
        {"path": "/dev/shm", "empty_dir": "64Gi", "memory": True},
    ]
    made = cluster(mounts=mounts, clusters={"training": {"name": "rc"}})
    for template in templates(made):
        volumes = template["spec"]["volumes"]
        assert [{k for k in each if k != "name"} for each in volumes] == [
            {"persistentVolumeClaim"}, {"hostPath"}, {"emptyDir"},
        ]  # fmt: skip
        assert volumes[2]["emptyDir"] == {"sizeLimit": "64Gi", "medium": "Memory"}
        code = template["spec"]["containers"][0]["volumeMounts"][1]
        assert (code["mountPath"], code["subPath"], code["readOnly"]) == ("/opt/code", "tester/code", True)
    assert faults(made) == []


def test_a_deployment_and_the_service_of_its_ports() -> None:
    before = copy.deepcopy(DEPLOYMENT)
    made = keys(
        mode="raycluster", labels={"team": "all"}, image_pull_secrets=["p"], service_account="sa",
        clusters={"training": {"name": "rc"}},
        deployments={"box": {"name": "sandbox", "spec": DEPLOYMENT, "labels": {"own": "1"}}},
    )  # fmt: skip
    deployment, service = Renderer(made, "tester").deployment("box")
    assert before == DEPLOYMENT
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert [each["image"] for each in template["spec"]["containers"]] == ["img:1", "other:1"]
    assert template["spec"]["imagePullSecrets"] == [{"name": "p"}]
    assert template["spec"]["serviceAccountName"] == "sa"
    assert template["metadata"]["labels"]["team"] == "pods"
    assert template["metadata"]["labels"]["own"] == "1"
    assert service["spec"]["selector"] == {"app": "sandbox"}
    assert service["spec"]["type"] == "ClusterIP"
    ports = [(each["name"], each["port"], each["protocol"]) for each in service["spec"]["ports"]]
    assert ports == [("http", 8080, "TCP"), ("port-1", 9090, "TCP"), ("port-2", 7070, "TCP")]


@pytest.mark.parametrize("lacking", ["selector", "ports"])
def test_a_deployment_without_selector_or_ports_has_no_service(lacking: str) -> None:
    told = copy.deepcopy(DEPLOYMENT)
    if lacking == "selector":
        del told["selector"]
    else:
        told["template"]["spec"]["containers"] = [{"name": "a"}]
    made = keys(clusters={"training": {"name": "rc"}}, deployments={"box": {"name": "sandbox", "spec": told}})
    assert len(Renderer(made, "tester").deployment("box")) == 1


def test_users_become_names() -> None:
    assert sanitise("Jane_D.oe") == "jane-d-oe"
    assert sanitise("___") == "nobody"


names = st.text("abcdef", min_size=1, max_size=4)
values = st.recursive(
    st.integers() | st.text(max_size=5) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(names, values, max_size=5), st.lists(names, unique=True, max_size=5), st.randoms())
def test_the_hash_knows_no_order_where_order_has_no_meaning(
    data: dict[str, Any], variables: list[str], random: Any
) -> None:
    env = [{"name": name, "value": "x"} for name in variables]
    shuffled = env.copy()
    random.shuffle(shuffled)
    turned = dict(reversed(list(data.items())))
    assert spec_hash({"spec": {**data, "env": env}}) == spec_hash({"spec": {"env": shuffled, **turned}})
    if env:
        assert spec_hash({"env": env}) != spec_hash({"env": [*env[:-1], {**env[-1], "value": "y"}]})


def test_the_hash_is_of_what_is_applied_and_stable() -> None:
    made = {"metadata": {"name": "x"}, "spec": {"args": ["a", "b"]}}
    assert with_hash(made) == with_hash(copy.deepcopy(made))
    assert spec_hash(made) != spec_hash({**made, "spec": {"args": ["b", "a"]}})
