"""KubeRay's controller of RayClusters: pods, head service, status."""

from __future__ import annotations

import json

from doubles.kubernetes import ray_pods, ray_rules, resources
from doubles.kubernetes.kubelet import Kubelet
from doubles.kubernetes.ray_jobs import Jobs
from doubles.kubernetes.store import Key, Object, event, now
from doubles.kubernetes.world import World

_PODS, _SERVICES = resources.named("pods"), resources.named("services")


class Clusters:
    """The controller; `step` is called whenever something has changed."""

    def __init__(self, world: World, kubelet: Kubelet, jobs: Jobs) -> None:
        self.world, self.kubelet, self.jobs = world, kubelet, jobs
        self._hashes: dict[str, str] = {}

    def pods(self, cluster: Object) -> list[Object]:
        """Return the pods of a cluster that are not on their way out."""
        meta = cluster["metadata"]
        return [
            each
            for each in self.world.store.list(_PODS, meta["namespace"])
            if each["metadata"].get("labels", {}).get("ray.io/cluster") == meta["name"]
            and "deletionTimestamp" not in each["metadata"]
        ]

    def step(self, key: Key) -> None:
        """Bring a cluster nearer to its spec."""
        cluster = self.world.store.find(*key)
        if cluster is None or "deletionTimestamp" in cluster["metadata"]:
            return
        spec, meta = cluster["spec"], cluster["metadata"]
        faults = [*ray_rules.cluster_name(meta["name"]), *ray_rules.cluster(spec)]
        if faults:
            if self._hashes.get(meta["uid"]) != "invalid":
                self._hashes[meta["uid"]] = "invalid"
                event(
                    self.world.store,
                    cluster,
                    "Warning",
                    "InvalidRayClusterSpec",
                    faults[0],
                    "raycluster-controller",
                )
            return
        if spec.get("suspend"):
            self._drop(self.pods(cluster))
            gone = not self.pods(cluster)
            values = {
                "RayClusterSuspending": (not gone, "RayClusterSuspending"),
                "RayClusterSuspended": (gone, "RayClusterSuspended"),
            }
            if gone:
                values["RayClusterProvisioned"] = (False, "RayClusterPodsProvisioning")
            state = {"state": "suspended"} if gone else {}
            self._status(key, cluster, {**state, "conditions": self._conditions(cluster, **values)})
            return
        name = ray_pods.head_service_name(meta["name"])
        if self.world.store.find(_SERVICES, meta["namespace"], name) is None:
            service = ray_pods.head_service(cluster, name, cluster)
            self.world.store.create(_SERVICES, meta["namespace"], service, "kuberay-operator")
        mark = json.dumps(_shape(spec), sort_keys=True)
        if self._hashes.setdefault(meta["uid"], mark) != mark:
            self._hashes[meta["uid"]] = mark
            if (spec.get("upgradeStrategy") or {}).get("type") == "Recreate":
                self._drop(self.pods(cluster))
        self._groups(cluster)
        self._report(key, cluster)

    def _groups(self, cluster: Object) -> None:
        spec, over = cluster["spec"], ("Failed", "Succeeded")
        ended = [each for each in self.pods(cluster) if each.get("status", {}).get("phase") in over]
        if self.world.options.ray and any(_type(each) == "head" for each in ended):
            ended = self.pods(cluster)  # a new head has new ports
        self._drop(ended)
        pods = self.pods(cluster)
        if not any(_type(each) == "head" for each in pods):
            self._make(cluster, "head", spec["headGroupSpec"], "headgroup")
        for group in spec.get("workerGroupSpecs") or []:
            name = group["groupName"]
            have = [each for each in pods if each["metadata"]["labels"]["ray.io/group"] == name]
            wanted = 0 if group.get("suspend") else _replicas(group)
            for _ in range(len(have), wanted):
                if not self.world.options.ray or self._up(cluster):
                    self._make(cluster, "worker", group, name)
            self._drop(have[wanted:])

    def _up(self, cluster: Object) -> bool:
        """Whether the head is ready: real workers come after it (KubeRay's init container waits)."""
        return any(_type(each) == "head" and ready(each) for each in self.pods(cluster))

    def _make(self, cluster: Object, kind: str, group: Object, name: str) -> None:
        meta = cluster["metadata"]
        ports = None
        if self.world.options.ray:
            ports = self.jobs.ports.setdefault(meta["uid"], ray_pods.Ports())
        made, real = ray_pods.pod(cluster, kind, group, name, ports)
        admitted = self.world.admit(_PODS, made)
        place = meta["namespace"], admitted["metadata"]["name"]
        if real:
            self.kubelet.ports[place] = real
            probes = [f"http://127.0.0.1:{real[ray_pods.AGENT]}/api/local_raylet_healthz"]
            if kind == "head":
                probes.insert(0, f"http://127.0.0.1:{real[ray_pods.DASHBOARD]}/api/gcs_healthz")
            self.kubelet.probes[place] = probes
            self.kubelet.real.add(place)
        self.world.store.create(_PODS, meta["namespace"], admitted, "kuberay-operator")
        told = f"Created {kind} Pod {place[0]}/{place[1]}"
        event(self.world.store, cluster, "Normal", f"Created{kind.title()}Pod", told, "raycluster-controller")

    def _drop(self, pods: list[Object]) -> None:
        for each in pods:
            self.world.store.delete((_PODS, each["metadata"]["namespace"], each["metadata"]["name"]))

    def _report(self, key: Key, cluster: Object) -> None:
        spec, meta, pods = cluster["spec"], cluster["metadata"], self.pods(cluster)
        groups = [each for each in spec.get("workerGroupSpecs") or [] if not each.get("suspend")]
        workers = [each for each in pods if _type(each) == "worker"]
        head = next((each for each in pods if _type(each) == "head"), None)
        desired = sum(map(_replicas, groups))
        count = sum(map(ready, workers))
        up = head is not None and ready(head)
        status: Object = {
            "desiredWorkerReplicas": desired,
            "readyWorkerReplicas": count,
            "availableWorkerReplicas": sum(
                each.get("status", {}).get("phase") == "Running" for each in workers
            ),
            "minWorkerReplicas": sum(each["minReplicas"] * each.get("numOfHosts", 1) for each in groups),
            "maxWorkerReplicas": min(sum(each["maxReplicas"] for each in groups), 2**31 - 1),
            **_desired(spec, groups),
            "observedGeneration": meta.get("generation", 1),
        }
        provisioned = up and count == desired
        if provisioned:
            status["state"] = "ready"  # and so it stays, whatever becomes of the pods
        before = {each["type"]: each["status"] for each in cluster.get("status", {}).get("conditions") or []}
        once = provisioned or before.get("RayClusterProvisioned") == "True"
        why = "AllPodRunningAndReadyFirstTime" if once else "RayClusterPodsProvisioning"
        values = {
            "HeadPodReady": (up, _head_reason(head)),
            "RayClusterProvisioned": (once, why),
            "RayClusterSuspending": (False, "RayClusterSuspending"),
            "RayClusterSuspended": (False, "RayClusterSuspended"),
        }
        status["conditions"] = self._conditions(cluster, **values)
        if head is not None:
            address = head.get("status", {}).get("podIP")
            service = ray_pods.head_service_name(meta["name"])
            status["head"] = {
                "podName": head["metadata"]["name"],
                "serviceName": service,
                **({"podIP": address, "serviceIP": address} if address else {}),
            }
            status["endpoints"] = {
                "client": "10001",
                "dashboard": "8265",
                "gcs-server": "6379",
                "metrics": "8080",
            }
        self._status(key, cluster, status)

    def _conditions(self, cluster: Object, **values: tuple[bool, str]) -> list[Object]:
        had = {each["type"]: each for each in cluster.get("status", {}).get("conditions") or []}
        for kind, (value, reason) in values.items():
            text = "True" if value else "False"
            if (had.get(kind, {}).get("status"), had.get(kind, {}).get("reason")) != (text, reason):
                had[kind] = {
                    "type": kind, "status": text, "reason": reason, "message": "", "lastTransitionTime": now()
                }  # fmt: skip
        return list(had.values())

    def _status(self, key: Key, cluster: Object, status: Object) -> None:
        have = cluster.get("status", {})
        if any(have.get(name) != value for name, value in status.items()):
            self.world.store.set_status(key, {**status, "lastUpdateTime": now()})


def _desired(spec: Object, groups: list[Object]) -> Object:
    totals: dict[str, float] = {}
    for count, group in ((1, spec["headGroupSpec"]), *((_replicas(each), each) for each in groups)):
        for name, amount in ray_pods.resources_of(group["template"]["spec"]["containers"][0]).items():
            totals[name] = totals.get(name, 0) + count * amount
    names = {"cpu": "desiredCPU", "memory": "desiredMemory", "gpu": "desiredGPU"}
    return {field: str(int(-(-totals.get(name, 0) // 1))) for name, field in names.items()}


def _head_reason(head: Object | None) -> str:
    if head is None:
        return "HeadPodNotFound"
    if ready(head):
        return "HeadPodRunningAndReady"
    for each in head.get("status", {}).get("containerStatuses") or []:
        for state in each["state"].values():
            if "reason" in state:
                return str(state["reason"])
    known = head.get("status", {}).get("conditions") or []
    return next((each["reason"] for each in known if "reason" in each), "Unknown")


def _shape(spec: Object) -> Object:
    groups = [
        {k: v for k, v in each.items() if k not in ("replicas", "minReplicas", "maxReplicas")}
        for each in spec.get("workerGroupSpecs") or []
    ]
    return {"head": spec["headGroupSpec"], "groups": groups}


def _replicas(group: Object) -> int:
    wanted = min(max(group.get("replicas", 0), group["minReplicas"]), group["maxReplicas"])
    return int(wanted * group.get("numOfHosts", 1))


def _type(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get("ray.io/node-type"))


def ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
