"""`rollhook replay`."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.attempts import begin, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollhook.rundir import Attempt, RunDir
    from rollhook.runtime.parts import Parts
    from rollhook.runtime.progress import Display
    from rollhook.runtime.replay import Replay, ReplayedStep

LOSS = "train/loss"
#: another machine or number of threads adds up float32 in another order
TOLERANCE = 1e-6


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or directory")],
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="these steps, counted from 1; default: all")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="relative difference of a number that still counts as the same")
    ] = TOLERANCE,
    run_id: Annotated[str | None, typer.Option(help="id of the replay; default: from the run's")] = None,
    root: Annotated[str, typer.Option(help="directory of run directories")] = "./runs",
    json: Annotated[bool, typer.Option("--json", help="print the steps as JSON on stdout")] = False,
) -> None:
    """Train again on the groups that a run recorded, without engine and sandboxes, and compare the losses.

    Starts from the run's first weights, or with --steps from the checkpoint before. Exit code 0 when every
    number of the trainer is the recorded one. The run itself is only read; rows go to replay.jsonl of a run
    directory of the replay's own.
    """
    from rollhook import plugins
    from rollhook.rundir import RunDir
    from rollhook.runtime.parts import Parts
    from rollhook.runtime.progress import Display
    from rollhook.runtime.recorded import recorded_recipe, step_range
    from rollhook.runtime.replay import Replay
    from rollhook.runtime.training import trainer_use

    recorded = RunDir.find(run)
    recipe = recorded_recipe(recorded, "trainer", "model", "checkpoint")
    parts = Parts(recipe, plugins.load([]), Path(root), recorded.run_id, 0)
    parts.plugins.add([("trainer", trainer_use(parts).use)])
    work = Replay(recorded, parts)
    first, last = step_range(steps, work.steps)
    work.checkpoint(first)  # says now, before anything starts, what is not there
    display = Display()
    attempt = begin("replay", root, f"replay-{recorded.run_id}", run_id)
    done = _run(work, parts, attempt, (first, last, tolerance), display)
    _show(recorded, attempt, done, tolerance, display, json)
    raise typer.Exit(1 if any(step.differs for step in done) else 0)


def _run(
    work: Replay, parts: Parts, attempt: Attempt, how: tuple[int, int, float], display: Display
) -> list[ReplayedStep]:
    from rollhook.runtime.replay import RESULTS, ReplayedStep
    from rollhook.runtime.rows import Rows

    path, key = attempt.run.path / RESULTS, attrgetter("step")
    with ending(attempt, display), closing(Rows(path, ReplayedStep, key=key, keep=bool)) as rows:

        def finished(step: ReplayedStep) -> None:
            rows.add(step)
            display.advance()

        asyncio.run(_train(work, parts, attempt, how, display, finished))
    return list(rows.kept.values())


async def _train(
    work: Replay,
    parts: Parts,
    attempt: Attempt,
    how: tuple[int, int, float],
    display: Display,
    finished: Callable[[ReplayedStep], None],
) -> None:
    from rollhook.runtime.launch import own_cluster
    from rollhook.runtime.training import Training

    first, last, tolerance = how
    async with own_cluster(attempt.path, display) as (cluster, stop):
        training = Training(parts, cluster, attempt.path)
        display.begin("replay", last - first + 1)
        try:
            await work.run(training, first, last, tolerance, finished, stop.drain)
        finally:
            display.end()
            await training.stop()
        if stop.drain.is_set():
            raise asyncio.CancelledError


def _show(
    recorded: RunDir,
    attempt: Attempt,
    done: Sequence[ReplayedStep],
    tolerance: float,
    display: Display,
    as_json: bool,
) -> None:
    from rollhook.cli import output

    differ = [step for step in done if step.differs]
    if as_json:
        output.as_json(
            {
                "schema": 1,
                "run_id": recorded.run_id,
                "replay_id": attempt.run.run_id,
                "tolerance": tolerance,
                "same": not differ,
                "steps": [dataclasses.asdict(step) for step in done],
            }
        )
    else:
        head = ("step", "groups", "recorded loss", "replayed loss", "difference", "differs in")
        output.table([head, *map(_cells, done)])
    display.say(_summary(done, differ, tolerance))


def _summary(done: Sequence[ReplayedStep], differ: Sequence[ReplayedStep], tolerance: float) -> str:
    compared = sum(bool(step.recorded) for step in done)
    idle = sum(not step.recorded and not step.replayed for step in done)
    parts = [f"{compared - len(differ)} of {compared} steps gave the recorded numbers, within {tolerance:g}"]
    if differ:
        parts.append(f"the first that did not is step {differ[0].step}")
    if idle:
        parts.append(f"{idle} trained nothing")
    if rowless := len(done) - compared - idle:
        parts.append(f"the run left no numbers of {rowless}")
    return "; ".join(parts)


def _cells(step: ReplayedStep) -> tuple[str, ...]:
    one, other = step.recorded.get(LOSS), step.replayed.get(LOSS)
    difference = f"{other - one:.3g}" if one is not None and other is not None else "-"
    names = ", ".join(name.removeprefix("train/") for name in step.differs)
    return (str(step.step), str(step.groups), _number(one), _number(other), difference, names)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.9g}"
