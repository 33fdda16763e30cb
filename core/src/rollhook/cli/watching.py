"""Watching a job to its end from a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollhook.runtime.job_records import attempt_directory
from rollhook.runtime.jobs import EXIT, TIMEOUT, collect, watch

if TYPE_CHECKING:
    from rollhook.launcher import JobStatus, Launcher
    from rollhook.rundir import RunDir
    from rollhook.runtime.job_records import Record

STOPPED = 3


def watch_job(
    run: RunDir,
    record: Record,
    launcher: Launcher,
    say: Callable[[str], None],
    timeout: float | None,
    as_json: bool,
    *,
    show_log: bool = True,
) -> int:
    """Show a job's log until it ends, collect debug files, say how it ended and return the exit code.

    Ctrl-C ends the watching, which is 3 too; the job goes on. With `as_json` the log goes to stderr.
    """
    out = sys.stderr.buffer if as_json else sys.stdout.buffer
    directory = attempt_directory(run, record.attempt)
    handle = record.handle
    assert handle is not None

    def write(data: bytes) -> None:
        out.write(data)
        out.flush()

    async def changed(status: JobStatus) -> None:
        if status.state in ("pending", "running"):
            say(f"Job {record.job_id} is {status.state}" + (f": {status.message}" if status.message else "."))
        if status.state == "running":
            await collect(launcher, handle, directory, "running")

    async def work() -> JobStatus:
        follow = write if show_log else None
        status = await watch(launcher, handle, follow=follow, timeout=timeout, changed=changed)
        await collect(launcher, handle, directory, "ended")
        return status

    try:
        status = asyncio.run(work())
    except KeyboardInterrupt:
        say(f"No longer watching. Run {run.run_id} goes on; `rollhook jobs stop {run.run_id}` stops it.")
        return STOPPED
    except TimeoutError:
        say(f"Job {record.job_id} has not ended after {timeout:g} s; it goes on.")
        return TIMEOUT
    say(f"Job {record.job_id} {status.state}" + (f": {status.message}." if status.message else "."))
    if as_json:
        sys.stdout.write(_result(run, record, status) + "\n")
    return EXIT[status.state]


def _result(run: RunDir, record: Record, status: JobStatus) -> str:
    import orjson

    from rollhook.runtime.results import read_result

    shown = {
        "run_id": record.run_id,
        "status": status.state,
        "attempt": record.attempt,
        "job_id": record.job_id,
        "exit_code": status.exit_code,
        "message": status.message,
    }
    result = read_result(run.path)
    if result is not None and result.status == status.state:
        shown |= {"checkpoint": result.checkpoint, "metrics": result.metrics}
    return orjson.dumps(shown).decode()
