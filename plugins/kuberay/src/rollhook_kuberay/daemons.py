"""Daemons: Ray jobs beside the training, which are found running, or started under a new id."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence

from rollhook.errors import LauncherError
from rollhook.ray_jobs import RayJob, RayJobs
from rollhook_kuberay.config import Daemon
from rollhook_kuberay.heads import ray_jobs, reach
from rollhook_kuberay.health import answers
from rollhook_kuberay.port import Port
from rollhook_kuberay.site import Site

STOP_SECONDS = 60.0


def newest(jobs: Sequence[RayJob], base: str) -> RayJob | None:
    """Return the last started job of a daemon: its id, or its id with a time behind it."""
    mine = [job for job in jobs if job.id == base or _later(job.id, base)]
    return max(mine, key=lambda job: int(job.raw.get("start_time") or 0), default=None)


def _later(job_id: str, base: str) -> bool:
    return job_id.startswith(f"{base}-") and job_id.removeprefix(f"{base}-").isdigit()


def request(daemon: Daemon, job_id: str) -> dict[str, object]:
    """Return what Ray is sent for a daemon."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(daemon.env.items()))
    return {"submission_id": job_id, "entrypoint": exports + daemon.entrypoint, "runtime_env": {}}


async def ensure(
    site: Site, port: Port, cluster: str, daemon: Daemon, *, replace: bool, say: Callable[[str], None]
) -> str:
    """Find a daemon running or start it, and return its id in Ray; `replace`: a running one ends first."""
    async with ray_jobs(port, cluster, site.token()) as jobs:
        there = newest(await jobs.jobs(), daemon.id)
        job_id = daemon.id if there is None else f"{daemon.id}-{int(time.time())}"
        if there is not None and not replace:
            if there.status in ("STOPPED", "FAILED"):
                raise LauncherError(
                    f"the daemon {there.id} on {cluster} is {there.status}: {there.message.strip()[:300]}; "
                    "start it anew with launcher.replace=true, or give it another id",
                    kind="user",
                )
            say(f"the daemon {there.id} on {cluster} is {there.status}")
            return there.id
        if there is not None:
            await stop(jobs, there.id, say)
        await jobs.submit(request(daemon, job_id))
        say(f"the daemon {job_id} was started on {cluster}")
    if daemon.health:
        number, _, path = daemon.health.partition("/")
        async with reach(port, cluster, int(number)) as address:
            await answers(f"http://{address}/{path}", daemon.health_seconds, f"the daemon {job_id}", say)
    return job_id


async def stop(jobs: RayJobs, job_id: str, say: Callable[[str], None]) -> None:
    """Stop a Ray job and wait a minute for it; one that is still there then is said."""
    job = await jobs.job(job_id)
    if job is None or job.ended:
        return
    await jobs.stop(job_id)
    deadline = time.monotonic() + STOP_SECONDS
    while job is not None and not job.ended and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        job = await jobs.job(job_id)
        if job is not None and job.status == "PENDING":
            say(f"{job_id} is pending: Ray was asked to drop it, and does so once it would start")
            return
    if job is not None and not job.ended:
        say(f"{job_id} was asked to stop and has not ended after {STOP_SECONDS:.0f} s")
    else:
        say(f"{job_id} was stopped")
