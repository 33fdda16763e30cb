"""`rollhook debug`: one archive with what helps to find a fault of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollhook.cli.recipe import Json
from rollhook.terminal import one_line


def debug(
    run: Annotated[str, typer.Argument(help="id of a run, or the path of its directory")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: RUN-debug.tar.gz here")
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask/--no-ask", help="ask the scheduler and Ray how things stand now")
    ] = True,
    json: Json = False,
) -> None:
    """Pack recipe, lock, records, logs, journals and debug files of a run, secrets masked.

    The episodes' messages, tokens and checkpoints stay out; long files keep their end.
    """
    import asyncio

    from rollhook.cli.output import as_json
    from rollhook.rundir import RunDir
    from rollhook.runtime.debug_bundle import collect_now, write_bundle

    found = RunDir.find(run)
    if ask and (trouble := asyncio.run(collect_now(found))):
        typer.echo(one_line(trouble), err=True)
    target = output if output is not None else Path(f"{found.run_id}-debug.tar.gz")
    names = write_bundle(found, target)
    if json:
        as_json({"run_id": found.run_id, "bundle": str(target), "files": names})
    else:
        typer.echo(f"{len(names)} files in {target}; look at it before you send it to anyone.")
