"""`rollhook report`: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[str, typer.Argument(help="id or path of a run, finished or not")],
    output: Annotated[
        Path | None, typer.Option(help="where to write the page; default: report.html in the run's directory")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print the figures instead of writing the page")
    ] = False,
) -> None:
    """Write report.html: rewards, outcomes, where the time went, tasks, the best and the worst episodes.

    The page needs no network. A run in progress or one that died works too, and the page says so.
    """
    from rollhook.cli.output import as_json
    from rollhook.rundir import RunDir
    from rollhook.runtime.figures import read_figures
    from rollhook.runtime.report import write_report
    from rollhook.runtime.vitals import state_of

    found = RunDir.find(run)
    if json:
        as_json({"state": state_of(found.newest_attempt()), **read_figures(found).data()})
        return
    typer.echo(write_report(found, output))
