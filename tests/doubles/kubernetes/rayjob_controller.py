"""KubeRay's controller of RayJobs: its states, deadlines, retries and cleanup (rayjob_controller.go)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from doubles.kubernetes import ray_pods, ray_rules, resources
from doubles.kubernetes.ray_clusters import Clusters
from doubles.kubernetes.ray_jobs import Jobs, Unreachable
from doubles.kubernetes.store import Key, Object, event, now, suffix
from doubles.kubernetes.world import World

FINALIZER = "ray.io/rayjob-finalizer"
_CLUSTERS, _JOBS, _BATCH = (resources.named(each) for each in ("rayclusters", "rayjobs", "jobs"))
_SERVICES, _PODS = resources.named("services"), resources.named("pods")
_OVER = ("SUCCEEDED", "FAILED", "STOPPED")
#: what a RayJob that begins again has lost
_CLEARED = dict.fromkeys(
    ("rayClusterName", "rayClusterStatus", "dashboardURL", "jobId", "message", "reason", "rayJobInfo")
)


class RayJobs:
    """The controller; `step` makes at most one transition of a RayJob."""

    def __init__(self, world: World, clusters: Clusters, jobs: Jobs) -> None:
        self.world, self.store, self.clusters, self.jobs = world, world.store, clusters, jobs
        #: when a RayJob entered a state, by (uid, what), on the monotonic clock
        self._since: dict[tuple[str, str], float] = {}
        self._states: dict[str, Callable[[Key, Object], Awaitable[None]]] = {
            "": self._new,
            "Initializing": self._initializing,
            "Waiting": self._waiting,
            "Running": self._running,
            "Suspending": self._suspending,
            "Suspended": self._suspended,
            "Retrying": self._retrying,
            "Complete": self._over,
            "Failed": self._over,
        }

    async def step(self, key: Key) -> None:
        """Bring a RayJob nearer to its end."""
        job = self.store.find(*key)
        if job is None:
            return
        if "deletionTimestamp" in job["metadata"]:
            await self._deleted(key, job)
            return
        if job["spec"].get("managedBy", "ray.io/kuberay-operator") != "ray.io/kuberay-operator":
            return
        phase = job.get("status", {}).get("jobDeploymentStatus", "")
        if phase in self._states and self._valid(key, job):
            await self._states[phase](key, job)

    # Helpers.

    def _age(self, job: Object, what: str) -> float:
        """Return the cluster's seconds since this was first asked for a RayJob."""
        began = self._since.setdefault((job["metadata"]["uid"], what), time.monotonic())
        return (time.monotonic() - began) / self.world.options.second

    def _forget(self, job: Object) -> None:
        uid = job["metadata"]["uid"]
        self._since = {key: value for key, value in self._since.items() if key[0] != uid}

    def _set(self, key: Key, **status: Any) -> None:
        if key in self.store.objects:
            self.store.set_status(key, status)

    def _fail(self, key: Key, job: Object, reason: str, message: str, **status: Any) -> None:
        failed = job.get("status", {}).get("failed", 0) + 1
        left = job["spec"].get("backoffLimit", 0) - (failed - 1)
        final = left <= 0 or reason in ("DeadlineExceeded", "JobStatusCheckTimeoutExceeded")
        phase = "Failed" if final else "Retrying"
        status |= {"endTime": now()} if final else {}
        self._set(key, jobDeploymentStatus=phase, reason=reason, message=message, failed=failed, **status)

    def _cluster(self, job: Object) -> Object | None:
        name = job.get("status", {}).get("rayClusterName", "")
        return self.store.find(_CLUSTERS, job["metadata"]["namespace"], name) if name else None

    def _drop_cluster(self, job: Object) -> None:
        cluster = self._cluster(job)
        if cluster is not None and not job["spec"].get("clusterSelector") and _live(cluster):
            self.store.delete((_CLUSTERS, job["metadata"]["namespace"], cluster["metadata"]["name"]))

    # States.

    def _valid(self, key: Key, job: Object) -> bool:
        """Check a spec, in every state: one that was good may have been changed."""
        faults = list(ray_rules.job(job))
        if faults:
            event(self.store, job, "Warning", "InvalidRayJobSpec", faults[0], "rayjob-controller")
            self._set(
                key, jobDeploymentStatus="ValidationFailed", reason="ValidationFailed", message=faults[0]
            )
        return not faults

    async def _new(self, key: Key, job: Object) -> None:
        if FINALIZER not in (job["metadata"].get("finalizers") or []):
            self.store.edit(key, lambda new: new["metadata"].setdefault("finalizers", []).append(FINALIZER))
        self._forget(job)
        spec, name, status = job["spec"], job["metadata"]["name"], job.get("status", {})
        selector = (spec.get("clusterSelector") or {}).get("ray.io/cluster")
        waiting = spec.get("submissionMode") == "InteractiveMode"
        job_id = None if waiting else spec.get("jobId") or f"{name}-{suffix()}"
        self._set(
            key,
            jobDeploymentStatus="Initializing",
            jobStatus="",
            jobId=job_id,
            rayClusterName=selector or f"{name}-{suffix()}",
            startTime=now(),
            failed=status.get("failed", 0),
            succeeded=status.get("succeeded", 0),
        )

    async def _initializing(self, key: Key, job: Object) -> None:
        if self._asked_to_suspend(key, job) or self._late(key, job):
            return
        cluster = self._cluster(job)
        if cluster is None:
            if not job["spec"].get("clusterSelector"):
                self._make_cluster(job)
            return
        status = cluster.get("status", {})
        self._set(key, rayClusterStatus=deepcopy(status))
        if status.get("state") != "ready":
            return
        head = f"{status['head']['serviceName']}.{job['metadata']['namespace']}.svc.cluster.local:8265"
        mode = job["spec"].get("submissionMode", "K8sJobMode")
        if mode == "K8sJobMode":
            self._submitter(job, cluster, job["status"]["jobId"])
        phase = "Waiting" if mode == "InteractiveMode" else "Running"
        self._set(key, jobDeploymentStatus=phase, dashboardURL=head)

    async def _waiting(self, key: Key, job: Object) -> None:
        if self._late(key, job):
            return
        job_id, cluster = job["spec"].get("jobId"), self._cluster(job)
        if job_id and cluster is not None:
            if not self.world.options.ray:
                self.jobs.begin(job, job_id)
            self._set(key, jobDeploymentStatus="Running", jobId=job_id)

    async def _running(self, key: Key, job: Object) -> None:
        if self._asked_to_suspend(key, job) or self._late(key, job):
            return
        cluster = self._cluster(job)
        if cluster is None:
            return
        self._service(job, cluster)
        self._set(key, rayClusterStatus=deepcopy(cluster.get("status", {})))
        mode, job_id = job["spec"].get("submissionMode", "K8sJobMode"), job["status"]["jobId"]
        ended = self._submitter_ended(job) if mode == "K8sJobMode" else "Complete"
        if ended == "Failed":
            again = job["status"].get("jobStatus") == "FAILED"
            reason, told = (
                ("AppFailed", job["status"].get("message", "")) if again else ("SubmissionFailed", "")
            )
            self._fail(key, job, reason, told or "Job submission has failed: its Kubernetes Job has given up")
            return
        try:
            info = await self.jobs.info(cluster, job_id)
            if info is None and mode in ("HTTPMode", "SidecarMode"):
                await self.jobs.submit(job, cluster, job_id)
        except Unreachable as error:
            if self._age(job, "check") > 300:
                why = f"the job's status could not be checked for 300 s: {error}"
                self._fail(key, job, "JobStatusCheckTimeoutExceeded", why)
            elif not job["status"].get("jobStatusCheckFailureStartTime"):
                self._set(key, jobStatusCheckFailureStartTime=now())
            return
        self._since.pop((job["metadata"]["uid"], "check"), None)
        if job["status"].get("jobStatusCheckFailureStartTime"):
            self._set(key, jobStatusCheckFailureStartTime=None)
        if info is None:
            return
        times = {"startTime": _time(info.get("start_time")), "endTime": _time(info.get("end_time"))}
        found = {
            "jobStatus": info["status"],
            "message": info.get("message") or "",
            "rayJobInfo": {name: value for name, value in times.items() if value},
        }
        if info["status"] not in _OVER or not ended:  # the submitter still follows the log
            self._set(key, **found)
        elif info["status"] == "FAILED":
            message = found.pop("message")
            self._fail(key, job, "AppFailed", message, **found)
        else:  # a job that was stopped is complete, too
            done = job["status"].get("succeeded", 0) + (info["status"] == "SUCCEEDED")
            self._set(key, **found, jobDeploymentStatus="Complete", endTime=now(), succeeded=done)

    async def _suspending(self, key: Key, job: Object) -> None:
        self._drop_cluster(job)
        self._drop_submitter(job)
        if self._cluster(job) is None:
            self._set(key, jobDeploymentStatus="Suspended", jobStatus="", **_CLEARED)

    async def _suspended(self, key: Key, job: Object) -> None:
        if not job["spec"].get("suspend"):
            self._set(key, jobDeploymentStatus="", jobStatus="")

    async def _retrying(self, key: Key, job: Object) -> None:
        self._drop_submitter(job)
        self._drop_cluster(job)
        if self._cluster(job) is None:
            self._set(key, jobDeploymentStatus="", jobStatus="", **_CLEARED)

    async def _over(self, key: Key, job: Object) -> None:
        spec, status = job["spec"], job["status"]
        age, ttl = self._age(job, "over"), spec.get("ttlSecondsAfterFinished", 0)
        strategy = spec.get("deletionStrategy") or {}
        if spec.get("clusterSelector"):
            return
        if spec.get("shutdownAfterJobFinishes") and not strategy and age >= ttl:
            self._drop_cluster(job)
        legacy = {"SUCCEEDED": "onSuccess", "FAILED": "onFailure"}.get(status.get("jobStatus", ""), "")
        if legacy in strategy and age >= ttl:
            self._delete_by(strategy[legacy]["policy"], key, job)
        for rule in strategy.get("deletionRules") or []:
            when = rule["condition"]
            hit = when.get("jobStatus") == status.get("jobStatus") if "jobStatus" in when else False
            hit = hit or when.get("jobDeploymentStatus") == status["jobDeploymentStatus"]
            if hit and age >= when.get("ttlSeconds", 0):
                self._delete_by(rule["policy"], key, job)

    def _delete_by(self, policy: str, key: Key, job: Object) -> None:
        cluster = self._cluster(job)
        if policy == "DeleteCluster":
            self._drop_cluster(job)
        elif policy == "DeleteSelf":
            self.store.delete(key)
        elif policy == "DeleteWorkers" and cluster is not None and _live(cluster):

            def suspend(new: Object) -> None:
                for group in new["spec"].get("workerGroupSpecs") or []:
                    group["suspend"] = True

            if any(not group.get("suspend") for group in cluster["spec"].get("workerGroupSpecs") or []):
                place = cluster["metadata"]["namespace"], cluster["metadata"]["name"]
                self.store.edit((_CLUSTERS, *place), suspend)

    async def _deleted(self, key: Key, job: Object) -> None:
        if FINALIZER not in (job["metadata"].get("finalizers") or []):
            return
        if job.get("status", {}).get("jobStatus") not in _OVER:
            await self._stop(job)
        if key in self.store.objects:
            self.store.edit(key, lambda new: new["metadata"]["finalizers"].remove(FINALIZER))

    # What it does to others.

    async def _stop(self, job: Object) -> None:
        cluster = self._cluster(job)
        if cluster is not None and job.get("status", {}).get("jobId"):
            try:
                await self.jobs.stop(cluster, job["status"]["jobId"])
            except Unreachable as error:
                event(self.store, job, "Warning", "FailedToStop", str(error), "rayjob-controller")

    def _asked_to_suspend(self, key: Key, job: Object) -> bool:
        if job["spec"].get("suspend"):
            self._set(key, jobDeploymentStatus="Suspending")
        return bool(job["spec"].get("suspend"))

    def _late(self, key: Key, job: Object) -> bool:
        limit = job["spec"].get("activeDeadlineSeconds")
        if limit is not None and self._age(job, "active") > limit:
            self._fail(key, job, "DeadlineExceeded", "The RayJob has passed the activeDeadlineSeconds")
            return True
        limit = job["spec"].get("preRunningDeadlineSeconds")
        running = job["status"]["jobDeploymentStatus"] == "Running"
        if limit is not None and not running and self._age(job, "active") > limit:
            told = "The RayJob has passed the preRunningDeadlineSeconds before it was running"
            self._fail(key, job, "PreRunningDeadlineExceeded", told)
            return True
        return False

    def _make_cluster(self, job: Object) -> None:
        meta = job["metadata"]
        labels = {
            **(meta.get("labels") or {}),
            "ray.io/originated-from-cr-name": meta["name"],
            "ray.io/originated-from-crd": "RayJob",
            "ray.io/job-submission-mode": job["spec"].get("submissionMode", "K8sJobMode"),
        }
        body: Object = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                "name": job["status"]["rayClusterName"],
                "labels": labels,
                "annotations": dict(meta.get("annotations") or {}),
                "ownerReferences": [ray_pods.owner(job)],
            },
            "spec": deepcopy(job["spec"]["rayClusterSpec"]),
        }
        admitted = self.world.admit(_CLUSTERS, body)
        self.store.create(_CLUSTERS, meta["namespace"], admitted, "kuberay-operator")
        told = f"Created RayCluster {meta['namespace']}/{body['metadata']['name']}"
        event(self.store, job, "Normal", "CreatedRayCluster", told, "rayjob-controller")

    def _service(self, job: Object, cluster: Object) -> None:
        place, name = job["metadata"]["namespace"], ray_pods.head_service_name(job["metadata"]["name"])
        service = ray_pods.head_service(cluster, name, job)
        have = self.store.find(_SERVICES, place, name)
        if have is None:
            self.store.create(_SERVICES, place, service, "kuberay-operator")
        elif have["spec"]["selector"] != service["spec"]["selector"]:
            self.store.edit(
                (_SERVICES, place, name), lambda new: new["spec"].update(selector=service["spec"]["selector"])
            )

    def _submitter(self, job: Object, cluster: Object, job_id: str) -> None:
        meta, spec = job["metadata"], job["spec"]
        if self.store.find(_BATCH, meta["namespace"], meta["name"]) is not None:
            return
        template = deepcopy(spec.get("submitterPodTemplate") or {})
        pod = template.setdefault("spec", {})
        head = spec.get("rayClusterSpec", cluster["spec"])["headGroupSpec"]["template"]["spec"]["containers"][
            0
        ]
        if not pod.get("containers"):
            limits = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "200Mi"}}
            pod["containers"] = [{"name": "ray-job-submitter", "image": head["image"], "resources": limits}]
        pod.setdefault("restartPolicy", "Never")
        port = 8265
        if self.world.options.ray:
            port = self.jobs.ports[cluster["metadata"]["uid"]].head[8265]
        first, address = pod["containers"][0], f"http://127.0.0.1:{port}"
        first["env"] = [
            *(first.get("env") or []),
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "RAY_DASHBOARD_ADDRESS", "value": address},
            {"name": "RAY_JOB_SUBMISSION_ID", "value": job_id},
        ]
        if not first.get("command"):
            first["command"] = ["/bin/bash", "-ce", "--"]
            first["args"] = [ray_pods.job_command(spec, address, job_id)]
        limit = (spec.get("submitterConfig") or {}).get("backoffLimit", 2)
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": meta["name"], "ownerReferences": [ray_pods.owner(job)]},
            "spec": {"backoffLimit": limit, "template": template},
        }
        if not self.world.options.ray:
            self.jobs.begin(job, job_id)
        self.store.create(_BATCH, meta["namespace"], self.world.admit(_BATCH, body), "kuberay-operator")

    def _submitter_ended(self, job: Object) -> str:
        """Return how the submitter's Job has ended, Complete or Failed; empty when it has not."""
        batch = self.store.find(_BATCH, job["metadata"]["namespace"], job["metadata"]["name"])
        conditions = (batch or {}).get("status", {}).get("conditions") or []
        return next((each["type"] for each in conditions), "")

    def _drop_submitter(self, job: Object) -> None:
        key = (_BATCH, job["metadata"]["namespace"], job["metadata"]["name"])
        batch = self.store.find(*key)
        if batch is not None and _live(batch):
            self.store.delete(key)


def _live(each: Object) -> bool:
    return "deletionTimestamp" not in each["metadata"]


def _time(milliseconds: Any) -> str | None:
    if not milliseconds:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
