"""What KubeRay's operator refuses of what the CRD lets pass (its controllers/ray/utils/validation.go).

In our own words; not checked are the parts about Redis, TLS, network policies and the history server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from doubles.kubernetes.store import Object

_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def cluster_name(name: str, limit: int = 53, kind: str = "RayCluster") -> Iterator[str]:
    """Yield what is wrong with a name."""
    if len(name) > limit:
        yield f"{kind} name should be no more than {limit} characters"
    if not _DNS1035.fullmatch(name):
        yield f"{kind} name should be a valid DNS1035 label: {name}"


def cluster(spec: Object) -> Iterator[str]:
    """Yield what is wrong with a RayCluster's spec."""
    if not spec["headGroupSpec"]["template"].get("spec", {}).get("containers"):
        yield "headGroupSpec should have at least one container"
    autoscaling = spec.get("enableInTreeAutoscaling", False)
    version = [int(part) for part in re.findall(r"\d+", spec.get("rayVersion") or "")[:2]]
    if (spec.get("authOptions") or {}).get("mode") == "token" and version < [2, 52]:
        yield "authOptions.mode is 'token', which needs rayVersion, 2.52.0 or later"
    seen = set()
    for group in spec.get("workerGroupSpecs") or []:
        name = group.get("groupName", "")
        if not group["template"].get("spec", {}).get("containers"):
            yield f"workerGroupSpec should have at least one container: {name}"
        if name in seen:
            yield f"the group name {name} is used more than once"
        seen.add(name)
        if group["minReplicas"] > group["maxReplicas"]:
            yield f"worker group {name} has minReplicas {group['minReplicas']} greater than maxReplicas"
        if group.get("suspend") and autoscaling:
            yield f"worker group {name} cannot be suspended with Autoscaler enabled"
    if autoscaling and (spec.get("autoscalerOptions") or {}).get("version") == "v2":
        groups = [("head", spec["headGroupSpec"])]
        groups += [(each["groupName"], each) for each in spec.get("workerGroupSpecs") or []]
        for name, group in groups:
            policy = group["template"]["spec"].get("restartPolicy", "Never")
            if policy != "Never":
                yield f"restartPolicy of {name} should be Never or unset with autoscaler v2, is {policy}"


def job(each: Object) -> Iterator[str]:
    """Yield what is wrong with a RayJob."""
    spec = each["spec"]
    mode, selector = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    shutdown, ttl = spec.get("shutdownAfterJobFinishes", False), spec.get("ttlSecondsAfterFinished", 0)
    yield from cluster_name(each["metadata"]["name"], 47, "RayJob")
    if spec.get("suspend") and not shutdown:
        yield "a RayJob with shutdownAfterJobFinishes set to false is not allowed to be suspended"
    if ttl < 0:
        yield "ttlSecondsAfterFinished must be a non-negative integer"
    if ttl > 0 and not shutdown:
        yield "a RayJob with shutdownAfterJobFinishes set to false cannot have ttlSecondsAfterFinished"
    if selector:
        if spec.get("suspend"):
            yield "the ClusterSelector mode doesn't support the suspend operation"
        if spec.get("backoffLimit", 0) > 0:
            yield "BackoffLimit is incompatible with the ClusterSelector mode"
        if mode == "SidecarMode":
            yield "ClusterSelector is not supported in SidecarMode"
        if not selector.get("ray.io/cluster"):
            yield "failed to get the cluster name from the ClusterSelector"
    elif "rayClusterSpec" not in spec:
        yield "one of RayClusterSpec or ClusterSelector must be set"
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "BackoffLimit is incompatible with InteractiveMode"
    if mode == "SidecarMode" and spec.get("submitterPodTemplate"):
        yield "submitterPodTemplate is not supported in SidecarMode"
    for name in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if name in spec and spec[name] <= 0:
            yield f"{name} must be a positive integer"
    try:
        parsed = yaml.safe_load(spec.get("runtimeEnvYAML") or "{}")
        if not isinstance(parsed, dict):
            yield "failed to unmarshal RuntimeEnvYAML: not a mapping"
    except yaml.YAMLError as error:
        yield f"failed to unmarshal RuntimeEnvYAML: {error}"
    if (spec.get("deletionStrategy") or {}).get("deletionRules"):
        yield from _deletion(spec)
    if "rayClusterSpec" in spec:
        yield from cluster(spec["rayClusterSpec"])


def _deletion(spec: Object) -> Iterator[str]:
    if spec.get("shutdownAfterJobFinishes"):
        yield "deletionRules and shutdownAfterJobFinishes are mutually exclusive"
    autoscaling = spec.get("rayClusterSpec", {}).get("enableInTreeAutoscaling")
    seen: dict[tuple[str, str], dict[str, int]] = {}
    for number, rule in enumerate(spec["deletionStrategy"]["deletionRules"]):
        policy, when = rule["policy"], rule["condition"]
        if spec.get("clusterSelector") and policy in ("DeleteCluster", "DeleteWorkers"):
            yield f"deletionRules[{number}]: {policy} is not supported when ClusterSelector is set"
        if autoscaling and policy == "DeleteWorkers":
            yield f"deletionRules[{number}]: DeleteWorkers is not supported with autoscaling enabled"
        mark = (when.get("jobStatus", ""), when.get("jobDeploymentStatus", ""))
        if policy in seen.setdefault(mark, {}):
            yield f"deletionRules[{number}]: duplicate rule for {policy}"
        seen[mark][policy] = when.get("ttlSeconds", 0)
    for times in seen.values():
        order = [times[name] for name in ("DeleteWorkers", "DeleteCluster", "DeleteSelf") if name in times]
        if order != sorted(order):
            yield "TTLs of deletionRules must not fall from DeleteWorkers over DeleteCluster to DeleteSelf"
