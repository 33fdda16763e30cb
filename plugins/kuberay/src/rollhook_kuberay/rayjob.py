"""A RayJob: a cluster for one job, whose life KubeRay looks after."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollhook.errors import LauncherError
from rollhook.job_script import LOG, ended_state, read_exit_code, signalled
from rollhook.launcher import Handle, JobStatus
from rollhook.ray_jobs import RayJobs, Unreachable
from rollhook_kuberay.heads import ray_jobs
from rollhook_kuberay.marks import STOPPED, owned
from rollhook_kuberay.port import KubeError, Object, Port
from rollhook_kuberay.site import Site

#: deployment statuses that do not change any more; the deployment says whether a job is over, not the job
OVER = frozenset({"Complete", "Failed", "ValidationFailed"})
_CODE = re.compile(r"exit code (-?\d+)")


async def submit(site: Site, port: Port, requests: Mapping[str, Object]) -> None:
    """Create the RayJob, then what it owns; if that fails the RayJob goes again, and all with it."""
    job, *dependants = requests.values()
    name = job["metadata"]["name"]
    if site.keys.replace:
        await remove_ended(site, port, name)
    try:
        made = await port.create(job)
    except KubeError as error:
        if error.status != 409:
            raise
        raise LauncherError(taken(name, await port.get("RayJob", name)), kind="user") from error
    try:
        for each in dependants:
            await port.create(owned(each, made))
    except BaseException:
        await asyncio.shield(port.delete("RayJob", name))
        raise


def taken(name: str, job: Object | None) -> str:
    """Say what to do about a name that is in use."""
    status = deployment(job or {})
    if job is None or status in OVER:
        return (
            f"a RayJob {name} is there already ({status or 'no status'}), and KubeRay runs a name once: set "
            "launcher.replace=true to remove it first, or give another --run-id"
        )
    return f"a RayJob {name} is there and not over ({status or 'new'}); stop it, or give another --run-id"


async def remove_ended(site: Site, port: Port, name: str) -> None:
    """Delete a RayJob of this name that is over, and wait until it is gone. Raises for one that is not."""
    there = await port.get("RayJob", name)
    if there is None:
        return
    if deployment(there) not in OVER:
        raise LauncherError(taken(name, there), kind="user")
    await port.delete("RayJob", name)
    await site.gone(port, "RayJob", name)


async def status(site: Site, handle: Handle, port: Port) -> JobStatus:
    """Return how the job stands; one that is unknown is judged by what it left, if that is seen here."""
    shared = site.keys.shares_files
    job = await port.get("RayJob", str(handle.data["name"]))
    code = read_exit_code(handle.directory) if shared else None
    asked = bool(shared and signalled(handle.directory))
    found = judge(job, stopped_code=handle.stopped_code, recorded=code, asked=asked)
    if job is not None and found.state == "pending" and deployment(job) == "Running":
        return await _fresher(site, job, handle, port, found)
    return found


async def _fresher(site: Site, job: Object, handle: Handle, port: Port, found: JobStatus) -> JobStatus:
    """Ask Ray where KubeRay's word is of before the job began; what it cannot say is left."""
    said = job.get("status") or {}
    try:
        async with ray_jobs(port, str(said.get("rayClusterName")), site.token(), seconds=5.0) as jobs:
            there = await jobs.job(str(said.get("jobId") or handle.job_id))
    except LauncherError:
        return found
    running = there is not None and there.status != "PENDING"
    return JobStatus("running", found.message, raw=found.raw) if running else found


def judge(
    job: Object | None, *, stopped_code: int | None, recorded: int | None = None, asked: bool = False
) -> JobStatus:
    """Say how a job stands, by its RayJob and the exit code that its script left."""
    if job is None:
        if recorded is None:
            return JobStatus(
                "lost", "Kubernetes does not know the RayJob any more, and it left no exit code here"
            )
        state = ended_state(recorded, stopped_code=stopped_code, asked=asked)
        return JobStatus(state, "by the exit code that it left; the RayJob is gone", recorded)
    said = job.get("status") or {}
    over, ray = deployment(job), str(said.get("jobStatus") or "")
    raw = {"metadata": {"name": job["metadata"]["name"]}, "status": said}
    told = STOPPED in (job["metadata"].get("annotations") or {})
    if over not in OVER:
        return _going_on(over, ray, said, raw, told=told)
    found = _CODE.search(str(said.get("message") or ""))
    code = recorded if recorded is not None else int(found[1]) if found else None
    if over == "Complete" and ray == "SUCCEEDED":
        return JobStatus("succeeded", "", 0 if code is None else code, raw)
    stopped = over == "Complete" and ray == "STOPPED"
    if code is not None and over != "ValidationFailed" and not stopped:
        asked = asked or told or ray == "STOPPED"
        stopped = ended_state(code, stopped_code=stopped_code, asked=asked) == "stopped"
    if stopped:
        return JobStatus("stopped", "it was stopped on request", code, raw)
    message = _message(said) or f"KubeRay ended it as {over}, Ray as {ray or 'nothing'}"
    return JobStatus("failed", message, code, raw)


def _going_on(over: str, ray: str, said: Object, raw: Object, *, told: bool) -> JobStatus:
    """Say how a job stands that KubeRay does not call over."""
    message = _message(said)
    if over == "Running":
        return JobStatus("pending" if ray in ("", "PENDING") else "running", message, raw=raw)
    if over == "Suspending":
        return JobStatus("running", message or "its cluster is being removed", raw=raw)
    if over == "Suspended":
        if told:
            return JobStatus("stopped", "it was stopped, and its cluster is gone", raw=raw)
        message = message or "it is suspended: a queue has yet to admit it, or someone suspended it"
    return JobStatus("pending", message or over or "KubeRay has not seen it yet", raw=raw)


def deployment(job: Object) -> str:
    """Return how KubeRay says that a RayJob stands; empty while it has not looked."""
    return str((job.get("status") or {}).get("jobDeploymentStatus") or "")


def _message(said: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in str(said.get("message") or "").splitlines() if line.strip()]
    return ": ".join(
        part for part in (str(said.get("reason") or ""), lines[0][:300] if lines else "") if part
    )


async def logs(site: Site, handle: Handle, port: Port, *, follow: bool) -> AsyncIterator[bytes]:
    """Give the job's output, from Ray while its cluster is there, else from what was kept of it."""
    given = 0
    while True:
        job = await port.get("RayJob", str(handle.data["name"]))
        over = job is None or deployment(job) in OVER
        cluster = str(((job or {}).get("status") or {}).get("rayClusterName") or "")
        if cluster and job is not None:
            try:
                async with ray_jobs(port, cluster, site.token()) as jobs:
                    ray_id = str((job.get("status") or {}).get("jobId") or handle.job_id)
                    async for chunk in read(jobs, ray_id, given, follow=follow):
                        given += len(chunk)
                        yield chunk
                    if await jobs.job(ray_id) is not None and (
                        over or not follow or await _ended(jobs, ray_id)
                    ):
                        return
            except (KubeError, Unreachable) as error:
                if isinstance(error, KubeError) and error.kind != "retryable":
                    raise
        if over or not follow:
            try:
                async for chunk in _kept(site, handle, port, given, over=over):
                    yield chunk
            except LauncherError as error:
                if not follow:
                    raise
                yield f"rollhook: {error}\n".encode()  # who follows until the end has reached it
            return
        await asyncio.sleep(site.keys.poll_seconds)


async def read(jobs: RayJobs, ray_id: str, given: int, *, follow: bool) -> AsyncIterator[bytes]:
    """Give a Ray job's output after `given` bytes; with `follow` until it ends or is out of reach."""
    if await jobs.job(ray_id) is None:
        return
    if not follow:
        yield (await jobs.log(ray_id))[given:]
        return
    seen = 0
    async for chunk in jobs.follow(ray_id, patience=5.0):
        fresh = chunk[max(0, given - seen) :]
        seen += len(chunk)
        if fresh:
            yield fresh


async def _ended(jobs: RayJobs, ray_id: str) -> bool:
    job = await jobs.job(ray_id)
    return job is not None and job.ended


async def _kept(site: Site, handle: Handle, port: Port, given: int, *, over: bool) -> AsyncIterator[bytes]:
    """Give what is left of the output: on the shared volume, or in the log of KubeRay's submitter."""
    path = f"{handle.directory}/{LOG}"
    if site.keys.shares_files:
        yield (await asyncio.to_thread(_bytes, path))[given:]
        return
    if not over or given:
        return
    for pod in await port.list("Pod", {"job-name": str(handle.data["name"])}):
        async for chunk in port.logs(pod["metadata"]["name"]):
            yield chunk
        return
    raise LauncherError(
        f"the cluster of {handle.job_id} is gone, and its output with it; it is kept in {path} on the shared "
        "volume (`rollhook dev connect`), and launcher.ttl_seconds keeps the cluster longer",
        kind="user",
    )


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


async def stop(site: Site, handle: Handle, port: Port, *, force: bool) -> str:
    """Ask Ray to stop the job, as its script understands it; `force`, or without Ray yet: end its cluster."""
    name = str(handle.data["name"])
    job = await port.get("RayJob", name)
    if job is None:
        return f"{name} is not there any more"
    over = deployment(job)
    if over in OVER or (over == "Suspended" and STOPPED in (job["metadata"].get("annotations") or {})):
        return f"{name} has ended already"
    cluster = str((job.get("status") or {}).get("rayClusterName") or "")
    if over != "Running" or force or not cluster:
        spec = {"suspend": True, "shutdownAfterJobFinishes": True, "deletionStrategy": None}
        await port.patch("RayJob", name, {"metadata": {"annotations": {STOPPED: "true"}}, "spec": spec})
        return f"{name} was told to end: KubeRay suspends it and removes its cluster"
    ray_id = str((job.get("status") or {}).get("jobId") or handle.job_id)
    async with ray_jobs(port, cluster, site.token()) as jobs:
        if await jobs.job(ray_id) is None or not await jobs.stop(ray_id):
            return f"{name} is about to end: Ray has no such job that runs"
    return f"{name} was asked to stop"


async def cleanup(handle: Handle, port: Port) -> list[str]:
    """Delete a RayJob that is over; its cluster, files and claims are its dependants and go with it."""
    name = str(handle.data["name"])
    job = await port.get("RayJob", name)
    if job is None:
        return []
    if deployment(job) not in OVER | {"Suspended"}:
        raise LauncherError(f"{name} is not over ({deployment(job) or 'new'}); stop it first", kind="user")
    await port.delete("RayJob", name)
    return [f"removed the RayJob {name} with its cluster, files and claims"]
