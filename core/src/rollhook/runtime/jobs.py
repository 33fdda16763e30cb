"""Jobs: prepared, submitted and recorded, watched until they end, and what is collected on the way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext
from rollhook.durable import cannot_write
from rollhook.errors import LauncherError, RunError
from rollhook.job_script import FILES, SCRIPT
from rollhook.launcher import ENDED, Handle, Job, JobStatus, Launcher, Plan, State
from rollhook.rundir import RunDir
from rollhook.runtime.job_records import Record, attempt_directory

logger = logging.getLogger(__name__)

#: seconds between two looks at a job
POLL_SECONDS = 1.0
#: how long a scheduler may not know a job, or not be reached, before that is believed
LOST_SECONDS = 60.0
#: what collecting debug files, and reading a log to its end, may take
DEBUG_SECONDS = 60.0
DRAIN_SECONDS = 30.0
EXIT: Mapping[State, int] = {"succeeded": 0, "failed": 1, "lost": 1, "stopped": 3}
TIMEOUT = 124


async def prepare(launcher: Launcher, job: Job) -> Plan:
    """Return the plan of a job that can run. Raises LauncherError with all that the site lacks for it."""
    plan = launcher.plan(job)
    problems = await launcher.preflight(plan)
    if problems:
        said = "; ".join(problems) if len(problems) == 1 else "".join(f"\n  - {each}" for each in problems)
        raise LauncherError(f"launcher {plan.launcher} cannot run job {job.id}: {said}", kind="user")
    return plan


async def submit_job(
    launcher: Launcher, job: Job, *, run: RunDir, keys: Mapping[str, Any] | None = None
) -> Handle:
    """Prepare a job, and submit it as an attempt of the run that keeps its record."""
    return await submit_plan(launcher, await prepare(launcher, job), run=run, keys=keys)


async def submit_plan(
    launcher: Launcher, plan: Plan, *, run: RunDir, keys: Mapping[str, Any] | None = None, name: str = ""
) -> Handle:
    """Write the record, deliver the files if they are shared, submit, and collect what there is to see.

    `name` and `keys` are the launcher's, from which the verbs build it again; the name is by default that in
    the plan. Whatever fails is in the record.
    """
    record = await asyncio.to_thread(Record.of(plan, keys or {}, name).begin, run)
    try:
        if launcher.shares_files:
            await asyncio.to_thread(_deliver, plan)
        handle = await launcher.submit(plan)
    except Exception as error:  # an interruption says nothing of whether the scheduler has it
        with suppress(RunError):  # a full disk may be why it failed, which is what is to be said
            await asyncio.to_thread(record.failed, run, str(error) or type(error).__name__)
        raise
    handle = replace(handle, stopped_code=plan.job.stopped_code)
    try:
        await asyncio.to_thread(record.submitted, run, handle)
    except RunError as error:
        raise RunError(
            f"job {handle.job_id} was submitted and goes on, but its record could not be written, so no verb "
            f"knows it: {error}; launcher {handle.launcher} calls it {dict(handle.data)}"
        ) from error
    await collect(launcher, handle, attempt_directory(run, plan.job.attempt), "submitted")
    return handle


def build_launcher(record: Record, scratch: Path) -> Launcher:
    """Build the launcher that submitted a job. Raises LoadError when it is not installed here."""
    from rollhook.packs import cache_directory
    from rollhook.plugins import load
    from rollhook.secrets import resolve_secret

    context = BuildContext(
        logger=logging.getLogger("rollhook.launcher"),
        scratch=scratch,
        cache=cache_directory(),
        run_id=record.run_id,
        attempt=record.attempt,
        secret=resolve_secret,
    )
    plugins = load([("launcher", record.launcher)])
    launcher: Launcher = plugins.build("launcher", record.launcher, record.keys, context, "launcher")
    return launcher


async def job_status(launcher: Launcher, record: Record) -> JobStatus:
    """Return how a recorded job stands, also one that was never submitted."""
    if record.handle is not None:
        return await launcher.status(record.handle)
    if record.error is not None:
        return JobStatus("failed", f"it could not be submitted: {record.error}")
    return JobStatus("lost", "whoever submitted it was interrupted, so it is not known whether it runs")


async def wait(
    launcher: Launcher,
    handle: Handle,
    *,
    follow: Callable[[bytes], None] | None = None,
    timeout: float | None = None,
    **options: Any,
) -> int:
    """Wait for the job's end and return 0 succeeded, 1 failed or lost, 3 stopped, 124 waited too long."""
    try:
        return EXIT[(await watch(launcher, handle, follow=follow, timeout=timeout, **options)).state]
    except TimeoutError:
        return TIMEOUT


async def watch(
    launcher: Launcher,
    handle: Handle,
    *,
    follow: Callable[[bytes], None] | None = None,
    timeout: float | None = None,
    poll: float = POLL_SECONDS,
    lost_seconds: float = LOST_SECONDS,
    drain_seconds: float = DRAIN_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    changed: Callable[[JobStatus], Awaitable[None]] | None = None,
) -> JobStatus:
    """Return how the job ended, or that it is lost; `follow` is given its log, all of it.

    `changed` is awaited whenever its state is another one. Raises TimeoutError after `timeout` seconds; the
    job goes on then. Of one that has ended the log is waited for `drain_seconds` more.
    """
    following = None
    try:
        if follow is not None:
            following = asyncio.create_task(_follow(launcher, handle, follow, poll))
        async with asyncio.timeout(timeout):
            status = await _until_ended(launcher, handle, poll, lost_seconds, clock, changed)
        if following is not None and status.state != "lost":
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(following), drain_seconds)
        return status
    finally:
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


async def _until_ended(
    launcher: Launcher,
    handle: Handle,
    poll: float,
    lost_seconds: float,
    clock: Callable[[], float],
    changed: Callable[[JobStatus], Awaitable[None]] | None,
) -> JobStatus:
    state, since = None, None
    while True:
        status, error = None, None
        try:
            status = await launcher.status(handle)
        except LauncherError as failure:
            error = failure
        if status is not None and status.state != state:
            state = status.state
            if changed is not None:
                await changed(status)
        if status is not None and status.state in ENDED:
            return status
        if status is not None and status.state != "lost":
            since = None
        elif since is None:
            since = clock()
        elif clock() - since >= lost_seconds:
            if status is None:
                assert error is not None
                raise error
            return status
        await asyncio.sleep(poll)


async def _follow(launcher: Launcher, handle: Handle, write: Callable[[bytes], None], poll: float) -> None:
    """Write the log until it ends; where it breaks off, it is taken up again where it was."""
    written, said = 0, ""
    while True:
        position = 0
        try:
            async for data in launcher.logs(handle, follow=True):
                new = data[max(0, written - position) :]
                position += len(data)
                if new:
                    write(new)
                    written += len(new)
            return
        except LauncherError as error:
            if str(error) != said:
                said = str(error)
                logger.warning("the log of job %s broke off, and is taken up again: %s", handle.job_id, said)
            await asyncio.sleep(poll)


async def collect(launcher: Launcher, handle: Handle, directory: Path, when: str) -> Path:
    """Write what the scheduler says about a job into `debug/<time>-<when>/`; never raises, returns where."""
    target = directory / "debug" / f"{datetime.now(UTC):%Y%m%dT%H%M%S}Z-{when}"
    try:
        async with asyncio.timeout(DEBUG_SECONDS):
            files = dict(await launcher.debug(handle))
    except Exception as error:  # noqa: BLE001 - what helps to find a fault must not be one
        files = {"error.txt": f"{type(error).__name__}: {error}\n"}
    try:
        await asyncio.to_thread(_write_texts, target, files)
    except OSError as error:
        logger.warning("%s cannot be written: %s", target, error.strerror)
    return target


def _write_texts(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", errors="replace")


def _deliver(plan: Plan) -> None:
    directory = Path(plan.job.directory)
    try:
        _write_texts(directory, plan.files)
        script = directory / FILES / SCRIPT
        if script.exists():
            script.chmod(0o755)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from error
