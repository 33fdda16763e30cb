"""`rollhook jobs`: the jobs that launchers have been given, each by the id of its run alone."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.output import as_json, table
from rollhook.cli.recipe import Json
from rollhook.terminal import one_line

if TYPE_CHECKING:
    from rollhook.launcher import Handle, JobStatus, Launcher
    from rollhook.rundir import RunDir
    from rollhook.runtime.job_records import Record

app = typer.Typer(
    help="List, watch and stop the jobs that runs were submitted as.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Run = Annotated[str, typer.Argument(help="id of a run, or the path of its directory")]
Attempt = Annotated[int | None, typer.Option(help="its job of this attempt; default: the newest")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="wait so long, then exit with 124; the job goes on")
]
#: what a scheduler may take to answer for the list
ASK_SECONDS = 20.0


@app.command("list")
def list_jobs(
    all_jobs: Annotated[bool, typer.Option("--all", help="also jobs of earlier attempts")] = False,
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="ask the schedulers how jobs stand")] = True,
    json: Json = False,
) -> None:
    """List the jobs of the runs that this machine knows, the newest first."""
    from rollhook.errors import RunError
    from rollhook.rundir import RunDir, index
    from rollhook.runtime.job_records import records

    found: list[Record] = []
    for path in index().values():
        try:
            of_run = records(RunDir(path))
        except RunError as error:  # of one run, which must not hide the others
            _say(str(error))
            continue
        found += of_run if all_jobs else of_run[-1:]
    found.sort(key=lambda record: -record.submitted_at)
    states = asyncio.run(_ask_all(found)) if ask else [("not asked", "")] * len(found)
    if json:
        as_json(
            [
                _data(record) | {"state": state, "message": why}
                for record, (state, why) in zip(found, states, strict=True)
            ]
        )
    elif not found:
        typer.echo("No job is known here.", err=True)
    else:
        header = ("RUN", "JOB", "LAUNCHER", "STATE", "SUBMITTED", "MESSAGE")
        rows = [
            (record.run_id, record.job_id, record.launcher, state, _when(record.submitted_at), why)
            for record, (state, why) in zip(found, states, strict=True)
        ]
        table([header, *rows])


@app.command("status")
def status(run: Run, attempt: Attempt = None, json: Json = False) -> None:
    """Say how a run's job stands. Exit code 1 when it failed or is lost, 3 when it was stopped."""
    from rollhook.runtime.jobs import EXIT, job_status

    _, record, launcher = _open(run, attempt)
    said = asyncio.run(job_status(launcher, record))
    if json:
        shown = {"state": said.state, "message": said.message, "exit_code": said.exit_code, "raw": said.raw}
        as_json(_data(record) | shown)
    else:
        typer.echo(
            one_line(f"{record.job_id}: {said.state}" + (f" ({said.message})" if said.message else ""))
        )
        typer.echo(one_line(f"launcher {record.launcher}, submitted {_when(record.submitted_at)}"))
        if record.handle is not None:
            typer.echo(one_line(f"directory {record.handle.directory}"))
    raise typer.Exit(EXIT.get(said.state, 0))


@app.command("logs")
def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="until the job ends; then exit as it did")
    ] = False,
    role: Annotated[
        str | None, typer.Option(help="another log of the attempt, by the beginning of its name")
    ] = None,
    attempt: Attempt = None,
    timeout: Timeout = None,
) -> None:
    """Print a job's log from its beginning, or another log of its attempt."""
    from rollhook.errors import UsageError

    found, record, launcher = _open(run, attempt)
    if role not in (None, "driver"):
        if follow or timeout is not None:
            raise UsageError("--follow and --timeout are for the driver's log; leave out --role")
        if not launcher.shares_files:
            raise UsageError(f"launcher {record.launcher} runs where only the driver's log is seen from here")
        _print_role(record, str(role))
        return
    handle = _handle(record)
    if not follow:
        asyncio.run(_print_log(launcher, handle))
        return
    from rollhook.cli.watching import watch_job

    raise typer.Exit(watch_job(found, record, launcher, _say, timeout, as_json=False))


@app.command("wait")
def wait_for(run: Run, attempt: Attempt = None, timeout: Timeout = None, json: Json = False) -> None:
    """Wait until a run's job has ended, and exit as it did: 0, 1 failed or lost, 3 stopped, 124 too long."""
    from rollhook.cli.watching import watch_job

    found, record, launcher = _open(run, attempt)
    _handle(record)
    raise typer.Exit(watch_job(found, record, launcher, _say, timeout, json, show_log=False))


@app.command("stop")
def stop(
    run: Run,
    force: Annotated[bool, typer.Option("--force", help="at once, without its grace")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it has ended")] = False,
    cleanup: Annotated[
        bool, typer.Option("--cleanup", help="wait, then remove what it left at the site, its files excepted")
    ] = False,
    attempt: Attempt = None,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Stop a run's job: it may write its checkpoint first, unless forced. One that has ended is no error."""
    from rollhook.cli.watching import watch_job
    from rollhook.runtime.jobs import TIMEOUT

    found, record, launcher = _open(run, attempt)
    handle = _handle(record)
    said = [asyncio.run(launcher.stop(handle, force=force))]
    _say(said[0])
    code = None
    if wait or cleanup or timeout is not None:
        code = watch_job(found, record, launcher, _say, timeout, as_json=False, show_log=False)
    if cleanup and code != TIMEOUT:
        removed = asyncio.run(launcher.cleanup(handle)) or ["There is nothing to remove."]
        for line in removed:
            _say(line)
        said += removed
    if json:
        as_json(
            {
                "run_id": record.run_id,
                "job_id": record.job_id,
                "said": said,
                "waited_too_long": code == TIMEOUT,
            }
        )
    raise typer.Exit(TIMEOUT if code == TIMEOUT else 0)


def _open(reference: str, attempt: int | None) -> tuple[RunDir, Record, Launcher]:
    import tempfile

    from rollhook.rundir import RunDir
    from rollhook.runtime.job_records import find_record
    from rollhook.runtime.jobs import build_launcher

    run = RunDir.find(reference)
    record = find_record(run, attempt)
    return run, record, build_launcher(record, Path(tempfile.gettempdir()))


def _handle(record: Record) -> Handle:
    from rollhook.errors import RunError

    if record.handle is not None:
        return record.handle
    why = f"could not be submitted: {record.error}" if record.error else "may not have been submitted"
    raise RunError(f"job {record.job_id} {why}")


async def _ask_all(found: list[Record]) -> list[tuple[str, str]]:
    return await asyncio.gather(*(_ask(record) for record in found))


async def _ask(record: Record) -> tuple[str, str]:
    import tempfile

    from rollhook.errors import RollhookError
    from rollhook.runtime.jobs import build_launcher, job_status

    try:
        async with asyncio.timeout(ASK_SECONDS):
            launcher = await asyncio.to_thread(build_launcher, record, Path(tempfile.gettempdir()))
            said: JobStatus = await job_status(launcher, record)
    except TimeoutError:
        return "unknown", f"no answer within {ASK_SECONDS:g} s"
    except RollhookError as error:
        return "unknown", str(error)
    except Exception as error:  # noqa: BLE001 - of one job, which must not hide the others
        return "unknown", f"{type(error).__name__}: {error}"
    return said.state, said.message


async def _print_log(launcher: Launcher, handle: Handle) -> None:
    async for data in launcher.logs(handle):
        sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print_role(record: Record, role: str) -> None:
    """Print the logs of an attempt whose names begin so."""
    from rollhook.errors import RunError

    directory = Path(_handle(record).directory) / "logs"
    there = sorted(path for path in directory.rglob("*") if path.is_file())
    chosen = [path for path in there if str(path.relative_to(directory)).startswith(role)]
    if not chosen:
        names = ", ".join(str(path.relative_to(directory)) for path in there) or "no log"
        raise RunError(f"no log of job {record.job_id} begins with {role!r}; in {directory} there is {names}")
    for path in chosen:
        if len(chosen) > 1:
            _say(f"==> {path.relative_to(directory)} <==")
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _data(record: Record) -> dict[str, Any]:
    names = ("run_id", "attempt", "job_id", "launcher", "user", "host", "submitted_at", "error")
    shown = {name: getattr(record, name) for name in names}
    return shown | {"directory": record.handle.directory if record.handle is not None else None}


def _when(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _say(text: str) -> None:
    typer.echo(one_line(text), err=True)
