"""`rollhook code`: snapshots of code that jobs choose by their code_path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollhook.cli.output import as_json
from rollhook_ray.snapshot import SHARED_ROOT, take

app = typer.Typer(
    help="Keep versions of code on shared storage.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def code() -> None:
    """Keep versions of code on shared storage."""


@app.command("snapshot")
def snapshot(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="the directory that holds the package")],
    code_id: Annotated[str, typer.Option("--id", metavar="ID", help="what the snapshot is called")],
    name: Annotated[str, typer.Option(help="the package or module that jobs import from it")] = "verl",
    root: Annotated[str, typer.Option(help="the shared root")] = SHARED_ROOT,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Copy a tree to ROOT/common/code/NAME/ID, once, and print that path: the code_path of a job spec."""
    taken = take(path, code_id, name=name, root=root)
    if json:
        row = {"path": str(taken.path), "id": taken.id, "digest": taken.digest}
        as_json(row | {"files": taken.files, "bytes": taken.bytes, "written": taken.written})
        return
    size = f"{taken.files} files, {taken.bytes} bytes, SHA-256 {taken.digest[:12]}"
    typer.echo(f"written: {size}" if taken.written else f"skip if exists: it is there ({size})", err=True)
    typer.echo(str(taken.path))
