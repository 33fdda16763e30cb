"""`rollhook cluster`: bringing up and ending the clusters that a recipe's launcher keeps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.output import as_json, table
from rollhook.cli.recipe import Json, Overrides, Recipe
from rollhook.terminal import one_line

if TYPE_CHECKING:
    from rollhook.launcher import ClusterInfo, Clusters

app = typer.Typer(
    help="Bring up, end and look at the clusters that a recipe's launcher keeps.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Targets = Annotated[
    list[str] | None, typer.Option("--target", "-t", metavar="T", help="only this one; repeatable")
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it is done")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="how long to wait, then exit with 124")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done; contact nothing")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="answer every question with yes")]


@app.command("up")
def up(
    recipe: Recipe,
    overrides: Overrides = None,
    target: Targets = None,
    dry_run: DryRun = False,
    install: Annotated[
        bool, typer.Option("--install", help="install the pinned packages on each host first")
    ] = False,
    recreate: Annotated[
        bool, typer.Option("--recreate", help="replace what differs from the recipe")
    ] = False,
    wait: Wait = True,
    timeout: Timeout = 900.0,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Bring up the clusters of a recipe; one that is up already is left as it is."""
    from rollhook.launcher import ClusterOptions

    clusters, targets = _clusters(recipe, overrides, target)
    if dry_run:
        _show_plan(clusters, targets, json)
        return
    options = ClusterOptions(
        wait=wait, timeout=timeout, install=install, recreate=recreate, confirm=_confirm(yes)
    )
    _show(asyncio.run(clusters.cluster_up(targets, options, _say)), json)


@app.command("down")
def down(
    recipe: Recipe,
    overrides: Overrides = None,
    target: Targets = None,
    old: Annotated[
        bool, typer.Option("--old", help="also older deployments that are found, each after a question")
    ] = False,
    wait: Wait = True,
    timeout: Timeout = 300.0,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """End the clusters of a recipe, and nothing else. What is not there is no error."""
    from rollhook.launcher import ClusterOptions

    clusters, targets = _clusters(recipe, overrides, target)
    options = ClusterOptions(wait=wait, timeout=timeout, old=old, confirm=_confirm(yes))
    ended = list(asyncio.run(clusters.cluster_down(targets, options, _say)))
    if json:
        as_json(ended)
        return
    for line in ended or ["There was nothing to end."]:
        typer.echo(one_line(line))


@app.command("list")
def list_clusters(recipe: Recipe, overrides: Overrides = None, json: Json = False) -> None:
    """List all clusters that the recipe's launcher sees, the recipe's or not."""
    clusters, _ = _clusters(recipe, overrides, None)
    _show(asyncio.run(clusters.clusters()), json)


@app.command("status")
def status(recipe: Recipe, overrides: Overrides = None, target: Targets = None, json: Json = False) -> None:
    """Say how the recipe's clusters stand. Exit code 1 unless all are ready."""
    clusters, targets = _clusters(recipe, overrides, target)
    found = asyncio.run(clusters.cluster_status(targets))
    _show(found, json)
    raise typer.Exit(0 if all(each.state == "ready" for each in found) else 1)


@app.command("dashboard")
def dashboard(
    recipe: Recipe,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", metavar="T", help="which cluster, if there are several")
    ] = None,
    port: Annotated[int, typer.Option(help="port of this machine where it is forwarded; 0: any")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open it in a browser")] = False,
) -> None:
    """Print the address of a cluster's dashboard and keep it reachable until Ctrl-C."""
    clusters, _ = _clusters(recipe, overrides, [target] if target else None)
    asyncio.run(_dashboard(clusters, target, port, open_browser))


async def _dashboard(clusters: Clusters, target: str | None, port: int, open_browser: bool) -> None:
    async with clusters.dashboard(target, port) as url:
        typer.echo(url)
        if open_browser:
            import webbrowser

            await asyncio.to_thread(webbrowser.open, url)
        _say("Ctrl-C ends it.")
        await asyncio.Event().wait()


def _clusters(
    recipe: str, overrides: list[str] | None, targets: list[str] | None
) -> tuple[Clusters, Sequence[str]]:
    """Return the recipe's launcher, which keeps clusters, and the targets, which it has.

    Raises Unsupported for a launcher that keeps none, UsageError for a target that it does not have.
    """
    from rollhook.errors import Unsupported, UsageError
    from rollhook.launcher import Clusters
    from rollhook.recipe.check import compose
    from rollhook.runtime.native_job import Native

    native = Native.of(*compose(recipe, overrides or [], site="none"))
    launcher: Any = native.launcher
    if not isinstance(launcher, Clusters):
        raise Unsupported(
            f"launcher {native.name} keeps no clusters: one comes and goes with each of its jobs; "
            "`rollhook plugins` lists other launchers"
        )
    there = list(launcher.cluster_targets())
    for name in targets or ():
        if name not in there:
            raise UsageError(f"the recipe has no cluster {name!r}; it has {', '.join(there) or 'none'}")
    return launcher, targets or ()


def _show_plan(clusters: Clusters, targets: Sequence[str], json: bool) -> None:
    from rollhook.cli.plan import shown

    data = clusters.cluster_plan(targets).to_data()
    if json:
        as_json(data)
    else:
        for line in shown(data):
            typer.echo(line)


def _show(found: Sequence[ClusterInfo], json: bool) -> None:
    if json:
        as_json([dataclasses.asdict(each) for each in found])
    elif not found:
        _say("There is no cluster.")
    else:
        header = ("CLUSTER", "TARGET", "STATE", "NODES", "ADDRESS", "DASHBOARD", "MESSAGE")
        rows = [
            (
                each.name,
                each.target or "-",
                each.state,
                "-" if each.nodes is None else str(each.nodes),
                each.address or "-",
                each.dashboard or "-",
                each.message,
            )
            for each in found
        ]
        table([header, *rows])


def _confirm(yes: bool) -> Any:
    def ask(question: str) -> bool:
        return yes or typer.confirm(one_line(question), default=False, err=True)

    return ask


def _say(text: str) -> None:
    typer.echo(one_line(text), err=True)
