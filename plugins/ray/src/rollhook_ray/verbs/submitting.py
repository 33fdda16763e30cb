"""Submitting a workload: its directory and what that shows, the job's record, and following it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollhook.cli.watching import watch_job
from rollhook.component import BuildContext
from rollhook.errors import LauncherError, UsageError
from rollhook.launcher import Launcher, Plan
from rollhook.packs import cache_directory
from rollhook.rundir import RunDir, check_free
from rollhook.runtime import jobs
from rollhook.runtime.job_records import Record, find_record
from rollhook.secrets import resolve_secret
from rollhook_ray import RayLauncherConfig
from rollhook_ray.launcher import RayLauncher
from rollhook_ray.workload import Request
from rollhook_ray.workload_artefacts import artefacts, write_artefacts
from rollhook_ray.workload_check import missing
from rollhook_ray.workload_render import Rendered, run_directory


@dataclass(frozen=True)
class Submitted:
    """A job that Ray has, and what is needed to follow it."""

    launcher: Launcher
    run: RunDir


def planned(request: Request, rendered: Rendered) -> Plan:
    """Return the launcher's plan; nothing is contacted."""
    return _launcher_of(rendered).plan(rendered.job)


async def problems_of(request: Request, rendered: Rendered) -> tuple[Sequence[str], Sequence[str]]:
    """Return what shared storage lacks for a job, and what the cluster does."""
    launcher = _launcher_of(rendered)
    here = await asyncio.to_thread(missing, request.spec)
    if not rendered.config.shared:
        here = ["shared: false is not for workloads: their directory is on shared_root", *here]
    try:
        there = await launcher.preflight(launcher.plan(rendered.job))
    except LauncherError as error:
        there = [str(error)]
    return here, there


async def nodes_of(rendered: Rendered) -> Sequence[str]:
    """Return what each node of the cluster has, a line each; nothing for a cluster that is not reached."""
    try:
        nodes = await _launcher_of(rendered)._client().nodes()
    except LauncherError:
        return []
    return [
        f"{'head' if node.head else 'worker'} {node.ip}: {node.resources.get('CPU', 0):g} CPUs, "
        f"{node.resources.get('GPU', 0):g} GPUs"
        for node in nodes
        if node.alive
    ]


async def submit_request(request: Request, rendered: Rendered) -> Submitted:
    """Submit a job as a new run below `<shared_root>/jobs`, written before Ray is asked.

    Raises RunError for an id that was used, before a file is touched; UsageError with all that shared storage
    lacks, likewise; LauncherError for what the cluster refuses, which is in the record of the run.
    """
    root = Path(run_directory(request.spec, request.id)).parent
    await asyncio.to_thread(check_free, root, request.id)
    here, there = await problems_of(request, rendered)
    if here:
        raise UsageError(_listed(request.id, [*here, *there]))
    launcher = _launcher_of(rendered)
    plan = launcher.plan(rendered.job)
    run = await asyncio.to_thread(RunDir.create, root, request.spec.workload, run_id=request.id)
    keys = rendered.config.model_dump(mode="json", exclude_defaults=True)
    files = artefacts(request, rendered, plan)
    await asyncio.to_thread(_lay_out, run, rendered.job.attempt, files)
    if there:
        said = _listed(request.id, there)
        await asyncio.to_thread(Record.of(plan, keys).failed, run, said)
        raise LauncherError(f"{said}\nwhat was to be submitted is in {run.path}", kind="user")
    await jobs.submit_plan(launcher, plan, run=run, keys=keys)
    return Submitted(launcher, run)


def follow(submitted: Submitted, say: Callable[[str], None], timeout: float | None) -> int:
    """Show the job's log until it has ended, collect what Ray says, and return the exit code."""
    record = find_record(submitted.run)
    return watch_job(submitted.run, record, submitted.launcher, say, timeout, as_json=False)


def build_launcher(config: RayLauncherConfig, run_id: str = "", attempt: int = 0) -> RayLauncher:
    """Return the launcher of a base config, or of a job."""
    context = BuildContext(
        logger=logging.getLogger("rollhook.launcher"),
        scratch=Path(tempfile.gettempdir()),
        cache=cache_directory(),
        run_id=run_id,
        attempt=attempt,
        secret=resolve_secret,
    )
    return RayLauncher(config, context)


def _launcher_of(rendered: Rendered) -> RayLauncher:
    return build_launcher(rendered.config, rendered.job.run_id, rendered.job.attempt)


def _lay_out(run: RunDir, attempt: int, files: dict[str, bytes]) -> None:
    with contextlib.suppress(OSError):  # of a native run; verl writes none
        run.episodes.rmdir()
    write_artefacts(run.path, attempt, files)


def _listed(job_id: str, problems: Sequence[str]) -> str:
    return f"job {job_id} was not submitted:" + "".join(f"\n  - {each}" for each in problems)
