"""What would keep a job from running on a Ray cluster, found before it is submitted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from rollhook.errors import LauncherError
from rollhook.launcher import Job
from rollhook.ray_jobs import OLDEST, RayJobs, RayNode
from rollhook_ray import jobs

if TYPE_CHECKING:
    from rollhook_ray import RayLauncherConfig

LOOK_SECONDS = 60.0


async def problems_of_cluster(client: RayJobs, config: RayLauncherConfig, job: Job) -> list[str]:
    """Return what of the cluster as a whole would keep the job from running, a sentence each."""
    try:
        version = await client.version()
        nodes = [node for node in await client.nodes() if node.alive]
        taken = await client.job(job.id)
    except LauncherError as error:
        return [str(error)]
    found = list(_of_version(version, client.address))
    found += _of_nodes(nodes, config, job)
    if taken is not None:
        found.append(
            f"Ray has a job {job.id} already ({taken.status.lower()}); an id is used once: resume the run, "
            "which takes the next attempt, or start another run"
        )
    return found


def _of_version(version: str, address: str) -> Iterator[str]:
    try:
        old = Version(version) < Version(OLDEST)
    except InvalidVersion:  # a build of one's own
        return
    if old:
        yield f"the cluster at {address} runs Ray {version}; {OLDEST} is the oldest that is supported"


def _of_nodes(nodes: Sequence[RayNode], config: RayLauncherConfig, job: Job) -> Iterator[str]:
    driver = jobs.demand(config, job)
    if not config.driver_on_head and jobs.may_land_on_head(driver, nodes):
        yield (
            "nothing keeps the driver off the head node: give `entrypoint_resources` something that only "
            "worker nodes have (ray start --resources='{\"worker_node\": 100}'), or set driver_on_head"
        )
    if config.autoscaling:
        return
    if not any(jobs.fits(driver, node) for node in nodes):
        most = {name: max((n.resources.get(name, 0) for n in nodes), default=0) for name in driver}
        asked = ", ".join(f"{name} {value:g} (the most is {most[name]:g})" for name, value in driver.items())
        yield f"no node of the cluster can ever run the driver, which asks for {asked}"
    wanted = job.resources
    usable = [node for node in nodes if config.driver_on_head or not node.head]
    with_gpus = [node for node in usable if node.resources.get("GPU", 0) >= wanted.gpus_per_node]
    if len(usable) < wanted.nodes:
        yield f"the job asks for {wanted.nodes} nodes, and the cluster has {len(usable)} worker nodes"
    elif len(with_gpus) < wanted.nodes:
        have = sorted((int(node.resources.get("GPU", 0)) for node in usable), reverse=True)
        yield (
            f"the job asks for {wanted.nodes} nodes of {wanted.gpus_per_node} GPUs each, and the cluster's "
            f"worker nodes have {', '.join(map(str, have))}"
        )


async def problems_of_directory(client: RayJobs, config: RayLauncherConfig, job: Job) -> list[str]:
    """Return why a node would not see the job's directory, asked from a node by a small job.

    It also proves that the cluster takes jobs at all and starts them on the kind of node that is meant.
    """
    try:
        async with _marker(job.directory if config.shared else None) as marker:
            body = jobs.looking(job, marker, jobs.driver_resources(config, job))
            name = await client.submit(body)
            seen = await client.wait(name, LOOK_SECONDS)
            if seen is not None and not seen.ended:
                await client.stop(name)
                return [f"a small job did not end on the cluster within {LOOK_SECONDS:g} s: {seen.message}"]
            await client.delete(name)
    except OSError as error:
        return [f"{error.filename} cannot be written from here: {error.strerror}; is storage.root right?"]
    except LauncherError as error:
        return [str(error)]
    if seen is None or seen.exit_code == jobs.SEEN:
        return []
    above = marker and os.path.dirname(marker)
    reasons = {
        jobs.UNSEEN: f"a node of the cluster does not see {above}, which this machine does; storage.root "
        "must be on a file system that all share, at one path (or set shared: false)",
        jobs.UNWRITABLE: f"{above or job.directory} cannot be written by Ray's user on a node of the cluster",
        jobs.NO_CODE: f"a node of the cluster has no directory {job.code.path} (code_path)",
        jobs.NO_PYTHON: "a node of the cluster has no python3 on its PATH, which the job's script needs",
    }
    said = f"a small job failed on the cluster: {seen.message.strip().splitlines()[0]}"
    return [reasons.get(seen.exit_code if seen.exit_code is not None else -1, said)]


@contextlib.asynccontextmanager
async def _marker(directory: str | None) -> AsyncIterator[str | None]:
    """Give a file in the nearest directory that exists, and remove it; None for no directory."""
    if directory is None:
        yield None
        return
    path = await asyncio.to_thread(_write_marker, Path(directory))
    try:
        yield str(path)
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _write_marker(directory: Path) -> Path:
    directory = next(each for each in (directory, *directory.parents) if each.is_dir())
    path = directory / f".rollhook-seen-{secrets.token_hex(4)}"
    path.touch(mode=0o644, exist_ok=False)
    return path
