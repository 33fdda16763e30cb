"""`rollhook run` and `rollhook drive`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rollhook.runtime.native_job import Submitted
    from rollhook.runtime.progress import Display
    from rollhook.runtime.results import RunResult

EXIT = {"succeeded": 0, "failed": 1, "stopped": 3}


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's path, or the name of a shipped one", show_default=False)
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, +key=value or ~key")] = None,
    run_id: Annotated[
        str | None, typer.Option(help="id of the new run; default: from the recipe's name")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="go on with this run (id or path) instead of a recipe")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach/--wait", help="return once it is submitted; on this machine: as a job")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="wait so long for a job, then exit with 124; it goes on"),
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="what may differ from a lock, or all; repeatable"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Run a recipe or a lock where its launcher says, and the recipes that it needs before it.

    With launcher `local` this process drives the run: Ctrl-C once ends it after the step under way, twice at
    once. With any other, or --detach, it is a job: its log is shown, and Ctrl-C ends the watching, not the
    job; `rollhook jobs` has the verbs for it. `--resume RUN` goes on from the newest committed step.
    """
    from rollhook.errors import UsageError
    from rollhook.recipe.check import compose, drives_itself
    from rollhook.recipe.load import read_recipe
    from rollhook.rundir import RunDir
    from rollhook.runtime.launch import drive_run, run_recipe
    from rollhook.runtime.native_job import Native, submit_new, submit_resumed
    from rollhook.runtime.progress import Display

    if detach and timeout is not None:
        raise UsageError("--timeout is how long to wait, and --detach does not wait; give one of them")
    display = Display()
    if resume is not None:
        if recipe is not None or run_id is not None or allow_changed:
            raise UsageError("--resume takes the recipe and the id of the run; give nothing beside it")
        found = RunDir.find(resume)
        locked = found.lock_path.is_file()  # without one, whoever drives it says so
        if detach or (locked and not drives_itself(read_recipe(found.lock_path))):
            _submit(submit_resumed(found), display, detach, timeout, json)
        _no_timeout(timeout)
        _finish(drive_run(found, display), display, json)
    if recipe is None:
        raise UsageError("say which recipe to run, e.g. `rollhook run quickstart`, or --resume RUN")
    composed = compose(recipe, overrides or [], allow_changed=allow_changed or [], site=None)
    native = Native.of(*composed)
    if detach or not native.launcher.in_process:
        for remark in native.loaded.remarks:
            display.say(f"Lock: {remark}")
        _submit(submit_new(native, run_id), display, detach, timeout, json)
    _no_timeout(timeout)
    work = run_recipe(recipe, overrides or [], display, run_id, allow_changed or [], composed=composed)
    _finish(work, display, json)


def drive(
    lock: Annotated[Path, typer.Argument(help="the run's recipe.lock.yaml")],
    into: Annotated[
        Path | None, typer.Option(metavar="RUNDIR", help="the run's directory; default: that of the lock")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Drive an attempt of a run that a launcher has set up (internal).

    In a job on a Ray cluster (ROLLHOOK_JOB_DIR and RAY_ADDRESS are set) it joins that, and makes the run's
    directory where the submitter did not see it. SIGINT ends after the step under way, SIGTERM at once.
    """
    from rollhook.rundir import RunDir
    from rollhook.runtime.drive import settle, wanted_attempt
    from rollhook.runtime.launch import drive_run
    from rollhook.runtime.progress import Display

    display = Display()
    found = RunDir.find(lock.resolve().parent) if into is None else settle(lock, into)
    _finish(drive_run(found, display, wanted_attempt()), display, json)


def _finish(work: Coroutine[None, None, RunResult], display: Display, as_json: bool) -> NoReturn:
    """Do the work, show its summary and exit with its status."""
    from rollhook.runtime.progress import summaries

    display.take_logs()
    try:
        result = asyncio.run(work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        display.say("Stopped.")
        raise typer.Exit(EXIT["stopped"]) from None
    for table in summaries(result.evaluations):
        display.console.print(table)
    for name, text in result.notes.items():
        display.say(f"{name}: {text}")
    display.say(f"Run {result.run_id} {result.status} after {result.steps} steps, {result.seconds:.0f} s.")
    if as_json:
        import orjson

        shown = {name: getattr(result, name) for name in ("run_id", "status", "checkpoint", "metrics")}
        typer.echo(orjson.dumps(shown).decode())
    raise typer.Exit(EXIT[result.status])


def _submit(
    work: Coroutine[None, None, Submitted],
    display: Display,
    detach: bool,
    timeout: float | None,
    as_json: bool,
) -> NoReturn:
    """Submit the job, and watch it to its end unless it is detached; exit as it ended."""
    from rollhook.cli.watching import watch_job
    from rollhook.runtime.job_records import find_record

    display.take_logs()
    done = asyncio.run(work)
    record = find_record(done.run, done.attempt)
    display.say(f"Run {record.run_id} is job {record.job_id} of launcher {record.launcher}.")
    if not detach:
        raise typer.Exit(watch_job(done.run, record, done.launcher, display.say, timeout, as_json))
    display.say(f"`rollhook jobs status|logs|stop {record.run_id}` are for it.")
    if as_json:
        import orjson

        shown = {name: getattr(record, name) for name in ("run_id", "attempt", "job_id", "launcher")}
        typer.echo(orjson.dumps(shown | {"directory": done.handle.directory}).decode())
    raise typer.Exit(0)


def _no_timeout(timeout: float | None) -> None:
    from rollhook.errors import UsageError

    if timeout is not None:
        raise UsageError("--timeout is for jobs, and this process drives the run; leave it out")
