"""`rollhook sandboxes`: what the providers hold for runs, and deleting what no run uses any more."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.keys import parse_keys
from rollhook.cli.output import as_json, table

if TYPE_CHECKING:
    from rollhook.recipe.schema import SandboxUse
    from rollhook.rundir import RunDir
    from rollhook.sandbox.backend import SandboxBackend
    from rollhook.sandbox.reap import Finding

app = typer.Typer(
    help="List the sandboxes of runs, and delete those that no run uses any more.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

HEADER = ("BACKEND", "SANDBOX", "RUN", "EPISODE", "EXPIRES", "MAY BE REAPED")

Runs = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN]...", help="ids or paths; default: all runs known here")
]
Backend = Annotated[
    str | None, typer.Option(help="ask this sandbox backend instead of those that the runs name")
]
Keys = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of --backend; repeatable")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout")]


@app.command("list")
def list_sandboxes(runs: Runs = None, backend: Backend = None, keys: Keys = None, json: Json = False) -> None:
    """List sandboxes that carry a lease, whose they are, and whether they may be reaped."""
    from rollhook.sandbox.reap import survey

    chosen = _runs(runs)
    found: list[tuple[str, Finding]] = []

    async def look(name: str, made: SandboxBackend) -> None:
        for labels in _labels(runs, chosen):
            found.extend((name, finding) for finding in await survey(made, labels=labels))

    _with_backends(_backends(chosen, backend, keys), look)
    without = _open_leases(chosen) - {finding.lease.nonce for _, finding in found}
    if json:
        facts = [{"backend": name, **dataclasses.asdict(finding)} for name, finding in found]
        as_json({"sandboxes": facts, "open_leases_without_a_sandbox": sorted(without)})
        return
    now = time.time()
    rows = [_row(name, finding, now) for name, finding in found]
    table([HEADER, *rows] if rows else [])
    typer.echo(f"{len(found)} sandboxes; {len(without)} open leases have none", err=True)


@app.command("reap")
def reap_sandboxes(runs: Runs = None, backend: Backend = None, keys: Keys = None, json: Json = False) -> None:
    """Delete sandboxes whose attempt is over; exit code 1 when one could not be deleted.

    Where a run's journal cannot be read here, its sandboxes are deleted only after their leases expire.
    """
    from rollhook.sandbox.reap import ReapReport, reap

    chosen = _runs(runs)
    total = ReapReport()

    async def sweep(name: str, made: SandboxBackend) -> None:
        for labels in _labels(runs, chosen):
            report = await reap(made, labels=labels)
            for field in dataclasses.fields(report):
                getattr(total, field.name).update(getattr(report, field.name))

    _with_backends(_backends(chosen, backend, keys), sweep)
    if json:
        as_json(dataclasses.asdict(total))
    else:
        table([("deleted", *each) for each in total.deleted.items()])
        table([("kept", *each) for each in total.kept.items()])
        table([("FAILED", *each) for each in total.failed.items()])
        typer.echo(
            f"{len(total.deleted)} deleted, {len(total.kept)} kept, {len(total.failed)} failed", err=True
        )
    raise typer.Exit(1 if total.failed else 0)


def _runs(references: Sequence[str] | None) -> list[RunDir]:
    from rollhook import rundir

    return [rundir.RunDir.find(each) for each in references or sorted(rundir.index())]


def _labels(references: Sequence[str] | None, runs: Sequence[RunDir]) -> list[dict[str, str]]:
    """Return what to ask a provider for: the runs that were named, else everything."""
    from rollhook.sandbox.lease import PREFIX

    return [{PREFIX + "run": run.run_id} for run in runs] if references else [{}]


def _backends(runs: Sequence[RunDir], name: str | None, keys: Sequence[str] | None) -> list[SandboxUse]:
    """Return the backends to ask, each once: the named one, else those that the runs' locks name."""
    from rollhook.errors import RollhookError
    from rollhook.recipe.load import load_recipe
    from rollhook.recipe.schema import SandboxUse

    if name is not None:
        return [SandboxUse.model_validate({"use": name, **parse_keys(keys)})]
    found: list[SandboxUse] = []
    for run in runs:
        if not run.lock_path.exists():
            continue
        try:
            use = load_recipe(run.lock_path).recipe.sandbox
        except RollhookError as error:
            typer.echo(f"run {run.run_id} is left out: {error}", err=True)
            continue
        if use is not None and all((use.use, use.keys) != (each.use, each.keys) for each in found):
            found.append(use)
    return found


def _with_backends(
    uses: Sequence[SandboxUse], work: Callable[[str, SandboxBackend], Awaitable[None]]
) -> None:
    """Build each backend, do the work with it, and release it."""
    import tempfile
    from pathlib import Path

    from rollhook import plugins
    from rollhook.recipe.schema import Recipe
    from rollhook.runtime.parts import Parts

    async def one(use: SandboxUse, scratch: str) -> None:
        loaded = plugins.load([("sandbox", use.use)])
        parts = Parts(Recipe(name="sandboxes", sandbox=use), loaded, Path(scratch), "", 0)
        backend: Any = parts.build("sandbox", use, "sandbox")
        try:
            await work(use.use, backend)
        finally:
            await backend.aclose()

    with tempfile.TemporaryDirectory(prefix="rollhook-sandboxes-") as scratch:
        for use in uses:
            asyncio.run(one(use, scratch))


def _open_leases(runs: Sequence[RunDir]) -> set[str]:
    """Return the nonces of the leases that are open in these runs' journals."""
    from rollhook import journal
    from rollhook.errors import RunError
    from rollhook.sandbox.lease import leases

    found: set[str] = set()
    for attempt in (attempt for run in runs for attempt in run.attempts()):
        try:
            states = leases(journal.read(attempt.journal_path))
        except RunError as error:
            typer.echo(f"its leases are not all known: {error}", err=True)
            continue
        found |= {nonce for nonce, state in states.items() if state.open}
    return found


def _row(name: str, finding: Finding, now: float) -> tuple[str, ...]:
    lease = finding.lease
    return (
        name,
        finding.sandbox.id,
        f"{lease.run_id}/{lease.attempt}",
        lease.episode or "-",
        f"{lease.expiry - now:.0f} s",
        f"{'yes' if finding.reap else 'no'}: {finding.reason}",
    )
