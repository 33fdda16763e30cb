"""`rollhook run` and `rollhook drive`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine

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
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="what may differ from a lock, or all; repeatable"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Run a recipe or a lock on this machine, and the recipes that it needs before it.

    Stop with Ctrl-C: once ends after the step under way, twice ends at once. `--resume RUN` goes on from the
    newest committed step of a run that was stopped or died.
    """
    from rollhook.errors import UsageError
    from rollhook.rundir import RunDir
    from rollhook.runtime.launch import drive_run, run_recipe
    from rollhook.runtime.progress import Display

    display = Display()
    if resume is not None:
        if recipe is not None or run_id is not None or allow_changed:
            raise UsageError("--resume takes the recipe and the id of the run; give nothing beside it")
        _finish(drive_run(RunDir.find(resume), display), display, json)
    if recipe is None:
        raise UsageError("say which recipe to run, e.g. `rollhook run quickstart`, or --resume RUN")
    work = run_recipe(recipe, overrides or [], display, run_id, allow_changed or [])
    _finish(work, display, json)


def drive(
    lock: Annotated[Path, typer.Argument(help="recipe.lock.yaml inside a run's directory")],
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Drive the next attempt of a run that a launcher has set up (internal)."""
    from rollhook.rundir import RunDir
    from rollhook.runtime.launch import drive_run
    from rollhook.runtime.progress import Display

    display = Display()
    _finish(drive_run(RunDir.find(lock.resolve().parent), display), display, json)


def _finish(work: Coroutine[None, None, RunResult], display: Display, as_json: bool) -> None:
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
