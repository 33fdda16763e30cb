"""What is wrong with keys before anything is contacted: what Kubernetes or KubeRay would refuse, misfits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rollhook.errors import LauncherError
from rollhook_kuberay.config import ClusterKeys, KubeRayLauncherConfig
from rollhook_kuberay.render import GPU, map_key, split_groups

if TYPE_CHECKING:
    from rollhook.launcher import Plan
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe

MAX_RAYJOB, MAX_RAYCLUSTER, MAX_NAME = 47, 53, 63
#: what one object may hold, with room for its metadata
MAX_CONFIG_MAP = 1_000_000
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

Found = tuple[str, str, str]  # key below `launcher`, what is wrong, what to do


def check(recipe: Recipe) -> list[Problem]:
    """Return what `rollhook check` is to say; wrong types are the core's to report."""
    from rollhook.recipe.problem import Problem

    if recipe.launcher.use != "kuberay":
        return []
    try:
        keys = KubeRayLauncherConfig.model_validate(recipe.launcher.keys)
    except ValidationError:
        return []
    found = [*problems(keys), *_storage(keys, recipe.storage.root)]
    return [Problem(f"launcher.{key}" if key else "launcher", text, hint=hint) for key, text, hint in found]


def problems(keys: KubeRayLauncherConfig) -> list[Found]:
    """Return all that is wrong with the keys themselves."""
    found = [*_modes(keys), *_names(keys), *_labels(keys)]
    for role in keys.clusters:
        found += _cluster(keys, role)
    for key, deployment in keys.deployments.items():
        at = f"deployments.{key}.spec"
        if not ((deployment.spec.get("template") or {}).get("spec") or {}).get("containers"):
            found.append((at, "has no container", "give template.spec.containers"))
        if not (deployment.spec.get("selector") or {}).get("matchLabels"):
            found.append((at, "has no selector", "give selector.matchLabels, as Kubernetes wants it"))
    return found


def raise_problems(keys: KubeRayLauncherConfig) -> None:
    """Raise LauncherError with all that is wrong, a line each."""
    lines = [f"launcher.{key}: {text}; {hint}" for key, text, hint in problems(keys)]
    if lines:
        raise LauncherError("\n".join(lines), kind="user")


def check_files(plan: Plan) -> None:
    """Refuse files that no ConfigMap can hold, and say which are the largest."""
    sizes = {path: len(json.dumps(text).encode()) for path, text in plan.files.items()}
    for path in sizes:
        map_key(path)
    if (total := sum(sizes.values())) > MAX_CONFIG_MAP:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        shown = ", ".join(f"{path} ({sizes[path]} bytes)" for path in largest)
        raise LauncherError(
            f"the job's files have {total} bytes, and an object of Kubernetes holds {MAX_CONFIG_MAP}; the "
            f"largest are {shown}: put large ones on the shared volume and name their paths",
            kind="user",
        )


def _modes(keys: KubeRayLauncherConfig) -> Iterator[Found]:
    if "training" not in keys.clusters:
        yield "clusters", "has no training cluster, on which the job runs", "add clusters.training"
    yield from _ephemeral(keys) if keys.mode == "rayjob" else _long_lived(keys)
    if keys.code != "image" and not keys.code_path:
        yield "code_path", f"is missing, which code {keys.code} needs", "name the directory"
    if keys.code == "path" and keys.code_path and not keys.code_path.startswith("/"):
        yield "code_path", "is no absolute path, and it is one of the pods", "begin it with /"


def _ephemeral(keys: KubeRayLauncherConfig) -> Iterator[Found]:
    hint = "set launcher.mode=raycluster, or leave it out"
    for role in keys.clusters:
        if role != "training":
            yield (
                f"clusters.{role}",
                "is not brought up in mode rayjob, which has the job's cluster alone",
                hint,
            )
    for key in keys.deployments:
        yield f"deployments.{key}", "is not brought up in mode rayjob", hint
    training = keys.clusters.get("training")
    if training is not None and training.daemon is not None:
        yield "clusters.training.daemon", "is not started in mode rayjob", hint
    if keys.code == "upload":
        yield "code", "cannot be upload in mode rayjob", "set image or path, or launcher.mode=raycluster"
    for name, default in (("submit", "port_forward"), ("recreate", False), ("skip_daemons", False)):
        if getattr(keys, name) != default:
            yield name, "has no effect in mode rayjob", hint
    if keys.scheduler.kind == "kueue" and (not keys.shutdown or keys.deletion is not None):
        way = "set shutdown: true, without deletion"
        yield "shutdown", "has to be true with kueue, which suspends a job by ending its cluster", way
    if keys.scheduler.kind == "kai" and keys.submission_mode == "K8sJobMode":
        text = "K8sJobMode does not go with kai: its submitter would join the gang too late"
        yield "submission_mode", text, "set submission_mode: HTTPMode"


def _long_lived(keys: KubeRayLauncherConfig) -> Iterator[Found]:
    for name in ("deletion", "active_seconds", "ready_deadline_seconds"):
        if getattr(keys, name) is not None:
            yield name, "has no effect in mode raycluster", "leave it out, or set launcher.mode=rayjob"
    if keys.submit == "exec" and keys.code == "upload":
        yield "code", "cannot be upload with submit exec", "set code to image or path, or submit=port_forward"


def _names(keys: KubeRayLauncherConfig) -> Iterator[Found]:
    seen: dict[str, str] = {}
    for role, cluster in keys.clusters.items():
        key = f"clusters.{role}.name"
        if cluster.name is None:
            if keys.mode == "raycluster":
                yield key, "is missing, and a cluster that stays needs one", "give it a name"
            continue
        yield from _name(key, cluster.name, MAX_RAYCLUSTER)
        if cluster.name in seen:
            yield key, f"is {cluster.name!r}, as {seen[cluster.name]} is", "give each cluster its own"
        seen[cluster.name] = key
    services: dict[str, str] = {}
    for each, deployment in keys.deployments.items():
        key = f"deployments.{each}.name"
        yield from _name(key, deployment.name, MAX_NAME)
        if deployment.name in services:
            yield key, f"is {deployment.name!r}, as {services[deployment.name]} is", "give each its own"
        services[deployment.name] = key


def _name(key: str, name: str, longest: int) -> Iterator[Found]:
    if len(name) > longest:
        yield key, f"{name!r} has {len(name)} characters, and {longest} are allowed", "shorten it"
    if not _DNS_1035.fullmatch(name):
        hint = "use lower-case letters, digits and -, beginning with a letter and not ending with -"
        yield key, f"{name!r} is no name for Kubernetes", hint


def _labels(keys: KubeRayLauncherConfig) -> Iterator[Found]:
    sources = {"labels": keys.labels}
    sources |= {f"clusters.{role}.labels": each.labels for role, each in keys.clusters.items()}
    sources |= {f"deployments.{name}.labels": each.labels for name, each in keys.deployments.items()}
    for key, labels in sources.items():
        for name, value in labels.items():
            if not _LABEL.fullmatch(value):
                hint = (
                    "use at most 63 letters, digits, -, _ and ., beginning and ending with a letter or digit"
                )
                yield f"{key}.{name}", f"{value!r} is no value of a label", hint


def _cluster(keys: KubeRayLauncherConfig, role: Any) -> Iterator[Found]:
    cluster = keys.clusters[role]
    key = f"clusters.{role}"
    if cluster.spec is None:
        if cluster.segment_size and (cluster.nodes or keys.nodes) % cluster.segment_size:
            yield f"{key}.segment_size", "does not divide the number of nodes", "change one of them"
        return
    yield from _spec(cluster, key)
    if role == "training" and not cluster.spec.get("enableInTreeAutoscaling"):
        yield from _demand(keys, cluster, key)


def _spec(cluster: ClusterKeys, key: str) -> Iterator[Found]:
    assert cluster.spec is not None
    spec, at = cluster.spec, f"{key}.spec"
    groups = spec.get("workerGroupSpecs") or []
    try:
        split_groups(groups, cluster.segment_size)
    except LauncherError as error:
        yield f"{key}.segment_size", str(error), "e.g. make it a divisor"
    scaled = bool(spec.get("enableInTreeAutoscaling"))
    version = str((spec.get("autoscalerOptions") or {}).get("version", ""))
    pods = {"headGroupSpec": spec.get("headGroupSpec")}
    pods |= {f"workerGroupSpecs.{number}": group for number, group in enumerate(groups)}
    for name, group in pods.items():
        pod = ((group or {}).get("template") or {}).get("spec") or {}
        if not pod.get("containers"):
            yield f"{at}.{name}", "has no container", "give template.spec.containers; the first one runs Ray"
        if scaled and version == "v2" and pod.get("restartPolicy", "Never") != "Never":
            yield f"{at}.{name}", "has a restartPolicy that autoscaler v2 refuses", "set it to Never"
    for number, group in enumerate(groups):
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        where = f"{at}.workerGroupSpecs.{number}"
        if not group.get("groupName"):
            yield where, "has no groupName", "give it one"
        if not scaled and (low is None or high is None):
            yield where, "has no minReplicas or maxReplicas", "give both, or enableInTreeAutoscaling"
        if isinstance(low, int) and isinstance(high, int) and low > high:
            yield where, f"has minReplicas {low} above maxReplicas {high}", "change one of them"


def _demand(keys: KubeRayLauncherConfig, cluster: ClusterKeys, key: str) -> Iterator[Found]:
    """Compare with what the job asks for: pods that never fit stay pending, and the job with them."""
    assert cluster.spec is not None
    groups = cluster.spec.get("workerGroupSpecs") or []
    if keys.model_fields_set & {"nodes"}:
        there = sum(int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1) for group in groups)
        if there < keys.nodes:
            hint = "raise the replicas of its worker groups, or lower launcher.nodes"
            yield f"{key}.spec", f"has {there} worker nodes, and launcher.nodes is {keys.nodes}", hint
    for number, group in enumerate(groups):
        gpus = _gpus(group)
        if keys.model_fields_set & {"gpus_per_node"} and gpus is not None and gpus != keys.gpus_per_node:
            yield (
                f"{key}.spec.workerGroupSpecs.{number}",
                f"has {gpus} {GPU} in its limits, and launcher.gpus_per_node is {keys.gpus_per_node}",
                "make them the same",
            )


def _gpus(group: Mapping[str, Any]) -> int | None:
    containers = ((group.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    resources = containers[0].get("resources") or {}
    value = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.get(GPU, 0)
    return int(value) if str(value).isdigit() else None


def _storage(keys: KubeRayLauncherConfig, root: str) -> Iterator[Found]:
    """Runs are kept below storage.root: it has to outlive the pods, and be the same for all of them."""
    if not str(root).startswith("/"):
        yield (
            "mounts",
            f"do not hold storage.root, {root!r}, which is relative",
            "set storage.root to a path on a mount",
        )
        return
    for role, cluster in keys.clusters.items():
        if role == "training" and not _mounted(keys, cluster, str(root)):
            hint = f"add {{path: {root}, claim: NAME}} to launcher.mounts, or set storage.root below a mount"
            yield "mounts", f"do not hold storage.root, {root!r}: runs would end with their pods", hint


def _mounted(keys: KubeRayLauncherConfig, cluster: ClusterKeys, root: str) -> bool:
    paths = [mount.path for mount in keys.mounts if not mount.read_only and mount.empty_dir is None]
    spec = cluster.spec or {}
    for group in spec.get("workerGroupSpecs") or [spec.get("headGroupSpec") or {}]:
        for container in ((group.get("template") or {}).get("spec") or {}).get("containers") or []:
            paths += [each.get("mountPath", "") for each in container.get("volumeMounts") or []]
    return any(path and f"{root.rstrip('/')}/".startswith(f"{path.rstrip('/')}/") for path in paths)
