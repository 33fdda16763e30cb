"""What brings objects nearer to their specs: KubeRay's operator, deployments, jobs, claims, garbage."""

from __future__ import annotations

import asyncio
import hashlib
import json
from copy import deepcopy

from doubles.kubernetes import ray_pods, resources
from doubles.kubernetes.kubelet import Kubelet
from doubles.kubernetes.ray_clusters import Clusters, ready
from doubles.kubernetes.ray_jobs import Jobs
from doubles.kubernetes.rayjob_controller import RayJobs
from doubles.kubernetes.store import Key, Object, now, suffix
from doubles.kubernetes.world import World

_PODS, _DEPLOYMENTS, _BATCH = (resources.named(each) for each in ("pods", "deployments", "jobs"))
_CLUSTERS, _JOBS = resources.named("rayclusters"), resources.named("rayjobs")
_CLAIMS = resources.named("persistentvolumeclaims")
#: seconds of the cluster between two looks of KubeRay at a RayJob
_POLL = 3.0


class Controllers:
    """All controllers, in one loop; RayJobs, which wait for Ray, each in a task of its own."""

    def __init__(self, world: World) -> None:
        self.world, self.store = world, world.store
        self.kubelet = Kubelet(world)
        self.jobs = Jobs(world)
        self.clusters = Clusters(world, self.kubelet, self.jobs)
        self.rayjobs = RayJobs(world, self.clusters, self.jobs)
        self._steps: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run for ever."""
        while True:
            await self.store.wait(max(0.02, _POLL * self.world.options.second))
            for resource, step in (
                (_CLAIMS, self._claim),
                (_DEPLOYMENTS, self._deployment),
                (_BATCH, self._batch),
            ):
                for each in self.store.list(resource):
                    if "deletionTimestamp" not in each["metadata"]:
                        step((resource, each["metadata"]["namespace"], each["metadata"]["name"]), each)
            if self.world.options.operator:
                for each in self.store.list(_CLUSTERS):
                    self.clusters.step((_CLUSTERS, each["metadata"]["namespace"], each["metadata"]["name"]))
                for each in self.store.list(_JOBS):
                    self._rayjob(each)

    def _rayjob(self, each: Object) -> None:
        uid = each["metadata"]["uid"]
        running = self._steps.get(uid)
        if running is None or running.done():
            key = (_JOBS, each["metadata"]["namespace"], each["metadata"]["name"])
            self._steps[uid] = self.world.spawn(self.rayjobs.step(key))

    def _claim(self, key: Key, claim: Object) -> None:
        if claim.get("status", {}).get("phase") != "Bound":
            spec = claim.get("spec") or {}
            capacity = (spec.get("resources") or {}).get("requests") or {}
            modes = spec.get("accessModes") or []
            self.store.set_status(key, {"phase": "Bound", "accessModes": modes, "capacity": capacity})

    def _owned(self, each: Object) -> list[Object]:
        uid = each["metadata"]["uid"]
        return [
            pod
            for pod in self.store.list(_PODS, each["metadata"]["namespace"])
            if any(ref["uid"] == uid for ref in pod["metadata"].get("ownerReferences") or [])
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def _pod(self, each: Object, name: str, labels: dict[str, str]) -> None:
        template = deepcopy(each["spec"]["template"])
        meta = template.get("metadata") or {}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**(meta.get("labels") or {}), **labels},
                "annotations": meta.get("annotations") or {},
                "ownerReferences": [ray_pods.owner(each)],
            },
            "spec": template["spec"],
        }
        self.store.create(
            _PODS, each["metadata"]["namespace"], self.world.admit(_PODS, body), "controller-manager"
        )

    def _deployment(self, key: Key, each: Object) -> None:
        """Keep as many pods as wanted, of the newest template; there are no ReplicaSets between."""
        spec, name = each["spec"], each["metadata"]["name"]
        mark = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
        pods = self._owned(each)
        new = [pod for pod in pods if pod["metadata"]["labels"].get("pod-template-hash") == mark]
        for pod in [*(pod for pod in pods if pod not in new), *new[spec["replicas"] :]]:
            self.store.delete((_PODS, key[1], pod["metadata"]["name"]))
        for _ in range(len(new), spec["replicas"]):
            self._pod(each, f"{name[:40]}-{mark}-{suffix()}", {"pod-template-hash": mark})
        up = sum(map(ready, new))
        enough = up >= spec["replicas"]
        status = {
            "replicas": len(new),
            "updatedReplicas": len(new),
            "readyReplicas": up or None,
            "availableReplicas": up or None,
            "unavailableReplicas": spec["replicas"] - up or None,
            "observedGeneration": each["metadata"]["generation"],
        }
        have = each.get("status", {})
        if any(have.get(field) != value for field, value in status.items()):
            kind = {
                "type": "Available",
                "status": str(enough),
                "reason": "MinimumReplicas",
                "lastTransitionTime": now(),
            }
            self.store.set_status(key, {**status, "conditions": [kind]})

    def _batch(self, key: Key, each: Object) -> None:
        """Run the pod of a Job, again while its limit allows."""
        status = each.get("status", {})
        if any(condition["type"] in ("Complete", "Failed") for condition in status.get("conditions") or []):
            return
        pods, limit = self._owned(each), each["spec"]["backoffLimit"]
        phases = [pod.get("status", {}).get("phase", "Pending") for pod in pods]
        failed = phases.count("Failed")
        change: Object = {"active": len(pods) - failed - phases.count("Succeeded"), "failed": failed or None}
        if "Succeeded" in phases:
            over = {"type": "Complete", "status": "True", "lastTransitionTime": now()}
            change |= {"succeeded": 1, "conditions": [over], "completionTime": now()}
        elif failed > limit:
            why = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
            over = {"type": "Failed", "status": "True", "lastTransitionTime": now(), **why}
            change["conditions"] = [over]
        elif failed == len(pods):
            name = each["metadata"]["name"]
            place = f"{name[:50]}-{suffix()}"
            env = {
                var["name"]: var.get("value")
                for var in each["spec"]["template"]["spec"]["containers"][0].get("env", [])
            }
            if job_id := env.get("RAY_JOB_SUBMISSION_ID"):
                if self.world.options.ray:
                    self.kubelet.real.add((key[1], place))
                else:
                    self.kubelet.scripts.insert(0, {"match": place, **self.jobs.pod_script(job_id)})
            self._pod(each, place, {"job-name": name, "batch.kubernetes.io/job-name": name})
            change["active"] = 1
        if any(status.get(field) != value for field, value in change.items()):
            self.store.set_status(key, change)
