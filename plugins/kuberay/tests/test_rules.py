"""What is refused before anything is contacted, with the key and the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kuberay_site import job, keys, launcher, spec
from pydantic import ValidationError

from rollhook.errors import LauncherError
from rollhook.recipe.schema import Recipe
from rollhook_kuberay import rollhook_check
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.rules import problems


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"image": "  "}, "image"),
        ({"namespace": " "}, "namespace"),
        ({"typo": 1}, "typo"),
        ({"scheduler": {"typo": 1}}, "scheduler.typo"),
        ({"scheduler": {"kind": "kai"}}, "needs a queue"),
        ({"scheduler": {"kind": "kueue"}}, "needs a queue"),
        ({"scheduler": {"kind": "slurm", "queue": "q"}}, "scheduler.kind"),
        ({"scheduler": {"queue": "q"}}, "has a queue"),
        ({"scheduler": {"kind": "kueue", "queue": "q", "topology": "t"}}, "has a topology"),
        ({"mounts": [{"path": "/runs"}]}, "exactly one of claim"),
        ({"mounts": [{"path": "/runs", "claim": "a", "host_path": "/b"}]}, "exactly one of claim"),
        ({"mounts": [{"path": "runs", "claim": "a"}]}, "mounts.0.path"),
        ({"placement": {"tolerations": [{"key": "a", "effect": "Never"}]}}, "effect"),
        ({"placement": {"tolerations": [{"value": "a"}]}}, "operator: Exists"),
        ({"clusters": {"training": {"segment_size": 0}}}, "segment_size"),
        ({"clusters": {"training": {"segment_size": -1}}}, "segment_size"),
        ({"clusters": {}}, "clusters"),
        ({"clusters": {"gym": {}}}, "clusters.gym"),
        ({"claims": {"nic": {}}}, "device_class"),
        ({"secrets": {"KEY": "plain-value"}}, "secrets.KEY"),
    ],
)
def test_keys_of_the_wrong_kind(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        KubeRayLauncherConfig.model_validate({"image": "img:1", **given})
    said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in caught.value.errors()]
    assert any(word in line for line in said), said
    assert "plain-value" not in " ".join(said)


def test_an_image_is_needed() -> None:
    with pytest.raises(ValidationError, match="image"):
        KubeRayLauncherConfig.model_validate({})


def test_what_stands_where_nothing_is_said() -> None:
    made = keys()
    assert (made.mode, made.submit, made.code, made.scheduler.kind) == (
        "rayjob",
        "port_forward",
        "image",
        "default",
    )
    assert (made.shutdown, made.submission_mode, made.exec_directory) == (True, "HTTPMode", "/tmp")
    assert list(made.clusters) == ["training"]


def broken(**worker: Any) -> dict[str, Any]:
    made = copy.deepcopy(spec())
    made["workerGroupSpecs"][0].update(worker)
    return made


RAYCLUSTER = {"mode": "raycluster", "clusters": {"training": {"name": "rc"}}}
LATER = {
    "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"spec": {"containers": [{"name": "c"}]}}}
}


@pytest.mark.parametrize(
    ("given", "key", "word"),
    [
        ({"clusters": {"generation": {}}}, "clusters", "no training cluster"),
        ({"clusters": {"training": {}, "generation": {}}}, "clusters.generation", "mode rayjob"),
        ({"deployments": {"box": {"name": "box", **LATER}}}, "deployments.box", "mode rayjob"),
        (
            {"clusters": {"training": {"daemon": {"id": "d", "entrypoint": "sleep 1"}}}},
            "clusters.training.daemon",
            "mode rayjob",
        ),
        ({"code": "upload", "code_path": "."}, "code", "cannot be upload"),
        ({"submit": "exec"}, "submit", "no effect"),
        ({"recreate": True}, "recreate", "no effect"),
        ({"skip_daemons": True}, "skip_daemons", "no effect"),
        ({"code": "path"}, "code_path", "missing"),
        ({"code": "path", "code_path": "here"}, "code_path", "absolute"),
        ({"scheduler": {"kind": "kueue", "queue": "q"}, "shutdown": False}, "shutdown", "kueue"),
        (
            {"scheduler": {"kind": "kai", "queue": "q"}, "submission_mode": "K8sJobMode"},
            "submission_mode",
            "gang",
        ),
        ({"mode": "raycluster"}, "clusters.training.name", "missing"),
        (RAYCLUSTER | {"active_seconds": 5}, "active_seconds", "no effect"),
        (RAYCLUSTER | {"submit": "exec", "code": "upload", "code_path": "."}, "code", "submit exec"),
        ({"clusters": {"training": {"name": "a" * 54}}}, "clusters.training.name", "54 characters"),
        ({"clusters": {"training": {"name": "Upper"}}}, "clusters.training.name", "no name for Kubernetes"),
        ({"clusters": {"training": {"name": "1st"}}}, "clusters.training.name", "no name for Kubernetes"),
        ({"labels": {"a": "no spaces"}}, "labels.a", "no value of a label"),
        (
            {"clusters": {"training": {"spec": broken(maxReplicas=1)}}},
            "clusters.training.spec.workerGroupSpecs.0",
            "above maxReplicas",
        ),
        (
            {"clusters": {"training": {"spec": broken(minReplicas=None)}}},
            "clusters.training.spec.workerGroupSpecs.0",
            "no minReplicas",
        ),
        (
            {"clusters": {"training": {"spec": broken(template={"spec": {"containers": []}})}}},
            "clusters.training.spec.workerGroupSpecs.0",
            "no container",
        ),
        ({"clusters": {"training": {"spec": {}}}}, "clusters.training.spec.headGroupSpec", "no container"),
        (
            {"clusters": {"training": {"spec": spec(65), "segment_size": 16}}},
            "clusters.training.segment_size",
            "does not divide",
        ),
        (
            {"nodes": 5, "clusters": {"training": {"segment_size": 2}}},
            "clusters.training.segment_size",
            "divide",
        ),
        (
            {"nodes": 3, "clusters": {"training": {"spec": spec(2)}}},
            "clusters.training.spec",
            "2 worker nodes",
        ),
        (
            {"gpus_per_node": 8, "clusters": {"training": {"spec": spec(2, 4)}}},
            "clusters.training.spec.workerGroupSpecs.0",
            "launcher.gpus_per_node is 8",
        ),
    ],
)
def test_what_kubernetes_or_kuberay_would_refuse(given: dict[str, Any], key: str, word: str) -> None:
    found = problems(keys(**given))
    assert any(each[0] == key and word in each[1] and each[2] for each in found), found
    with pytest.raises(LauncherError) as caught:
        launcher(**given).plan(job())
    assert f"launcher.{key}: " in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"scheduler": {"kind": "kai", "queue": "q"}},
        RAYCLUSTER,
        RAYCLUSTER | {"deployments": {"box": {"name": "box", **LATER}}},
        {"nodes": 2, "gpus_per_node": 4, "clusters": {"training": {"spec": spec(2, 4)}}},
        {"clusters": {"training": {"spec": spec(64), "segment_size": 16}}},
    ],
)
def test_what_is_right_has_no_problems(given: dict[str, Any]) -> None:
    assert problems(keys(**given)) == []


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(LauncherError) as caught:
        launcher(code="path", recreate=True, clusters={"training": {"name": "Upper"}}).plan(job())
    assert len(str(caught.value).splitlines()) == 3


def test_two_clusters_of_one_name() -> None:
    found = problems(
        keys(mode="raycluster", clusters={"training": {"name": "a"}, "generation": {"name": "a"}})
    )
    assert any("as clusters.training.name is" in each[1] for each in found)


def recipe(root: str, **launcher: Any) -> Recipe:
    given = {"use": "kuberay", "image": "img:1", **launcher}
    return Recipe.model_validate({"name": "demo", "storage": {"root": root}, "launcher": given})


def test_runs_are_kept_on_a_volume() -> None:
    (found,) = rollhook_check(recipe("/runs/demo"))
    assert (found.key, "end with their pods" in found.message) == ("launcher.mounts", True)
    assert rollhook_check(recipe("/runs/demo", mounts=[{"path": "/runs", "claim": "ws"}])) == []
    (scratch,) = rollhook_check(recipe("/runs", mounts=[{"path": "/runs", "empty_dir": "1Gi"}]))
    assert scratch.key == "launcher.mounts"
    (relative,) = rollhook_check(recipe("./runs"))
    assert "relative" in relative.message
    own = spec()
    own["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "ws", "mountPath": "/runs"}
    ]
    assert rollhook_check(recipe("/runs/demo", clusters={"training": {"spec": own}})) == []


def test_other_launchers_are_none_of_its_business() -> None:
    other = Recipe.model_validate({"name": "demo", "launcher": {"use": "local"}})
    assert rollhook_check(other) == []


def test_a_standing_cluster_must_already_carry_the_secrets() -> None:
    with pytest.raises(LauncherError, match=r"Secrets files.*mount_secrets"):
        launcher(**RAYCLUSTER).plan(job(references=["k8s:files/a"]))
    with pytest.raises(LauncherError, match=r"KEY.*launcher\.secrets"):
        launcher(**RAYCLUSTER).plan(job(secrets={"KEY": "k8s:a/b"}))
    plan = launcher(**RAYCLUSTER, mount_secrets=["files"]).plan(job(references=["k8s:files/a"]))
    assert "RayCluster rc" in plan.requests
