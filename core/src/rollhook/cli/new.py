"""`rollhook new`: writes a package with one plugin, to be finished by its author."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Scaffold(StrEnum):
    """What can be written."""

    SANDBOX = "sandbox"
    ENVIRONMENT = "environment"
    AGENT = "agent"
    ROUTER_POLICY = "router-policy"
    LAUNCHER = "launcher"
    TRACKER = "tracker"


def new(
    kind: Annotated[Scaffold, typer.Argument(help="what the package supplies")],
    name: Annotated[str, typer.Argument(help="the name that recipes will use, e.g. riddles")],
    distribution: Annotated[
        str | None, typer.Option(help="name of the package for pip; default: rollhook-NAME")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="where to write it; must not exist or be empty. Default: ./DISTRIBUTION"),
    ] = None,
) -> None:
    """Write a package with one plugin: it installs, is listed, and its contract says what is left to write.

    Examples:

      rollhook new environment riddles

      rollhook new sandbox cells --distribution acme-cells --directory ~/src/cells
    """
    from rollhook.scaffold import write

    made = write(kind.value, name, distribution=distribution, directory=directory)
    typer.echo(f"Written to {made}:", err=True)
    for path in sorted(each for each in made.rglob("*") if each.is_file()):
        typer.echo(f"  {path.relative_to(made)}", err=True)
    typer.echo(
        f"\nNext:\n  cd {made}\n  pip install -e '.[test]'\n  python -m pytest\n"
        "Each failure of the contract says what to write and where.",
        err=True,
    )
    typer.echo(str(made))
