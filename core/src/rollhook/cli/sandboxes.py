"""`rollhook sandboxes`: what providers hold for runs, deleting what no run uses any more, baking ahead."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
    help="List the sandboxes of runs, delete those that no run uses any more, make images ahead.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

HEADER = ("BACKEND", "SANDBOX", "RUN", "EPISODE", "AGE", "COST", "EXPIRES", "MAY BE REAPED")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Runs = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN]...", help="ids or paths; default: all runs known here")
]
Backend = Annotated[
    str | None, typer.Option(help="ask this sandbox backend instead of those that the runs name")
]
Keys = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of --backend; repeatable")
]
OneLease = Annotated[
    str | None, typer.Option("--lease", metavar="NONCE", help="only the sandbox of this lease")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="only sandboxes that carry this label; repeatable"),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="only sandboxes of this age, e.g. 90s, 30m, 2h, 1d; not those of unknown age",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be deleted, and delete nothing")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout")]


@app.command("list")
def list_sandboxes(
    runs: Runs = None,
    backend: Backend = None,
    keys: Keys = None,
    lease: OneLease = None,
    label: Labels = None,
    older_than: OlderThan = None,
    json: Json = False,
) -> None:
    """List sandboxes that carry a lease, whose they are, and whether they may be reaped."""
    from rollhook.sandbox.reap import survey

    chosen = _runs(runs)
    wanted, age = _labels(lease, label), _age(older_than)
    seen: dict[tuple[str, str], tuple[str, Finding]] = {}

    async def look(name: str, made: SandboxBackend) -> None:
        for labels in _each(runs, chosen, wanted):
            for each in await survey(made, labels=labels, older_than=age):
                # runs reach one account by several backends, such as one that wraps another
                seen.setdefault((made.account or name, each.sandbox.id), (name, each))

    code = _with_backends(_backends(chosen, backend, keys), look)
    found = list(seen.values())
    without = (
        []
        if wanted or older_than
        else list(_without_sandbox(chosen, {each.lease.nonce for _, each in found}))
    )
    if json:
        facts = [
            {"backend": name, **dataclasses.asdict(finding), "cost": finding.cost} for name, finding in found
        ]
        as_json({"sandboxes": facts, "open_leases_without_a_sandbox": without})
        raise typer.Exit(code)
    now = time.time()
    rows = [_row(name, finding, now) for name, finding in found]
    table([HEADER, *rows] if rows else [])
    typer.echo(f"{len(found)} sandboxes{_bill([finding for _, finding in found])}", err=True)
    _tell_open_leases(without)
    raise typer.Exit(code)


@app.command("reap")
def reap_sandboxes(
    runs: Runs = None,
    backend: Backend = None,
    keys: Keys = None,
    lease: OneLease = None,
    label: Labels = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Delete sandboxes whose attempt is over.

    Exit code 1 when one could not be deleted, or a backend could not be asked.
    The provider is asked twice, and what was found both times is deleted. Where a run's journal cannot be
    read here, its sandboxes are deleted only after their leases expire.
    """
    from rollhook.sandbox.reap import ReapReport, reap

    chosen = _runs(runs)
    wanted, age = _labels(lease, label), _age(older_than)
    total = ReapReport()

    async def sweep(name: str, made: SandboxBackend) -> None:
        for labels in _each(runs, chosen, wanted):
            report = await reap(made, labels=labels, older_than=age, dry_run=dry_run)
            for field in dataclasses.fields(report):
                getattr(total, field.name).update(getattr(report, field.name))

    code = _with_backends(_backends(chosen, backend, keys), sweep)
    deleted = "would be deleted" if dry_run else "deleted"
    if json:
        found = dataclasses.asdict(total)
        as_json({deleted.replace(" ", "_"): found.pop("deleted"), **found})
    else:
        table([(deleted, *each) for each in total.deleted.items()])
        table([("kept", *each) for each in total.kept.items()])
        table([("FAILED", *each) for each in total.failed.items()])
        counts = f"{len(total.deleted)} {deleted}, {len(total.kept)} kept, {len(total.failed)} failed"
        typer.echo(counts, err=True)
    raise typer.Exit(1 if total.failed else code)


@app.command("bake")
def bake_sandboxes(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PACK|RECIPE", help="a pack, a directory of tasks, an environment, or a recipe"
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="of a recipe: key.path=value, +key=value or ~key")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="sandbox backend; default: the recipe's, which a pack has not")
    ] = None,
    keys: Keys = None,
    environment: Annotated[
        str, typer.Option(help="environment that reads packs and directories")
    ] = "tbench2",
    split: Annotated[
        str | None, typer.Option(help="only this split; default: all tasks of a pack, the splits of a recipe")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--task", help="ids or patterns; repeatable")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="builds at once")] = 4,
    json: Json = False,
) -> None:
    """Make what the sandboxes of tasks need before a run waits for it: images, templates, snapshots.

    Every distinct sandbox of the tasks is baked once. What is there already is not made again, so after
    Ctrl-C or a failure the same command goes on. Exit code 1 when one failed, which does not stop the others.
    """
    from rollhook.cli.baking import bake

    use = _named(backend, keys)
    raise typer.Exit(bake(source, overrides or [], use, environment, split, only, concurrency, json))


def _runs(references: Sequence[str] | None) -> list[RunDir]:
    from rollhook import rundir

    return [rundir.RunDir.find(each) for each in references or sorted(rundir.index())]


def _labels(lease: str | None, options: Sequence[str] | None) -> dict[str, str]:
    """Return the labels that were asked for, the lease's nonce being one. Raises UsageError."""
    from rollhook.errors import UsageError
    from rollhook.sandbox.lease import PREFIX

    if lease == "":
        raise UsageError("--lease is empty: write the nonce of a lease, as the label rollhook.nonce has it")
    wanted = {PREFIX + "nonce": lease} if lease else {}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise UsageError(f"--label {option}: write KEY=VALUE, e.g. {PREFIX}episode=a1-s00000-g000-e00-t0")
        wanted[key] = value
    return wanted


def _age(text: str | None) -> float | None:
    """Return an age such as 2h in seconds. Raises UsageError."""
    from rollhook.errors import UsageError

    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise UsageError(f"--older-than {text}: write a number with its unit, e.g. 90s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def _each(
    references: Sequence[str] | None, runs: Sequence[RunDir], wanted: dict[str, str]
) -> list[dict[str, str]]:
    """Return what to ask a provider for: the wanted of the runs that were named, else of everything."""
    from rollhook.sandbox.lease import PREFIX

    return [{**wanted, PREFIX + "run": run.run_id} for run in runs] if references else [wanted]


def _backends(runs: Sequence[RunDir], name: str | None, keys: Sequence[str] | None) -> list[SandboxUse]:
    """Return the backends to ask, each once: the named one, else those that the runs' locks name."""
    from rollhook.errors import RollhookError
    from rollhook.recipe.load import load_recipe

    named = _named(name, keys)
    if named is not None:
        return [named]
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


def _named(name: str | None, keys: Sequence[str] | None) -> SandboxUse | None:
    """Return the backend that was named with its keys. Raises UsageError."""
    from rollhook.errors import UsageError
    from rollhook.recipe.problem import RecipeError
    from rollhook.recipe.schema import SandboxUse
    from rollhook.recipe.validate import validate

    if name is None:
        if keys:
            raise UsageError(f"--set {keys[0]}: is a key of --backend, which is not given")
        return None
    use, problems = validate(SandboxUse, {"use": name, **parse_keys(keys)}, "sandbox")
    if use is None:
        raise RecipeError(problems)
    return use


def _with_backends(uses: Sequence[SandboxUse], work: Callable[[str, SandboxBackend], Awaitable[None]]) -> int:
    """Build each backend, do the work with it, and release it; return the exit code.

    One that cannot be asked (no SDK, no key, no answer) is told and does not stop the others.
    """
    import tempfile
    from pathlib import Path

    from rollhook import plugins
    from rollhook.errors import RollhookError
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
        code = 0
        for use in uses:
            try:
                asyncio.run(one(use, scratch))
            except Exception as error:
                if len(uses) == 1:
                    raise
                said = error if isinstance(error, RollhookError) else f"{type(error).__name__}: {error}"
                typer.echo(f"sandbox backend {use.use} could not be asked: {said}", err=True)
                code = 1
    return code


def _without_sandbox(runs: Sequence[RunDir], nonces: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the leases that are open in these runs' journals though no sandbox has one of `nonces`."""
    from rollhook.sandbox.reap import read_leases, surely_over

    for run in runs:
        attempts = run.attempts()
        for attempt in attempts:
            over = surely_over(attempt, attempts)
            for state in read_leases(attempt).values():
                if state.open and state.nonce not in nonces:
                    whose = {"run_id": run.run_id, "attempt": attempt.number, "attempt_is_over": over}
                    yield {**dataclasses.asdict(state), **whose}


def _tell_open_leases(without: Sequence[dict[str, Any]]) -> None:
    """Say on stderr what the open leases are that have no sandbox."""
    left = [each for each in without if each["attempt_is_over"]]
    if left:
        typer.echo(
            f"{len(left)} leases were left open by attempts that are over; their sandboxes are gone, "
            "so nothing is left to delete",
            err=True,
        )
    if len(left) < len(without):
        typer.echo(
            f"{len(without) - len(left)} open leases have no sandbox now: it is being made or deleted",
            err=True,
        )


def _bill(found: Sequence[Finding]) -> str:
    """Return what they cost so far and go on to, as far as it is known; empty when of none it is."""
    priced = [(each.cost, each.price) for each in found if each.cost is not None and each.price is not None]
    if not priced:
        return ""
    unknown = f", without {len(found) - len(priced)} of unknown price" if len(priced) < len(found) else ""
    cost, hourly = sum(cost for cost, _ in priced), 3600 * sum(price for _, price in priced)
    return f", cost so far {cost:.4g}, {hourly:.4g} an hour{unknown}"


def _row(name: str, finding: Finding, now: float) -> tuple[str, ...]:
    lease = finding.lease
    return (
        name,
        finding.sandbox.id,
        f"{lease.run_id}/{lease.attempt}",
        lease.episode or "-",
        "-" if finding.age is None else f"{finding.age:.0f} s",
        "-" if finding.cost is None else f"{finding.cost:.4g}",
        f"{lease.expiry - now:.0f} s",
        f"{'yes' if finding.reap else 'no'}: {finding.reason}",
    )
