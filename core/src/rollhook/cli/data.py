"""`rollhook data`: write generated packs."""

from __future__ import annotations

from typing import Annotated

import typer

from rollhook.cli.keys import parse_keys

app = typer.Typer(
    help="Prepare data that recipes use.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def data() -> None:
    """Prepare data that recipes use."""


@app.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(metavar="PACK", help="a pack, as `rollhook plugins` lists it")],
    keys: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the pack; repeatable")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")] = False,
) -> None:
    """Write a pack to the user's cache, unless it is there, and print its directory."""
    import time

    from rollhook import packs, plugins

    name = name.removeprefix("pack.")
    loaded = plugins.load([("pack", name)])
    started = time.monotonic()
    pack = packs.build(name, parse_keys(keys), loaded)
    there = (packs.packs_directory() / pack.digest()).is_dir()
    directory = packs.ensure(pack, name=name)
    seconds = time.monotonic() - started
    if json:
        import orjson

        row = {"pack": name, "path": str(directory), "written": not there, "seconds": round(seconds, 2)}
        typer.echo(orjson.dumps(row).decode())
        return
    typer.echo(f"{name} was there" if there else f"{name} written in {seconds:.1f} s", err=True)
    typer.echo(str(directory))
