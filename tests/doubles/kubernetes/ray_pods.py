"""The pods that KubeRay makes of a RayCluster, and the `ray start` in them.

With real Ray, all pods share this machine's network, so every port of a pod is a free one of the machine: the
start command in the pod names it, and a port-forward of the usual number leads there.
"""

from __future__ import annotations

import json
import math
import shlex
import socket
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml

from doubles.kubernetes.store import Object, suffix

DASHBOARD, GCS, CLIENT, AGENT = 8265, 6379, 10001, 52365


def head_service_name(owner_name: str) -> str:
    """Return the name of the head service of a RayCluster or RayJob."""
    return f"{owner_name}-head-svc"


def free_ports(number: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class Ports:
    """The real ports of a cluster: its head's, by the usual number, and how many workers it has had."""

    head: dict[int, int] = field(default_factory=dict)
    workers: int = 0


def quantity(text: Any) -> float:
    """Return a Kubernetes quantity as a number."""
    units = {
        "m": 1e-3,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
        "P": 1e15,
        "Ki": 2**10,
        "Mi": 2**20,
        "Gi": 2**30,
    }
    units |= {"Ti": 2**40, "Pi": 2**50}
    text = str(text)
    for unit in sorted(units, key=len, reverse=True):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * units[unit]
    return float(text)


def resources_of(container: Object) -> dict[str, float]:
    """Return cpu, memory and gpu of a container, of its limits or else its requests."""
    given = container.get("resources") or {}
    named = {**(given.get("requests") or {}), **(given.get("limits") or {})}
    found = {name: quantity(named[name]) for name in ("cpu", "memory") if name in named}
    gpus = sum(quantity(value) for name, value in named.items() if name.endswith("/gpu"))
    return {**found, **({"gpu": gpus} if gpus else {})}


def start_command(
    kind: str, group: Object, container: Object, *, real: Ports | None, labels: dict[str, str]
) -> tuple[str, dict[int, int]]:
    """Return the `ray start` of a pod, and its real ports by the usual number (none without real Ray)."""
    params = dict(group.get("rayStartParams") or {})
    amounts = resources_of(container)
    if "cpu" in amounts:
        params.setdefault("num-cpus", str(math.ceil(amounts["cpu"])))
    if "memory" in amounts:
        params.setdefault("memory", str(int(amounts["memory"])))
    if "gpu" in amounts:
        params.setdefault("num-gpus", str(int(amounts["gpu"])))
    params |= {"block": "true", "dashboard-agent-listen-port": str(AGENT), "metrics-export-port": "8080"}
    ports: dict[int, int] = {}
    if kind == "head":
        params.setdefault("dashboard-host", "0.0.0.0")
    elif real is None:
        params["address"] = f"{head_service_name(labels['ray.io/cluster'])}.{labels['namespace']}.svc:{GCS}"
    if real is not None:
        ports = _real(kind, params, real)
    words = ["ray start", *(["--head"] if kind == "head" else [])]
    for name, value in params.items():
        words.append(f"--{name}" if value == "true" else f"--{name}={value}")
    return " ".join(words), ports


def _real(kind: str, params: dict[str, str], real: Ports) -> dict[int, int]:
    params.pop("metrics-export-port")
    params |= {"min-worker-port": "0", "max-worker-port": "0", "disable-usage-stats": "true"}
    params["object-store-memory"] = "80000000"
    ports = {AGENT: free_ports(1)[0]}
    if kind == "head":
        ports |= dict(zip((DASHBOARD, GCS, CLIENT), free_ports(3), strict=True))
        real.head = ports
        params |= {
            "dashboard-host": "127.0.0.1",
            "dashboard-port": str(ports[DASHBOARD]),
            "port": str(ports[GCS]),
        }
        params["ray-client-server-port"] = str(ports[CLIENT])
        params["node-ip-address"] = "127.0.0.1"
    else:
        real.workers += 1
        params["address"] = f"127.0.0.1:{real.head[GCS]}"
        params["node-ip-address"] = f"127.0.{1 + real.workers // 250}.{2 + real.workers % 250}"
    params["dashboard-agent-listen-port"] = str(ports[AGENT])
    return ports


def pod(
    cluster: Object, kind: str, group: Object, group_name: str, real: Ports | None
) -> tuple[Object, dict[int, int]]:
    """Return a head or worker pod of a cluster, and its real ports."""
    meta, template = cluster["metadata"], deepcopy(group["template"])
    name = meta["name"]
    prefix = name if kind == "head" else f"{name}-{group_name}"
    unique = f"{prefix[:50]}-{kind}-"[:58] + suffix()
    labels = {
        **((template.get("metadata") or {}).get("labels") or {}),
        "ray.io/cluster": name,
        "ray.io/node-type": kind,
        "ray.io/group": group_name,
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{name}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    spec = template["spec"]
    first = spec["containers"][0]
    given = {**labels, "namespace": meta["namespace"]}
    command, ports = start_command(kind, group, first, real=real, labels=given)
    env = list(first.get("env") or [])
    have = {each["name"] for each in env}
    head = "127.0.0.1" if kind == "head" or real else f"{head_service_name(name)}.{meta['namespace']}.svc"
    gcs = real.head[GCS] if real else GCS
    for key, value in (
        ("RAY_CLUSTER_NAME", name), ("RAY_CLUSTER_NAMESPACE", meta["namespace"]),
        ("KUBERAY_GEN_RAY_START_CMD", command), ("RAY_PORT", str(gcs)), ("RAY_ADDRESS", f"{head}:{gcs}"),
        ("RAY_USAGE_STATS_KUBERAY_IN_USE", "1"), ("RAY_USAGE_STATS_ENABLED", "0"),
    ):  # fmt: skip
        if key not in have:
            env.append({"name": key, "value": value})
    first["env"] = env
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    if annotations.get("ray.io/overwrite-container-cmd") != "true":
        said = " ".join([*(first.get("command") or []), *(first.get("args") or [])])
        first["command"] = ["/bin/bash", "-c", "--"]
        first["args"] = [f"ulimit -n 65536; {said + ' && ' if said else ''}{command}"]
    if not any(each["name"] == "shared-mem" for each in spec.get("volumes") or []):
        spec.setdefault("volumes", []).append({"name": "shared-mem", "emptyDir": {"medium": "Memory"}})
        mounts = first.setdefault("volumeMounts", [])
        if not any(each["mountPath"] == "/dev/shm" for each in mounts):
            mounts.append({"name": "shared-mem", "mountPath": "/dev/shm"})
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": unique,
            "labels": labels,
            **({"annotations": annotations} if annotations else {}),
            "ownerReferences": [owner(cluster)],
        },
        "spec": spec,
    }
    return made, ports


def owner(each: Object) -> Object:
    """Return a controller's reference to an object."""
    return {
        "apiVersion": each["apiVersion"],
        "kind": each["kind"],
        "name": each["metadata"]["name"],
        "uid": each["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def head_service(cluster: Object, name: str, of: Object) -> Object:
    """Return a head service for a cluster, owned by `of`."""
    ports = (("client", CLIENT), ("dashboard", DASHBOARD), ("gcs-server", GCS), ("metrics", 8080))
    selector = {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
        "ray.io/identifier": f"{cluster['metadata']['name']}-head",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": selector, "ownerReferences": [owner(of)]},
        "spec": {
            "selector": selector,
            "clusterIP": "None",
            "type": "ClusterIP",
            "ports": [{"name": text, "port": number, "appProtocol": "tcp"} for text, number in ports],
        },
    }


def job_command(spec: Object, address: str, job_id: str) -> str:
    """Return what a submitter's container runs; the entry point is part of its shell text, as in KubeRay."""
    options = ""
    if spec.get("runtimeEnvYAML"):
        options += f" --runtime-env-json {shlex.quote(json.dumps(yaml.safe_load(spec['runtimeEnvYAML'])))}"
    if spec.get("metadata"):
        options += f" --metadata-json {shlex.quote(json.dumps(spec['metadata']))}"
    for name in ("cpus", "gpus"):
        if amount := spec.get(f"entrypointNum{name.title()}"):
            options += f" --entrypoint-num-{name} {amount}"
    if spec.get("entrypointResources"):
        options += f" --entrypoint-resources {shlex.quote(spec['entrypointResources'])}"
    look = f"from urllib.request import urlopen; urlopen('{address}/api/gcs_healthz', timeout=5)"
    look = shlex.quote(look)
    return (
        f"until python3 -c {look} >/dev/null 2>&1; do sleep 1; done; "
        f"if ! ray job status --address {address} {job_id} >/dev/null 2>&1; then "
        f"ray job submit --address {address} --no-wait{options} --submission-id {job_id} "
        f"-- {spec.get('entrypoint', '').strip()} ; fi ; ray job logs --address {address} --follow {job_id}"
    )


def entrypoint_resources(spec: Object) -> Object:
    """Return what of a RayJob's spec goes into the request to Ray, but for the entry point and the id."""
    body: Object = {}
    if spec.get("entrypointNumCpus"):
        body["entrypoint_num_cpus"] = spec["entrypointNumCpus"]
    if spec.get("entrypointNumGpus"):
        body["entrypoint_num_gpus"] = spec["entrypointNumGpus"]
    if spec.get("entrypointResources"):
        body["entrypoint_resources"] = json.loads(spec["entrypointResources"])
    if spec.get("metadata"):
        body["metadata"] = spec["metadata"]
    return body
