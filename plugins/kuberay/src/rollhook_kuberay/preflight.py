"""What at the site would make a job fail: rights, missing objects, names in use; all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from rollhook.errors import LauncherError
from rollhook_kuberay.bringup import check_owner
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.port import KINDS, KubeError, Object, Port
from rollhook_kuberay.rayjob import OVER, deployment, taken

_ALWAYS = (("get", "pods"), ("list", "pods"))


def rights(keys: KubeRayLauncherConfig, kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return (verb, resource or resource/subresource) that a submission needs."""
    found = [*_ALWAYS]
    for kind in sorted(set(kinds) & KINDS.keys()):
        plural = KINDS[kind][1]
        verbs = ("create",) if kind == "ConfigMap" else ("get", "create", "patch", "delete", "watch")
        found += [(verb, plural) for verb in verbs]
    if keys.mode == "raycluster" and keys.submit == "exec":
        found.append(("create", "pods/exec"))
    else:
        found.append(("create", "pods/portforward"))
    return found


async def check(
    keys: KubeRayLauncherConfig, port: Port, requests: Mapping[str, Object], user: str
) -> list[str]:
    """Return what is wrong, a sentence each."""
    made = [each for each in requests.values() if each.get("kind") in KINDS]
    asked = [_right(port, verb, resource) for verb, resource in rights(keys, (each["kind"] for each in made))]
    asked += [_there(port, kind, name, why) for kind, name, why in needed(made)]
    asked += [_free(keys, port, each, user) for each in made]
    asked.append(_installed(port, [each["kind"] for each in made]))
    results = await asyncio.gather(*asked, return_exceptions=True)
    found: list[str] = []
    for result in results:
        if isinstance(result, KubeError):
            found.append(str(result))
        elif isinstance(result, BaseException):
            raise result
        else:
            found += result
    return list(dict.fromkeys(found))


def needed(manifests: Iterable[Object]) -> list[tuple[str, str, str]]:
    """Return (kind, name, what for) of the objects that pods refer to and that have to be there."""
    found: dict[tuple[str, str], str] = {}
    own = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for manifest in manifests:
        for pod in _pods(manifest):
            for kind, name, why in _references(pod):
                if (kind, name) not in own:
                    found.setdefault((kind, name), why)
    return [(kind, name, why) for (kind, name), why in sorted(found.items())]


def _pods(manifest: Object) -> list[Object]:
    spec = manifest.get("spec") or {}
    spec = spec.get("rayClusterSpec") or spec
    templates = [spec.get("template"), (spec.get("headGroupSpec") or {}).get("template")]
    templates += [group.get("template") for group in spec.get("workerGroupSpecs") or []]
    return [each.get("spec") or {} for each in templates if each]


def _references(pod: Object) -> list[tuple[str, str, str]]:
    found = [("Secret", each["name"], "pulls images") for each in pod.get("imagePullSecrets") or []]
    if account := pod.get("serviceAccountName"):
        found.append(("ServiceAccount", account, "pods run as it"))
    for volume in pod.get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        secret, config = volume.get("secret") or {}, volume.get("configMap") or {}
        if claim:
            found.append(("PersistentVolumeClaim", claim, "pods mount it"))
        if secret.get("secretName") and not secret.get("optional"):
            found.append(("Secret", secret["secretName"], "pods mount it"))
        if config.get("name") and not config.get("optional"):
            found.append(("ConfigMap", config["name"], "pods mount it"))
    for container in [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]:
        for each in container.get("envFrom") or []:
            source = each.get("secretRef") or {}
            if source.get("name") and not source.get("optional"):
                found.append(("Secret", source["name"], "pods take environment variables from it"))
        for each in container.get("env") or []:
            source = (each.get("valueFrom") or {}).get("secretKeyRef") or {}
            if source.get("name") and not source.get("optional"):
                found.append(("Secret", source["name"], f"{each['name']} is one of its keys"))
    return found


async def _right(port: Port, verb: str, resource: str) -> list[str]:
    plural, _, sub = resource.partition("/")
    version = next((api for api, name in KINDS.values() if name == plural), "v1")
    attributes: dict[str, Any] = {
        "namespace": port.namespace, "verb": verb, "resource": plural,
        "group": version.rpartition("/")[0],
    } | ({"subresource": sub} if sub else {})  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await port.create(review)
    if (answer.get("status") or {}).get("allowed"):
        return []
    return [
        f"you may not {verb} {resource} in {port.namespace}; ask for the role `edit` there, and KubeRay's"
    ]


async def _there(port: Port, kind: str, name: str, why: str) -> list[str]:
    try:
        live = await port.get(kind, name)
    except KubeError as error:
        if error.status == 403:  # who may run pods need not be able to read what they use
            return []
        raise
    if live is None:
        return [f"{kind} {name} is not in {port.namespace}, and {why}; make it, or name another"]
    phase = (live.get("status") or {}).get("phase")
    if kind == "PersistentVolumeClaim" and phase == "Lost":
        return [f"PersistentVolumeClaim {name} has lost its volume"]
    return []


async def _installed(port: Port, kinds: Iterable[str]) -> list[str]:
    """Judge whether the cluster knows KubeRay's kinds."""
    for kind in sorted({"RayJob", "RayCluster"} & set(kinds)):
        try:
            await port.list(kind, {"rollhook/none": "none"})
        except KubeError as error:
            if error.status == 404:
                return [f"the cluster knows no {kind} ({KINDS[kind][0]}); have KubeRay installed there"]
            if error.status != 403:  # that is said by the rights
                raise
    return []


async def _free(keys: KubeRayLauncherConfig, port: Port, manifest: Object, user: str) -> list[str]:
    """Judge a name that is in use."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        live = await port.get(kind, name)
        found = await _collision(port, kind, name)
    except KubeError as error:
        if error.status == 403:  # that is said by the rights
            return []
        raise
    if live is None:
        return found
    if kind == "RayJob" and not (keys.replace and deployment(live) in OVER):
        return [taken(name, live)]
    if kind == "ConfigMap" and not keys.replace:
        return [f"ConfigMap {name} is left of an earlier job; delete it, or give another --run-id"]
    if kind in ("RayCluster", "Deployment"):
        try:
            check_owner(live, user)
        except LauncherError as error:
            return [str(error)]
    return found


async def _collision(port: Port, kind: str, name: str) -> list[str]:
    """Judge whether another object has the head service that KubeRay would make for this one."""
    other = {"RayJob": "RayCluster", "RayCluster": "RayJob"}.get(kind)
    if other is None or await port.get(other, name) is None:
        return []
    way = "give another --run-id" if kind == "RayJob" else "rename the cluster"
    return [
        f"a {other} {name} is there, and KubeRay would give both the service {name}-head-svc, "
        f"with which this {kind} would hang; delete it, or {way}"
    ]
