"""RayClusters that stay, and the deployments beside them: brought up, found up, compared, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from rollhook.errors import LauncherError, UsageError
from rollhook.launcher import ClusterInfo, ClusterState
from rollhook_kuberay.config import ROLES, KubeRayLauncherConfig, Role
from rollhook_kuberay.heads import waiting
from rollhook_kuberay.health import answers
from rollhook_kuberay.marks import HASH, OWNER, owned
from rollhook_kuberay.port import KubeError, Object, Port, wait_for
from rollhook_kuberay.render import Renderer
from rollhook_kuberay.site import Site

Say = Callable[[str], None]


def targets(keys: KubeRayLauncherConfig) -> list[str]:
    """Return what the keys declare, in the order of bringing up."""
    found = [f"deployments.{name}" for name in keys.deployments]
    return [*found, *(f"clusters.{role}" for role in ROLES if role in keys.clusters)]


def chosen(keys: KubeRayLauncherConfig, wanted: Sequence[str]) -> list[str]:
    """Return the wanted targets, all if none; a role alone is its cluster. Raises UsageError."""
    there = targets(keys)
    full = [f"clusters.{each}" if each in ROLES else each for each in wanted]
    for given, each in zip(wanted, full, strict=True):
        if each not in there:
            raise UsageError(f"the recipe has no target {given!r}; it has {', '.join(there)}")
    return [each for each in there if each in full or not wanted]


def manifests(keys: KubeRayLauncherConfig, renderer: Renderer, target: str) -> list[Object]:
    """Return the objects of a target: the first is waited for, claims of a cluster are its dependants."""
    kind, _, name = target.partition(".")
    if kind == "deployments":
        return renderer.deployment(name)
    role = cast("Role", name)
    cluster = keys.clusters[role].name
    assert cluster is not None  # judged by the rules
    made = renderer.ray_cluster(role, cluster)
    return [made, *(owned(each, made) for each in renderer.claims(role, cluster))]


async def up(
    site: Site, port: Port, renderer: Renderer, wanted: Sequence[str], *, recreate: bool, say: Say
) -> None:
    """Make all that is wanted without waiting for it to be ready. What was made when one fails stays."""
    for target in wanted:
        main, *others = manifests(site.keys, renderer, target)
        if main["kind"] == "Deployment":
            for each in (main, *others):
                await _deploy(port, each, site.user, say)
            continue
        live = await _ensure(site, port, main, recreate=recreate, say=say)
        for each in others:
            await port.apply(owned(each, live))


async def ready(site: Site, port: Port, wanted: Sequence[str], *, seconds: float, say: Say) -> None:
    """Wait until all that is wanted is ready. Raises TimeoutError with what is not, and how it stands."""

    async def one(target: str) -> None:
        kind, _, key = target.partition(".")
        if kind == "deployments":
            deployment = site.keys.deployments[key]
            await _wait(site, port, "Deployment", deployment.name, deployed, seconds)
            if deployment.health:
                await _healthy(port, deployment, say)
        else:
            name = str(site.keys.clusters[cast("Role", key)].name)
            await _wait(site, port, "RayCluster", name, cluster_ready, seconds)
        say(f"{target} is ready")

    results = await asyncio.gather(*map(one, wanted), return_exceptions=True)
    failed = [each for each in results if isinstance(each, BaseException)]
    if failed:
        text = "\n".join(str(each) for each in failed)
        if all(isinstance(each, TimeoutError) for each in failed):
            raise TimeoutError(text)
        if len(failed) == 1 or not all(isinstance(each, Exception) for each in failed):
            raise failed[0]
        raise LauncherError(text)


async def down(
    site: Site, port: Port, wanted: Sequence[str], *, wait: bool, seconds: float, say: Say
) -> list[str]:
    """End what is wanted, clusters of other owners excepted. Absent ones are no error."""
    ended, going = [], []
    for target in reversed(wanted):
        kind, _, key = target.partition(".")
        if kind == "deployments":
            objects = [
                ("Deployment", site.keys.deployments[key].name),
                ("Service", site.keys.deployments[key].name),
            ]
        else:
            objects = [("RayCluster", str(site.keys.clusters[cast("Role", key)].name))]
        for what, name in objects:
            live = await port.get(what, name)
            if live is None:
                continue
            check_owner(live, site.user)
            if await port.delete(what, name):
                ended.append(f"{what} {name} was deleted")
                going.append((what, name))
                say(f"deleting {what} {name}")
    if wait:
        async with asyncio.timeout(seconds):
            for what, name in going:
                await site.gone(port, what, name)
    return ended


def check_owner(live: Object, user: str) -> None:
    """Raise LauncherError for an object that is someone else's, or nobody's that we know."""
    kind, name = live["kind"], live["metadata"]["name"]
    labels = live["metadata"].get("labels") or {}
    other = labels.get(OWNER)
    if other is None:
        raise LauncherError(f"{kind} {name} was not made by Rollhook; use another name", kind="user")
    if other != user:
        raise LauncherError(
            f"{kind} {name} belongs to {other}; use another name, or ask {other}", kind="user"
        )


async def _ensure(site: Site, port: Port, manifest: Object, *, recreate: bool, say: Say) -> Object:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    live = await port.get(kind, name)
    if live is not None and "deletionTimestamp" in live["metadata"]:
        say(f"{kind} {name} is being deleted; waiting")
        await site.gone(port, kind, name)
        live = None
    if live is not None:
        check_owner(live, site.user)
        if not drifted(live, manifest):
            say(f"{kind} {name} is there and as the recipe says")
            return live
        if not recreate:
            say(f"{kind} {name} is not as the recipe says now, and is used as it is; --recreate replaces it")
            return live
        say(f"{kind} {name} is not as the recipe says now: it is replaced")
        await port.delete(kind, name)
        await site.gone(port, kind, name)
    made = await port.create(manifest)
    say(f"{kind} {name} was created")
    return made


def drifted(live: Object, manifest: Object) -> bool:
    """Whether an object was last applied as something else; what the cluster filled in does not count."""
    said = (live["metadata"].get("annotations") or {}).get(HASH)
    return bool(said != manifest["metadata"]["annotations"][HASH])


async def _deploy(port: Port, manifest: Object, user: str, say: Say) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    live = await port.get(kind, name)
    if live is not None:
        check_owner(live, user)
        if not drifted(live, manifest):
            say(f"{kind} {name} is there and as the recipe says")
            return
    await port.apply(manifest)
    say(f"{kind} {name} was {'changed' if live else 'created'}")


async def _wait(
    site: Site, port: Port, kind: str, name: str, condition: Callable[[Object], bool], seconds: float
) -> None:
    try:
        await wait_for(
            port, kind, name, lambda each: each is not None and condition(each),
            seconds=seconds, poll_seconds=site.keys.poll_seconds,
        )  # fmt: skip
    except TimeoutError as error:
        live = await port.get(kind, name)
        how = "it is not there" if live is None else await describe(port, live)
        raise TimeoutError(f"{kind} {name} is not ready after {seconds:.0f} s: {how}") from error


async def _healthy(port: Port, keys: Any, say: Say) -> None:
    selector = keys.spec["selector"]["matchLabels"]

    async def pod() -> str:
        for each in await port.list("Pod", selector):
            if (each.get("status") or {}).get("phase") == "Running":
                return str(each["metadata"]["name"])
        raise KubeError(f"the deployment {keys.name} has no running pod", kind="retryable")

    number, _, path = keys.health.partition("/")
    async with port.forward(pod, int(number)) as address:
        await answers(f"http://{address}/{path}", keys.health_seconds, f"the deployment {keys.name}", say)


def deployed(live: Object) -> bool:
    """Whether a Deployment has all its pods, of its present spec."""
    status, spec = live.get("status") or {}, live.get("spec") or {}
    if status.get("observedGeneration", 0) < live["metadata"].get("generation", 0):
        return False
    return bool(status.get("readyReplicas", 0) >= spec.get("replicas", 1))


def cluster_ready(live: Object) -> bool:
    """Whether a RayCluster is up; its state stays `ready` when pods die, so the workers are counted."""
    status = live.get("status") or {}
    ready, wanted = status.get("readyWorkerReplicas", 0), status.get("desiredWorkerReplicas", 0)
    return bool(status.get("state") == "ready" and ready >= wanted)


async def describe(port: Port, live: Object) -> str:
    """Return how an object stands, with the first pod that says why it does not run."""
    status = live.get("status") or {}
    if live["kind"] != "RayCluster":
        wanted = (live.get("spec") or {}).get("replicas", 1)
        return f"{status.get('readyReplicas', 0)} of {wanted} pods are ready"
    name = live["metadata"]["name"]
    wanted = status.get("desiredWorkerReplicas", 0)
    workers = f"{status.get('readyWorkerReplicas', 0)} of {wanted} workers are ready"
    pods = await port.list("Pod", {"ray.io/cluster": name})
    reasons = [f"{pod['metadata']['name']}: {waiting(pod)}" for pod in pods if waiting(pod)]
    state = status.get("state") or "no state yet"
    return "; ".join([f"{state}, {workers}", *reasons[:1]])


async def info(port: Port, live: Object | None, name: str, target: str) -> ClusterInfo:
    """Return how a RayCluster or Deployment stands."""
    if live is None:
        return ClusterInfo(name, target, "absent")
    status = live.get("status") or {}
    if live["kind"] == "Deployment":
        state: ClusterState = "ready" if deployed(live) else "pending"
        return ClusterInfo(name, target, state, message=await describe(port, live), raw=status)
    pods = await port.list("Pod", {"ray.io/cluster": name})
    phases: dict[str, list[str]] = {"head": [], "worker": []}
    for pod in pods:
        kind = (pod["metadata"].get("labels") or {}).get("ray.io/node-type", "")
        phases.setdefault(kind, []).append((pod.get("status") or {}).get("phase", "Pending"))
    said = status.get("state")
    state = "pending"
    if said == "suspended":
        state = "stopped"
    elif said == "ready":
        state = "ready" if cluster_ready(live) and phases["head"] == ["Running"] else "degraded"
    head = status.get("head") or {}
    service = head.get("serviceName") or f"{name}-head-svc"
    where = f"{service}.{port.namespace}.svc.cluster.local"
    words = [
        f"head {', '.join(phases['head']) or 'none'}",
        f"workers {', '.join(phases['worker']) or 'none'}",
    ]
    if state != "ready":
        words += [f"{pod['metadata']['name']}: {waiting(pod)}" for pod in pods if waiting(pod)][:1]
    return ClusterInfo(
        name, target, state, address=f"{where}:6379", dashboard=f"http://{where}:8265",
        nodes=len(pods) or None, message="; ".join(words), raw=status,
    )  # fmt: skip
