"""What the suites of this plugin share."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.launcher import Job
from rollhook.secrets import resolve_secret
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.launcher import KubeRayLauncher

MakeLauncher = Callable[..., KubeRayLauncher]
PLURALS = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}


def keys(**given: Any) -> KubeRayLauncherConfig:
    """Return keys with an image."""
    return KubeRayLauncherConfig.model_validate({"image": "img:1", "user": "tester", **given})


def launcher(**given: Any) -> KubeRayLauncher:
    """Return a launcher with these keys."""
    context = BuildContext(logging.getLogger("kuberay"), Path("/tmp"), Path("/tmp"), secret=resolve_secret)
    return KubeRayLauncher(keys(**given), context)


def job(**given: Any) -> Job:
    """Return a small job."""
    return Job(
        **{"run_id": "demo", "attempt": 1, "directory": "/runs/demo/attempts/1", "script": "true"} | given
    )


def pod(name: str = "ray", gpus: int = 0, **given: Any) -> dict[str, Any]:
    """Return a pod template with one container."""
    limits: dict[str, str] = {"cpu": "8", "memory": "32Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"spec": {"containers": [{"name": name, "resources": {"limits": limits}}], **given}}


def spec(replicas: int = 2, gpus: int = 4, **worker: Any) -> dict[str, Any]:
    """Return a RayCluster's spec of a head and one group of workers."""
    group = {
        "groupName": "gpu-workers",
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "rayStartParams": {},
        "template": pod("ray-worker", gpus, **worker),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": pod("ray-head")}
    return {"headGroupSpec": head, "workerGroupSpecs": [group]}


def faults(manifest: dict[str, Any]) -> list[Any]:
    """Return what the CRD of a Ray kind says against an object: unknown fields, wrong types, broken rules."""
    schema = pytest.importorskip("doubles.kubernetes.schema", reason="needs tests/doubles of the checkout")
    value = copy.deepcopy({key: manifest[key] for key in ("spec",)})
    root = schema.root(PLURALS[manifest["kind"]])
    unknown = schema.prune(value, root)
    schema.default(value, root)
    return [*unknown, *schema.check(value, root)]


#: the spec of a Deployment of two containers
DEPLOYMENT: dict[str, Any] = {
    "replicas": 2,
    "selector": {"matchLabels": {"app": "sandbox"}},
    "template": {
        "metadata": {"labels": {"app": "sandbox", "team": "pods"}},
        "spec": {
            "containers": [
                {"name": "a", "ports": [{"containerPort": 8080, "name": "http"}, {"containerPort": 9090}]},
                {"name": "b", "image": "other:1", "ports": [{"containerPort": 7070}]},
            ]
        },
    },
}
