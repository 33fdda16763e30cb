"""The head of a Ray cluster: its pod, its dashboard, its job API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollhook.ray_jobs import RayJobs
from rollhook_kuberay.port import KubeError, Object, Port

DASHBOARD, GCS = 8265, 6379


async def head_pod(port: Port, cluster: str) -> str:
    """Return the name of the running head pod. Raises KubeError that says how it stands."""
    labels = {"ray.io/cluster": cluster, "ray.io/node-type": "head"}
    pods = [each for each in await port.list("Pod", labels) if "deletionTimestamp" not in each["metadata"]]
    running = [each for each in pods if _phase(each) == "Running"]
    if running:
        return str(running[0]["metadata"]["name"])
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    if not pods:
        raise KubeError(
            f"the Ray cluster {cluster} has no head pod in {port.namespace} (yet); look with "
            f"kubectl -n {port.namespace} get pods -l {selector}",
            kind="retryable",
        )
    raise KubeError(
        f"the head pod of {cluster} is {_phase(pods[0])}: {waiting(pods[0]) or 'no reason given'}; look with "
        f"kubectl -n {port.namespace} describe pod {pods[0]['metadata']['name']}",
        kind="retryable",
    )


def waiting(pod: Object) -> str:
    """Return why a pod does not run, in its own words; empty if it does not say."""
    status = pod.get("status") or {}
    for each in status.get("containerStatuses") or []:
        state = (each.get("state") or {}).get("waiting") or {}
        if state.get("reason"):
            return f"{state['reason']} {state.get('message', '')}".strip()
    for each in status.get("conditions") or []:
        if each.get("status") == "False" and each.get("message"):
            return f"{each.get('reason', '')} {each['message']}".strip()
    return ""


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def inside() -> bool:
    """Whether this process runs in a pod, where services have addresses."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


@asynccontextmanager
async def reach(port: Port, cluster: str, number: int, local_port: int = 0) -> AsyncIterator[str]:
    """Give `host:port` of a port of the head: its service inside the cluster, else forwarded."""
    if inside():
        found = await port.get("RayCluster", cluster)
        head = ((found or {}).get("status") or {}).get("head") or {}
        service = head.get("serviceName") or f"{cluster}-head-svc"
        yield f"{service}.{port.namespace}.svc.cluster.local:{number}"
        return
    await head_pod(port, cluster)  # say now what is wrong with it

    async def pod() -> str:
        return await head_pod(port, cluster)

    async with port.forward(pod, number, local_port=local_port) as address:
        yield address


@asynccontextmanager
async def ray_jobs(
    port: Port, cluster: str, token: Callable[[], str] | None = None, **options: Any
) -> AsyncIterator[RayJobs]:
    """Give the job API of a cluster while the block runs."""
    async with reach(port, cluster, DASHBOARD) as address:
        yield RayJobs(f"http://{address}", token=token, **options)
