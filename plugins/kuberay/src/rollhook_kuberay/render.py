"""Keys and a job as Kubernetes objects. Pure: nothing is read, and what is given is not changed."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollhook.errors import LauncherError
from rollhook.job_script import KILL_SECONDS
from rollhook.ray_jobs import TELLS_ALL
from rollhook_kuberay.config import (
    Claim,
    ClusterKeys,
    DeploymentKeys,
    KubeRayLauncherConfig,
    PodSize,
    Role,
)
from rollhook_kuberay.marks import ATTEMPT, MANAGED, OWNER, ROLE, RUN, Object, with_hash

JOB_FILES = "/var/run/rollhook/job"
SECRET_FILES = "/var/run/rollhook/secrets"  # noqa: S105 - a directory
#: Ray resource that only workers have: the driver and its actors keep off the head with it
WORKER_RESOURCE = "worker_node"
GPU = "nvidia.com/gpu"
KAI_QUEUE, KUEUE_QUEUE = "kai.scheduler/queue", "kueue.x-k8s.io/queue-name"
#: claims that pod specs may name without a key of their own
KNOWN_CLAIMS = {
    "compute-domain-channel": Claim(kind="compute_domain"),
    "roce-channel": Claim(device_class="roce.networking.k8s.aws", count=8),
}


class Renderer:
    """What keys make; `user` owns it, `secrets` and `references` are the job's references to secrets."""

    def __init__(
        self,
        keys: KubeRayLauncherConfig,
        user: str,
        *,
        secrets: Mapping[str, str] | None = None,
        references: Iterable[str] = (),
        files: Iterable[str] = (),
        config_map: str = "",
    ) -> None:
        self.keys = keys
        self.user = user
        self.secrets = {**{name: str(each) for name, each in keys.secrets.items()}, **(secrets or {})}
        self.mounted: dict[str, set[str] | None] = dict.fromkeys(keys.mount_secrets)
        for reference in references:
            if reference.startswith("k8s:"):
                name, _, key = reference.removeprefix("k8s:").rpartition("/")
                wanted = self.mounted.setdefault(name, set())
                if wanted is not None:
                    wanted.add(key)
        self.files = sorted(files)
        self.config_map = config_map

    def metadata(
        self,
        name: str,
        labels: Mapping[str, str] = {},
        annotations: Mapping[str, str] = {},
        extra: Mapping[str, str] = {},
    ) -> Object:
        """Return metadata: what is more particular wins, and what says whose it is always stands."""
        found: Object = {"name": name}
        if self.keys.namespace:
            found["namespace"] = self.keys.namespace
        found["labels"] = {
            **self.keys.labels,
            **labels,
            **self._queue(),
            **extra,
            **MANAGED,
            OWNER: self.user,
        }
        if notes := {**self.keys.annotations, **annotations}:
            found["annotations"] = notes
        return found

    def ray_cluster(self, role: Role, name: str) -> Object:
        """Return the RayCluster of a role, with the hash of what it says."""
        cluster = self.keys.clusters[role]
        manifest: Object = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": self.metadata(name, cluster.labels, cluster.annotations, {ROLE: role}),
            "spec": self.cluster_spec(role, name),
        }
        return with_hash(manifest)

    def cluster_spec(self, role: Role, name: str) -> Object:
        """Return the spec of a role's RayCluster: its own or ours, patched."""
        cluster = self.keys.clusters[role]
        spec = copy.deepcopy(cluster.spec) if cluster.spec is not None else self._default(role, cluster)
        if self.keys.ray_version:
            spec["rayVersion"] = self.keys.ray_version
        groups = split_groups(spec.get("workerGroupSpecs") or [], cluster.segment_size)
        if groups or "workerGroupSpecs" in spec:
            spec["workerGroupSpecs"] = groups
        labels = {**self.keys.labels, **cluster.labels, **self._queue(), ROLE: role}
        head = spec.setdefault("headGroupSpec", {})
        self._ray_pod(head.setdefault("template", {}), labels, worker=False)
        head.setdefault("rayStartParams", {})
        for group in groups:
            self._ray_pod(group.setdefault("template", {}), labels, worker=True)
            self._claims(group["template"]["spec"], name, role)
            group.setdefault("rayStartParams", {}).setdefault(
                "resources", f'"{{\\"{WORKER_RESOURCE}\\": 100}}"'
            )
        return spec

    def claims(self, role: Role, name: str) -> list[Object]:
        """Return the claim templates and ComputeDomains that the pods of a role refer to."""
        spec = self.cluster_spec(role, name)
        used = {
            each["name"]
            for group in spec.get("workerGroupSpecs") or []
            for each in group["template"]["spec"].get("resourceClaims") or []
        }
        known = {**KNOWN_CLAIMS, **self.keys.claims}
        return [
            self._claim(known[claim], claim_name(claim, name, role), role)
            for claim in sorted(used & known.keys())
        ]

    def deployment(self, key: str) -> list[Object]:
        """Return a Deployment, and the Service of its ports if it has any and a selector."""
        keys = self.keys.deployments[key]
        spec = copy.deepcopy(keys.spec)
        pod = spec.setdefault("template", {}).setdefault("spec", {})
        for container in pod.get("containers") or []:
            container.setdefault("image", self.keys.image)
        self.patch_common(pod)
        metadata = spec["template"].setdefault("metadata", {})
        metadata["labels"] = {
            **self.keys.labels, **keys.labels, **MANAGED, OWNER: self.user, **(metadata.get("labels") or {})
        }  # fmt: skip
        manifest = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self.metadata(keys.name, keys.labels, keys.annotations),
            "spec": spec,
        }
        service = self._service(keys, pod)
        return [with_hash(each) for each in (manifest, service) if each is not None]

    def ray_job(self, job: Any, role: Role = "training") -> Object:
        """Return the RayJob of a job: its name, its id in Ray and its cluster's prefix are the job's id."""
        keys, cluster = self.keys, self.keys.clusters[role]
        labels = {RUN: job.run_id, ATTEMPT: str(job.attempt), ROLE: role}
        cluster_spec = self.cluster_spec(role, job.id)
        resources = driver_resources(job, cluster_spec)
        spec: Object = {
            "entrypoint": f"exec env {TELLS_ALL} bash {JOB_FILES}/job.sh",
            "submissionMode": keys.submission_mode,
            "jobId": job.id,
            "runtimeEnvYAML": _yaml_env(runtime_env_vars(job, cluster_spec)),
            "entrypointNumCpus": job.resources.driver_cpus,
        }
        if resources:
            spec["entrypointResources"] = json.dumps(resources, sort_keys=True)
        if keys.deletion is not None:
            spec["shutdownAfterJobFinishes"] = False
            spec["deletionStrategy"] = {"deletionRules": _rules(keys)}
        else:
            spec["shutdownAfterJobFinishes"] = keys.shutdown
            if keys.shutdown and keys.ttl_seconds:
                spec["ttlSecondsAfterFinished"] = keys.ttl_seconds
        for name, value in (
            ("activeDeadlineSeconds", keys.active_seconds),
            ("preRunningDeadlineSeconds", keys.ready_deadline_seconds),
            ("backoffLimit", keys.retries or None),
            ("suspend", True if keys.scheduler.kind == "kueue" else None),
        ):
            if value is not None:
                spec[name] = value
        spec["rayClusterSpec"] = cluster_spec
        return {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": self.metadata(job.id, cluster.labels, cluster.annotations, labels),
            "spec": spec,
        }

    def files_map(self, job: Any, files: Mapping[str, str]) -> Object:
        """Return the ConfigMap that carries a job's files; their directories become `--` in its keys."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self.metadata(files_name(job), extra={RUN: job.run_id, ATTEMPT: str(job.attempt)}),
            "immutable": True,
            "data": {map_key(path): text for path, text in sorted(files.items())},
        }

    def _default(self, role: Role, cluster: ClusterKeys) -> Object:
        training = role == "training"
        nodes = cluster.nodes or (self.keys.nodes if training else 1)
        gpus = cluster.gpus_per_node
        gpus = gpus if gpus is not None else self.keys.gpus_per_node if training else 0
        group = {
            "groupName": "workers",
            "replicas": nodes,
            "minReplicas": nodes,
            "maxReplicas": nodes,
            "rayStartParams": {},
            "template": _template("ray-worker", cluster.worker, gpus),
        }
        params = {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"}  # noqa: S104 - inside a pod
        return {
            "headGroupSpec": {"rayStartParams": params, "template": _template("ray-head", cluster.head, 0)},
            "workerGroupSpecs": [group],
        }

    def _queue(self) -> dict[str, str]:
        scheduler = self.keys.scheduler
        if scheduler.queue is None:
            return {}
        return {KAI_QUEUE if scheduler.kind == "kai" else KUEUE_QUEUE: scheduler.queue}

    def patch_common(self, pod: Object) -> None:
        """Give a pod the pull secrets and the service account."""
        if self.keys.image_pull_secrets:
            pod["imagePullSecrets"] = [{"name": name} for name in self.keys.image_pull_secrets]
        if self.keys.service_account is not None:
            pod["serviceAccountName"] = self.keys.service_account

    def _ray_pod(self, template: Object, labels: Mapping[str, str], *, worker: bool) -> None:
        keys, pod = self.keys, template.setdefault("spec", {})
        containers = pod.setdefault("containers", [])
        if not containers:  # judged by the rules; the API server would say the same
            return
        for number, container in enumerate(containers):
            if number == 0 or "image" not in container:
                container["image"] = keys.image
        self.patch_common(pod)
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = {**labels, **MANAGED, OWNER: self.user, **(metadata.get("labels") or {})}
        placement = keys.placement
        selector = placement.node_selector if worker else placement.head_node_selector
        if selector:
            pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **selector}
        if placement.tolerations:
            pod["tolerations"] = [*(pod.get("tolerations") or []), *map(_toleration, placement.tolerations)]
        if worker and placement.affinity is not None:
            pod["affinity"] = copy.deepcopy(placement.affinity)
        if keys.scheduler.kind == "kai":
            pod["schedulerName"] = "kai-scheduler"
            notes = {
                "kai.scheduler/topology": keys.scheduler.topology,
                "kai.scheduler/topology-required-placement": keys.scheduler.topology_placement,
            }
            notes = {name: value for name, value in notes.items() if value and worker}
            if notes:
                metadata["annotations"] = {**notes, **(metadata.get("annotations") or {})}
        self._environment(containers[0])
        self.patch_volumes(pod, containers[0])

    def _environment(self, container: Object) -> None:
        wanted = {}
        for name, reference in self.secrets.items():
            if reference.startswith("k8s:"):
                secret, _, key = reference.removeprefix("k8s:").rpartition("/")
                wanted[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        kept = [each for each in container.get("env") or [] if each.get("name") not in wanted]
        if kept or wanted:
            container["env"] = [*kept, *wanted.values()]
        if self.keys.env_from:
            sources = [{"secretRef": {"name": name}} for name in self.keys.env_from]
            container["envFrom"] = [*(container.get("envFrom") or []), *sources]

    def patch_volumes(self, pod: Object, container: Object) -> None:
        """Give a pod and its container the mounts, the Secrets and the job's files."""
        volumes: list[Object] = []
        mounts: list[Object] = []
        claims: dict[str, str] = {}
        for number, mount in enumerate(self.keys.mounts):
            name = f"rollhook-mount-{number}"
            if mount.claim is not None:
                name = claims.setdefault(mount.claim, name)
                source: Object = {"persistentVolumeClaim": {"claimName": mount.claim}}
            elif mount.host_path is not None:
                source = {"hostPath": {"path": mount.host_path}}
            else:
                memory = {"medium": "Memory"} if mount.memory else {}
                source = {"emptyDir": {"sizeLimit": mount.empty_dir, **memory}}
            if all(each["name"] != name for each in volumes):
                volumes.append({"name": name, **source})
            more: Object = {"subPath": mount.sub_path} if mount.sub_path else {}
            more |= {"readOnly": True} if mount.read_only else {}
            mounts.append({"name": name, "mountPath": mount.path, **more})
        for number, (secret, wanted) in enumerate(sorted(self.mounted.items())):
            name = f"rollhook-secret-{number}"
            items = {} if wanted is None else {"items": [{"key": k, "path": k} for k in sorted(wanted)]}
            volumes.append({"name": name, "secret": {"secretName": secret, **items}})
            mounts.append({"name": name, "mountPath": f"{SECRET_FILES}/{secret}", "readOnly": True})
        if self.config_map:
            items_ = [{"key": map_key(path), "path": _inside(path)} for path in self.files]
            source = {"configMap": {"name": self.config_map, "items": items_}}
            volumes.append({"name": "rollhook-job", **source})
            mounts.append({"name": "rollhook-job", "mountPath": JOB_FILES, "readOnly": True})
        if volumes:
            pod["volumes"] = [*(pod.get("volumes") or []), *volumes]
            container["volumeMounts"] = [*(container.get("volumeMounts") or []), *mounts]

    def _claims(self, pod: Object, cluster: str, role: Role) -> None:
        known = {**KNOWN_CLAIMS, **self.keys.claims}
        present = {each["name"] for each in pod.get("resourceClaims") or []}
        for name in self.keys.claims:
            if name not in present:
                pod.setdefault("resourceClaims", []).append({"name": name})
        for each in pod.get("resourceClaims") or []:
            if each["name"] in known:
                each.pop("resourceClaimName", None)
                each["resourceClaimTemplateName"] = claim_name(each["name"], cluster, role)
        if self.keys.claims:
            resources = pod["containers"][0].setdefault("resources", {})
            held = {each["name"] for each in resources.get("claims") or []}
            added = [{"name": name} for name in self.keys.claims if name not in held]
            resources["claims"] = [*(resources.get("claims") or []), *added]

    def _claim(self, claim: Claim, name: str, role: Role) -> Object:
        metadata = self.metadata(name, extra={ROLE: role})
        if claim.kind == "compute_domain":
            spec: Object = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": name}}}
            version, kind = "resource.nvidia.com/v1beta1", "ComputeDomain"
        else:
            exactly = {
                "deviceClassName": claim.device_class,
                "allocationMode": "ExactCount",
                "count": claim.count,
            }
            spec = {"spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}}
            version, kind = "resource.k8s.io/v1", "ResourceClaimTemplate"
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _service(self, keys: DeploymentKeys, pod: Mapping[str, Any]) -> Object | None:
        selector = (keys.spec.get("selector") or {}).get("matchLabels")
        ports = [port for each in pod.get("containers") or [] for port in each.get("ports") or []]
        if not selector or not ports:
            return None
        shown = [
            {
                "name": port.get("name") or f"port-{number}",
                "port": port["containerPort"],
                "targetPort": port["containerPort"],
                "protocol": port.get("protocol", "TCP"),
            }
            for number, port in enumerate(ports)
        ]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(keys.name, keys.labels, keys.annotations),
            "spec": {"type": "ClusterIP", "selector": dict(selector), "ports": shown},
        }


def split_groups(groups: list[Object], size: int | None) -> list[Object]:
    """Return worker groups of at most `size` nodes. Raises LauncherError for one that does not divide."""
    found = []
    for group in groups:
        replicas = group.get("replicas", 0)
        if size is None or replicas <= size:
            found.append(group)
            continue
        if replicas % size:
            raise LauncherError(
                f"segment_size {size} does not divide the {replicas} replicas of the worker group "
                f"{group.get('groupName')!r}; change one of them",
                kind="user",
            )
        for number in range(replicas // size):
            part = copy.deepcopy(group)
            part["groupName"] = f"{group['groupName']}-segment-{number}"
            part |= {"replicas": size, "minReplicas": size, "maxReplicas": size}
            found.append(part)
    return found


def claim_name(claim: str, cluster: str, role: Role) -> str:
    """Return the name of the object behind a claim: `compute-domain-<cluster>-<role>`."""
    return f"{claim.removesuffix('-channel')}-{cluster}-{role}"


def driver_resources(job: Any, cluster_spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the Ray resources with which the driver keeps off the head."""
    resources = dict(job.resources.driver_resources)
    if has_worker_resource(cluster_spec):
        resources.setdefault(WORKER_RESOURCE, 0.001)
    return resources


def has_worker_resource(cluster_spec: Mapping[str, Any]) -> bool:
    """Whether there are workers, and all of them have the resource."""
    groups = cluster_spec.get("workerGroupSpecs") or []
    return bool(groups) and all(
        WORKER_RESOURCE in str((each.get("rayStartParams") or {}).get("resources", "")) for each in groups
    )


def runtime_env_vars(job: Any, cluster_spec: Mapping[str, Any]) -> dict[str, str]:
    """Return what Ray's supervisor of the job and the job itself are told by environment."""
    found = {  # job.sh passes INT on as the job's stop signal, and kills what does not end in its time
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(job.stop_grace_seconds) + KILL_SECONDS + 10),
    }
    if has_worker_resource(cluster_spec):
        found["ROLLHOOK_WORKER_RESOURCE"] = WORKER_RESOURCE
    return found


def files_name(job: Any) -> str:
    """Return the name of the ConfigMap with a job's files."""
    return f"{job.id}-files"


def map_key(path: str) -> str:
    """Return a file's key in a ConfigMap. Raises LauncherError for a name that cannot be one."""
    key = _inside(path).replace("/", "--")
    if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
        raise LauncherError(
            f"the file {path!r} cannot be carried: its name is no key of a ConfigMap", kind="user"
        )
    return key


def _inside(path: str) -> str:
    return path.removeprefix("job/")


def _template(name: str, size: PodSize, gpus: int) -> Object:
    amounts = {"cpu": size.cpus, "memory": size.memory} | ({GPU: str(gpus)} if gpus else {})
    container = {"name": name, "resources": {"limits": amounts, "requests": dict(amounts)}}
    return {"spec": {"containers": [container]}}


def _toleration(each: Any) -> Object:
    values = {
        "key": each.key, "operator": each.operator, "value": each.value, "effect": each.effect,
        "tolerationSeconds": each.toleration_seconds,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def _rules(keys: KubeRayLauncherConfig) -> list[Object]:
    assert keys.deletion is not None
    wanted = (
        ("DeleteWorkers", keys.deletion.workers_seconds),
        ("DeleteCluster", keys.deletion.cluster_seconds),
        ("DeleteSelf", keys.deletion.self_seconds),
    )
    return [
        {"policy": policy, "condition": {"jobStatus": status, "ttlSeconds": seconds}}
        for policy, seconds in wanted
        if seconds is not None
        for status in ("SUCCEEDED", "FAILED")
    ]


def _yaml_env(variables: Mapping[str, str]) -> str:
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in sorted(variables.items()))
    return f"env_vars:\n{lines}"
