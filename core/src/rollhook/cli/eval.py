"""`rollhook eval` and `rollhook compare`: numbers about a policy, and whether two of them differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from rollhook.cli.attempts import EXIT_STOPPED
from rollhook.cli.output import as_json, table
from rollhook.terminal import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from rollhook.runtime.compare import Comparison
    from rollhook.runtime.scores import Scores


def evaluate(  # noqa: PLR0913, PLR0917 - the options of a command
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's path, or the name of a shipped one; not with --resume")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, +key=value or ~key")] = None,
    split: Annotated[str | None, typer.Option(help="split of the tasks (evaluation.split)")] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="most episodes (evaluation.episodes); default: every task")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="episodes per task (evaluation.samples)")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="temperature 0 in place of rollout.sampling.temperature")
    ] = False,
    k: Annotated[
        str | None, typer.Option("--k", help="the k of pass@k, e.g. 1,4,8; default: 1 and the samples")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="PATH|RUN", help="weights: a directory, or a run's newest checkpoint"),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="id of the new run; default: from the recipe's name")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="go on with this evaluation: run what has no verdict yet"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print evaluation.json on stdout")] = False,
) -> None:
    """Evaluate a recipe alone: episodes on its evaluation split, no training.

    What concerns training (trainer, steps, groups) is ignored, so any recipe with an environment will do.
    With an engine that asks an endpoint, such as openai, no engine is started here, nor Ray. Prints pass@k
    with 95 % confidence intervals over tasks, in all and per family, and writes evaluation.json into the
    run's directory. Ctrl-C stops in order; --resume goes on.
    """
    from rollhook.errors import UsageError
    from rollhook.runtime import eval_setup
    from rollhook.runtime.progress import Display
    from rollhook.runtime.scores import NAME
    from rollhook.runtime.standalone_eval import evaluate_run

    display = Display()
    display.take_logs()
    given = _overrides(split, episodes, samples, greedy, checkpoint)
    if (recipe is None) == (resume is None):
        raise UsageError("name a recipe to evaluate, or an evaluation to --resume, and not both")
    if resume is not None and (given or run_id):
        raise UsageError("--resume goes on as the evaluation was begun: it takes no other option but --k")
    if resume is None:
        loaded, plugins = eval_setup.checked(str(recipe), [*(overrides or []), *given])
        ks = _ks(k, loaded.recipe.evaluation.samples)
        run = eval_setup.create(loaded, plugins, run_id)
    else:
        loaded, plugins, run = eval_setup.resume(resume, display)
        ks = _ks(k, loaded.recipe.evaluation.samples)
    try:
        scores = asyncio.run(evaluate_run(loaded, plugins, run, ks, display))
    except (asyncio.CancelledError, KeyboardInterrupt):
        display.say(f"Stopped; go on with: rollhook eval --resume {run.run_id}")
        raise typer.Exit(EXIT_STOPPED) from None
    display.console.print(_scores(scores, ks))
    if errors := sum(task.errors for task in scores.tasks):
        display.say(f"{errors} episodes gave no verdict; to run these again: --resume {run.run_id}")
    display.say(f"Results: {run.path / NAME}")
    if json:
        typer.echo((run.path / NAME).read_text(), nl=False)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="run id, run directory or evaluation.json")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="another; default: the last evaluation of A against its first"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON on stdout")] = False,
) -> None:
    """Compare two evaluations over the tasks that both judged: B against A, in all and per family.

    Prints pass@1 of each and the difference, with 95 % confidence intervals, and the p-value of a paired test
    (exact sign flips over tasks; McNemar's with one sample per task), not corrected for the number of
    families. Of a run that trained, the newest evaluation counts, mode by mode. Says by name what differs
    in tasks, split, environment, agent, sampling or budgets. Exit code 0 whatever the difference.
    """
    from rollhook.runtime.compare import SCHEMA_VERSION, compare_first_and_last, compare_two

    found = compare_first_and_last(a) if b is None else compare_two(a, b)
    for each in found:
        for warning in each.warnings:
            typer.echo(f"warning: {one_line(warning)}", err=True)
    if json:
        as_json({"schema": SCHEMA_VERSION, "comparisons": [each.plain() for each in found]})
        return
    for each in found:
        typer.echo(f"A: {each.a}\nB: {each.b}\n{each.mode}, {each.tasks} tasks in common")
        table(_lines(each), indent="  ")


def _lines(comparison: Comparison) -> list[list[str]]:
    rows = [["family", "tasks", "A pass@1", "B pass@1", "B - A", "p"]]
    for line in comparison.lines:
        difference = line.difference
        numbers = [str(line.a), str(line.b), str(difference), f"{difference.p:.3g}"]
        rows.append([_named(line.family), str(difference.tasks), *numbers])
    return rows


def _scores(scores: Scores, ks: Sequence[int]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    title = f"{scores.run_id}, {scores.mode}: pass@k [95 % interval over tasks]"
    shown = Table("family", title=title, title_justify="left")
    for name in ("tasks", "episodes", "errors", *(f"pass@{k}" for k in ks)):
        shown.add_column(name, justify="right")
    for row in scores.rows(ks):
        if row.family is None:
            shown.add_section()
        estimates = [str(row.pass_at[k]) if k in row.pass_at else "too few samples" for k in ks]
        name = escape(one_line(_named(row.family)))
        shown.add_row(name, str(row.tasks), str(row.episodes), str(row.errors), *estimates)
    return shown


def _named(family: str | None) -> str:
    return "all" if family is None else family or "(none)"


def _overrides(
    split: str | None, episodes: int | None, samples: int | None, greedy: bool, checkpoint: str | None
) -> list[str]:
    """Return the options as overrides of the recipe, so that its lock has them."""
    values: dict[str, object] = {
        "evaluation.split": split,
        "evaluation.episodes": episodes,
        "evaluation.samples": samples,
        "rollout.sampling.temperature": 0 if greedy else None,
        "checkpoint.load_from": checkpoint,
    }
    return [f"{key}={dumps(value)}" for key, value in values.items() if value is not None]


def _ks(text: str | None, samples: int) -> list[int]:
    """Return the k to report. Raises UsageError for what is no list of numbers up to the samples."""
    from rollhook.errors import UsageError

    if text is None:
        return sorted({1, samples})
    try:
        ks = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise UsageError(f"--k {text}: write numbers with commas, such as 1,4,8") from None
    if ks[0] < 1 or ks[-1] > samples:
        raise UsageError(
            f"--k {text}: each must be from 1 to the samples per task, {samples}; raise --samples"
        )
    return ks
