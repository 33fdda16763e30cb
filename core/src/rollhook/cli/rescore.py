"""`rollhook rescore`."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from rollhook.cli.attempts import begin, ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollhook.rundir import RunDir
    from rollhook.runtime.progress import Display
    from rollhook.runtime.rescore import Choice, Rescored, Rescorer, Results

PURPOSES = ("train", "eval")


def rescore(  # noqa: PLR0913, PLR0917 - the options of a command
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or directory")],
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="what these steps took, counted from 1; default: all")
    ] = None,
    episodes: Annotated[
        list[str] | None, typer.Option("--episode", metavar="ID", help="this episode; repeatable")
    ] = None,
    purpose: Annotated[
        list[str] | None, typer.Option(help="train or eval; repeatable; default: both")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="at most so many, spread evenly over the run")
    ] = None,
    changed_tasks: Annotated[
        bool, typer.Option("--changed-tasks", help="score tasks too whose content is another now")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="episodes at once")] = 8,
    resume: Annotated[str | None, typer.Option(metavar="RESCORE", help="go on with this rescoring")] = None,
    run_id: Annotated[str | None, typer.Option(help="id of the rescoring; default: from the run's")] = None,
    root: Annotated[str, typer.Option(help="directory of run directories")] = "./runs",
    json: Annotated[bool, typer.Option("--json", help="one JSON object per episode on stdout")] = False,
) -> None:
    """Run the verifiers of a run again, without a model: the recorded commands in fresh sandboxes.

    The recipe's agent gets each recorded reply in its place. Episodes whose verifier never ran are left out;
    a task whose content is another now is named and not scored. Exit code 0 when every verdict is the
    recorded one. Rows go to rescore.jsonl of a run directory of the rescoring's own.
    """
    from rollhook import plugins
    from rollhook.errors import UsageError
    from rollhook.rundir import RunDir
    from rollhook.runtime.parts import Parts
    from rollhook.runtime.progress import Display
    from rollhook.runtime.recorded import recorded_recipe
    from rollhook.runtime.rescore import RESULTS, Rescorer, Results, choose

    if unknown := set(purpose or ()) - set(PURPOSES):
        raise UsageError(f"--purpose {min(unknown)}: write train or eval")
    recorded = RunDir.find(run)
    recipe = recorded_recipe(recorded, "environment", "agent", "sandbox")
    choice = choose(
        recorded,
        purposes=purpose or PURPOSES,
        episodes=episodes or (),
        groups=None if steps is None else _groups(recorded, steps),
        limit=limit,
    )
    display = Display()
    attempt = begin("rescore", root, f"rescore-{recorded.run_id}", run_id, resume)
    with (
        ending(attempt, display, f"go on with --resume {attempt.run.run_id}"),
        closing(Results(attempt.run.path / RESULTS, recorded)) as results,
    ):
        parts = Parts(recipe, plugins.load([]), attempt.path, attempt.run.run_id, attempt.number)
        rescorer = Rescorer(recorded, parts, attempt, changed_tasks=changed_tasks)
        asyncio.run(_rescore(rescorer, choice, results, concurrency, display))
    rows = [results.kept[each] for each in choice.episode_ids]
    _show(rows, choice, results, display, json)
    raise typer.Exit(0 if all(row.same for row in rows) else 1)


def _groups(run: RunDir, steps: str) -> set[str]:
    """Return the groups that some steps took."""
    from rollhook.runtime.lineage import Lineage
    from rollhook.runtime.recorded import step_range

    batches = Lineage.read(run).batches
    first, last = step_range(steps, max(batches, default=-1) + 1)
    taken = [batches[step] for step in range(first - 1, last) if step in batches]
    trained = {group["group_id"] for batch in taken for group in batch["groups"]}
    return trained.union(*(batch["rejected"] for batch in taken))


async def _rescore(
    rescorer: Rescorer, choice: Choice, results: Results, concurrency: int, display: Display
) -> None:
    from rollhook.runtime.stopping import stopping

    todo = [each for each in choice.episode_ids if each not in results.kept]
    if len(todo) < len(choice.episode_ids):
        display.say(
            f"{len(choice.episode_ids) - len(todo)} episodes were scored before and are not run again"
        )

    def finished(row: Rescored) -> None:
        results.add(row)
        display.advance()
        if not row.same:
            display.say(_line(row))

    with stopping(display):
        async with rescorer:
            display.begin("rescore", len(todo))
            await rescorer.run(todo, concurrency, finished)
            display.end()


def _show(
    rows: Sequence[Rescored], choice: Choice, results: Results, display: Display, as_json: bool
) -> None:
    import orjson

    from rollhook.runtime.rescore import counts

    for row in rows if as_json else []:
        typer.echo(orjson.dumps(dataclasses.asdict(row)).decode())
    found = counts(rows)
    parts = [f"{found['same']} of {len(rows)} verdicts are the recorded ones"]
    parts += [
        text
        for text in (
            f"{found['up']} went up and {found['down']} down" if found["up"] + found["down"] else "",
            f"{found['new']} that failed were given now" if found["new"] else "",
            f"{found['missing']} are missing" if found["missing"] else "",
            f"observations differ in {sum(row.observed == 'text' for row in rows)}",
            f"{choice.unverified} episodes whose verifier never ran are left out"
            if choice.unverified
            else "",
        )
        if text
    ]
    display.say("; ".join(parts) + f"; rows: {results.path}")


def _line(row: Rescored) -> str:
    old, new = (("none" if value is None else f"{value:g}") for value in (row.old, row.new))
    return f"[{old} -> {new}] {row.episode_id} of {row.task_id}" + (f"  {row.why}" if row.why else "")
