"""Jobs of Ray clusters as the operator sees them: over the dashboard's API, or as a script says.

A script is a JSON object; the first that matches a RayJob is for it:
    match    a part of "namespace/name" (absent: any)
    times    how many submissions it is for (absent: all)
    status   in which the job ends (SUCCEEDED)
    seconds  of the cluster, until then; null: never (1)
    message  of its end
    logs     lines that its submitter prints (none)
    stays    SUBMIT: the dashboard refuses; CHECK: the status cannot be asked for (absent: neither)
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yaml

from doubles.kubernetes import ray_pods
from doubles.kubernetes.store import Object
from doubles.kubernetes.world import World

_SCRIPT = {"match", "times", "status", "seconds", "message", "logs", "stays"}


class Unreachable(Exception):
    """The dashboard did not answer, or answered with an error."""


@dataclass
class _Scripted:
    script: dict[str, Any]
    started: float
    stopped: float | None = None


@dataclass
class Jobs:
    """The jobs of all clusters."""

    world: World
    scripts: list[dict[str, Any]] = field(default_factory=list)
    #: real ports of clusters by uid
    ports: dict[str, ray_pods.Ports] = field(default_factory=dict)
    _jobs: dict[str, _Scripted] = field(default_factory=dict)

    def add_script(self, script: dict[str, Any]) -> None:
        """Add a script; KeyError for a word that is not known."""
        if unknown := set(script) - _SCRIPT:
            raise KeyError(", ".join(sorted(unknown)))
        self.scripts.append(dict(script))

    def _script(self, job: Object) -> dict[str, Any]:
        name = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
        for script in self.scripts:
            if script.get("match", "") in name and script.get("times", 1) > 0:
                if "times" in script:
                    script["times"] -= 1
                return script
        return {}

    async def submit(self, job: Object, cluster: Object, job_id: str) -> None:
        """Post a job, as HTTPMode does; Unreachable."""
        if self.world.options.ray:
            spec = job["spec"]
            body = {
                "entrypoint": spec.get("entrypoint", ""),
                "submission_id": job_id,
                **ray_pods.entrypoint_resources(spec),
            }
            if spec.get("runtimeEnvYAML"):
                body["runtime_env"] = yaml.safe_load(spec["runtimeEnvYAML"])
            await self._ask(cluster, "POST", "/api/jobs/", body)
            return
        self.begin(job, job_id)
        if self._jobs[job_id].script.get("stays") == "SUBMIT":
            del self._jobs[job_id]
            raise Unreachable("the script's dashboard refuses")

    def pod_script(self, job_id: str) -> dict[str, Any]:
        """Return the script of the pod that submits a scripted job and follows its log."""
        script = self._jobs[job_id].script
        seconds = script.get("seconds", 1)
        took = (time.monotonic() - self._jobs[job_id].started) / self.world.options.second
        code = int(script.get("status", "SUCCEEDED") != "SUCCEEDED")
        ends = {} if seconds is None else {"dies": max(0, seconds - took), "exit_code": code}
        return {"logs": script.get("logs", []), **ends}

    def begin(self, job: Object, job_id: str) -> None:
        """Begin a scripted job that another than the operator has submitted."""
        if job_id not in self._jobs:
            self._jobs[job_id] = _Scripted(self._script(job), time.monotonic())

    async def info(self, cluster: Object, job_id: str) -> Object | None:
        """Return status, message and times of a job; None for an unknown one; Unreachable."""
        if self.world.options.ray:
            return await self._ask(cluster, "GET", f"/api/jobs/{job_id}")
        job = self._jobs.get(job_id)
        if job is None:
            return None
        if job.script.get("stays") == "CHECK":
            raise Unreachable("the script's dashboard does not answer")
        seconds = job.script.get("seconds", 1)
        took = (time.monotonic() - job.started) / self.world.options.second
        begun = {"start_time": int(time.time() * 1000)}
        if job.stopped is not None:
            return {**begun, "status": "STOPPED", "message": "Job was intentionally stopped."}
        if seconds is None or took < seconds:
            return {**begun, "status": "RUNNING", "message": "Job is currently running."}
        status = job.script.get("status", "SUCCEEDED")
        said = "Job finished successfully." if status == "SUCCEEDED" else "Job entrypoint command failed"
        return {
            **begun,
            "status": status,
            "message": job.script.get("message", said),
            "end_time": begun["start_time"],
        }

    async def stop(self, cluster: Object, job_id: str) -> None:
        """Stop a job; Unreachable."""
        if self.world.options.ray:
            await self._ask(cluster, "POST", f"/api/jobs/{job_id}/stop")
        elif job_id in self._jobs:
            self._jobs[job_id].stopped = time.monotonic()

    async def _ask(
        self, cluster: Object, method: str, path: str, body: Object | None = None
    ) -> Object | None:
        port = self.ports[cluster["metadata"]["uid"]].head.get(ray_pods.DASHBOARD)
        # the operator's own limit is two seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as client:
            try:
                async with client.request(method, f"http://127.0.0.1:{port}{path}", json=body) as answer:
                    text = await answer.text()
                    if answer.status == 404:
                        return None
                    if answer.status >= 400:
                        raise Unreachable(f"{method} {path} failed: {answer.status} {text[-500:]}")
                    return dict(json.loads(text))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unreachable(f"{method} {path} failed: {error!r}") from error
