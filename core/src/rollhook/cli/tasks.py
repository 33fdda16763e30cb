"""`rollhook tasks`: look at an environment's tasks, and prove them without a model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.attempts import begin, ending
from rollhook.cli.keys import parse_keys
from rollhook.terminal import one_line

if TYPE_CHECKING:
    from rollhook.environment import Environment, Task
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import Attempt
    from rollhook.runtime.oracle import Results, TaskProof
    from rollhook.runtime.progress import Display
    from rollhook.runtime.task_diff import Difference
    from rollhook.runtime.task_health import Results as Examined
    from rollhook.runtime.task_health import TaskHealth
    from rollhook.runtime.task_runs import Choose

app = typer.Typer(
    help="Look at tasks, and prove that they can be solved and are not solved already.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Source = Annotated[
    str, typer.Argument(metavar="PACK", help="a pack, a directory of tasks, or an environment")
]
Keys = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the environment; repeatable")
]
Reader = Annotated[str, typer.Option("--environment", help="environment that reads packs and directories")]
Split = Annotated[str | None, typer.Option(help="only this split")]
Only = Annotated[list[str] | None, typer.Option("--task", help="ids or patterns; repeatable")]
_BACKEND = (
    "sandbox backend by name, or {use: NAME, key: value}, or none; default: local where it is installed"
)
Sandbox = Annotated[str | None, typer.Option(help=_BACKEND)]
Concurrency = Annotated[int, typer.Option(min=1, help="tasks at once")]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="go on with this run")]
RunId = Annotated[str | None, typer.Option(help="id of the new run")]
Root = Annotated[str, typer.Option(help="directory of run directories")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object per line on stdout")]


@app.command("list")
def list_tasks(
    pack: Source,
    split: Split = None,
    keys: Keys = None,
    environment: Reader = "tbench2",
    json: Json = False,
) -> None:
    """List the tasks, and why some of them cannot run."""
    tasks = _tasks(_recipe(pack, environment, keys), split)
    for task in tasks:
        if json:
            typer.echo(_json(_plain(task)))
        else:
            what = f"PROBLEM: {task.problem}".replace("\n", "; ") if task.problem else task.family
            typer.echo(one_line(f"{task.id}  {task.digest[:12]}  {task.split}  {what}"))
    broken = sum(task.problem is not None for task in tasks)
    typer.echo(f"{len(tasks)} tasks, {broken} with problems", err=True)
    raise typer.Exit(1 if broken else 0)


@app.command("show")
def show_task(
    pack: Source,
    task: Annotated[str, typer.Argument(help="a task's id")],
    keys: Keys = None,
    environment: Reader = "tbench2",
) -> None:
    """Show one task with everything that was read of it, as JSON."""
    from rollhook.errors import UsageError
    from rollhook.installed import nearest

    tasks = {each.id: each for each in _tasks(_recipe(pack, environment, keys), None)}
    if task not in tasks:
        near = nearest(task, tasks)
        raise UsageError(f"there is no task {task!r}" + (f", did you mean {near!r}?" if near else ""))
    typer.echo(_json({**_plain(tasks[task]), "payload": tasks[task].payload}, indent=True))


@app.command("oracle")
def oracle(  # noqa: PLR0913, PLR0917 - the options of a command
    pack: Source,
    split: Split = None,
    only: Only = None,
    sandbox: Sandbox = None,
    concurrency: Concurrency = 8,
    out: Annotated[Path | None, typer.Option(help="JSONL file; default: oracle.jsonl of the run")] = None,
    resume: Resume = None,
    run_id: RunId = None,
    root: Root = "./runs",
    keys: Keys = None,
    environment: Reader = "tbench2",
    json: Json = False,
) -> None:
    """Run each task's solution, which must score 1, and an agent that does nothing, which must score less.

    Prints [1|0|ERR] for both per task. Rows go to a JSONL file; with the same file, or --resume, tasks
    that have a row for their very content are not run again. Exit code 0 when every task is as it must be.
    """
    from rollhook.runtime.oracle import RESULTS, Results
    from rollhook.runtime.progress import Display
    from rollhook.runtime.task_runs import proof_recipe, sandbox_source, task_source

    display = Display()
    source = task_source(pack, environment, parse_keys(keys))
    recipe = proof_recipe(source, sandbox_source(sandbox))
    attempt = begin("tasks oracle", root, f"oracle-{Path(pack).name}", run_id, resume)
    with (
        ending(attempt, display, f"go on with --resume {attempt.run.run_id}"),
        closing(Results(out or attempt.run.path / RESULTS)) as results,
    ):
        proven = asyncio.run(_prove(recipe, attempt, results, split, only, concurrency, display))
    for row in proven if json else []:
        typer.echo(_json(dataclasses.asdict(row)))
    good = sum(row.ok for row in proven)
    errors = sum(not row.final for row in proven)
    display.say(f"{good} of {len(proven)} tasks are as they must be ({errors} errors); rows: {results.path}")
    raise typer.Exit(0 if good == len(proven) else 1)


async def _prove(
    recipe: Recipe,
    attempt: Attempt,
    results: Results,
    split: str | None,
    only: Sequence[str] | None,
    concurrency: int,
    display: Display,
) -> list[TaskProof]:
    from rollhook.runtime.oracle import Proofs
    from rollhook.runtime.stopping import stopping
    from rollhook.runtime.task_runs import load_parts

    parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number)
    with stopping(display):
        async with Proofs(parts, attempt, _choice(split, only)) as proofs:
            tasks = proofs.tasks
            todo = results.todo(tasks)
            if len(todo) < len(tasks):
                display.say(f"{len(tasks) - len(todo)} tasks have been proven before and are not run again")
            display.begin("oracle and nop", len(todo))

            def finished(row: TaskProof) -> None:
                results.add(row)
                display.advance()
                display.say(f"[{row.oracle}|{row.nop}] {row.task_id}" + (f"  {row.why}" if row.why else ""))

            await proofs.run(todo, concurrency, finished)
            display.end()
    return [results.kept[task.id] for task in tasks]


@app.command("doctor")
def doctor(  # noqa: PLR0913, PLR0917 - the options of a command
    pack: Source,
    split: Split = None,
    only: Only = None,
    sandbox: Sandbox = None,
    repeat: Annotated[int, typer.Option(min=1, help="tries of the solution, and of nothing, per task")] = 3,
    concurrency: Concurrency = 8,
    out: Annotated[Path | None, typer.Option(help="JSONL file; default: doctor.jsonl of the run")] = None,
    resume: Resume = None,
    run_id: RunId = None,
    root: Root = "./runs",
    keys: Keys = None,
    environment: Reader = "tbench2",
    json: Json = False,
) -> None:
    """Examine tasks: files, solution, nothing, flakes over several tries, rewards, leaks of hidden files.

    One row a task: ok or BAD, what solution and nothing scored at each try (? where there was no verdict),
    and all that is wrong. Rows go to a JSONL file; with the same file, or --resume, tasks that have a row
    of as many tries for their very content are not run again. Exit code 0 when nothing is wrong.
    """
    from rollhook.runtime.progress import Display
    from rollhook.runtime.task_health import RESULTS, Results
    from rollhook.runtime.task_runs import proof_recipe, sandbox_source, task_source

    display = Display()
    recipe = proof_recipe(task_source(pack, environment, parse_keys(keys)), sandbox_source(sandbox))
    attempt = begin("tasks doctor", root, f"doctor-{Path(pack).name}", run_id, resume)
    with (
        ending(attempt, display, f"go on with --resume {attempt.run.run_id}"),
        closing(Results(out or attempt.run.path / RESULTS)) as results,
    ):
        rows = asyncio.run(_examine(recipe, attempt, results, split, only, repeat, concurrency, display))
    for row in rows if json else []:
        typer.echo(_json(dataclasses.asdict(row)))
    good = sum(row.ok for row in rows)
    display.say(f"{good} of {len(rows)} tasks are in order; rows: {results.path}")
    raise typer.Exit(0 if good == len(rows) else 1)


async def _examine(
    recipe: Recipe,
    attempt: Attempt,
    results: Examined,
    split: str | None,
    only: Sequence[str] | None,
    repeat: int,
    concurrency: int,
    display: Display,
) -> list[TaskHealth]:
    from rollhook.runtime.stopping import stopping
    from rollhook.runtime.task_health import Examination
    from rollhook.runtime.task_runs import load_parts

    def scores(rewards: Sequence[float | None]) -> str:
        return ",".join("?" if reward is None else f"{reward:g}" for reward in rewards) or "?"

    parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number)
    with stopping(display):
        async with Examination(parts, attempt, repeat, _choice(split, only)) as examination:
            tasks = examination.tasks
            todo = results.todo(tasks, repeat)
            if len(todo) < len(tasks):
                display.say(f"{len(tasks) - len(todo)} tasks have been examined before and are not run again")
            display.begin("doctor", len(todo))

            def finished(row: TaskHealth) -> None:
                results.add(row)
                display.advance()
                head = f"{'ok ' if row.ok else 'BAD'} {row.task_id}"
                said = f"  solution {scores(row.oracle)}  nothing {scores(row.nop)}  {row.why}"
                display.say((head + said).rstrip())

            await examination.run(todo, concurrency, finished)
            display.end()
    return [results.kept[task.id] for task in tasks]


@app.command("diff")
def diff(
    pack: Source,
    sandbox: Annotated[
        list[str], typer.Option(help="sandbox backend by name, or {use: NAME, key: value}; give two")
    ],
    split: Split = None,
    only: Only = None,
    concurrency: Concurrency = 4,
    run_id: RunId = None,
    root: Root = "./runs",
    keys: Keys = None,
    environment: Reader = "tbench2",
    json: Json = False,
) -> None:
    """Run the solutions on two sandbox backends, and show what differs that is not the task's doing.

    Compared are rewards and exit codes, user, locale, umask, environment variables, limits, network, places
    and versions of common programs. Exit code 0 when all verdicts agree.
    """
    from rollhook.errors import UsageError
    from rollhook.runtime.progress import Display

    if len(sandbox) != 2:
        raise UsageError(f"give --sandbox twice, to compare two backends; here it is {len(sandbox)} times")
    display = Display()
    attempt = begin("tasks diff", root, f"diff-{Path(pack).name}", run_id)
    with ending(attempt, display):
        rows, names, count = asyncio.run(
            _compare(pack, environment, keys, sandbox, attempt, split, only, concurrency, display)
        )
    if json:
        for row in rows:
            typer.echo(_json(dataclasses.asdict(row)))
    elif rows:
        _print_differences(rows, names, count)
    verdicts = {task for row in rows if row.topic == "verdict" for task in row.tasks}
    display.say(f"{count - len(verdicts)} of {count} verdicts agree; {len(rows)} differences")
    raise typer.Exit(1 if verdicts else 0)


async def _compare(
    pack: str,
    environment: str,
    keys: Sequence[str] | None,
    sandboxes: Sequence[str],
    attempt: Attempt,
    split: str | None,
    only: Sequence[str] | None,
    concurrency: int,
    display: Display,
) -> tuple[list[Difference], list[str], int]:
    from contextlib import AsyncExitStack

    from rollhook.runtime.stopping import stopping
    from rollhook.runtime.task_diff import Side, compare
    from rollhook.runtime.task_runs import load_parts, proof_recipe, sandbox_source, task_source

    source = task_source(pack, environment, parse_keys(keys))
    with stopping(display):
        async with AsyncExitStack() as stack:
            sides, names = [], []
            for letter, text in zip("AB", sandboxes, strict=True):
                backend = sandbox_source(text)
                names.append(f"{letter}: {backend['use'] if backend else 'none'}")
                recipe = proof_recipe(source, backend)
                parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number, ())
                side = Side(parts, attempt, f"probe-{letter}", _choice(split, only))
                sides.append(await stack.enter_async_context(side))
            tasks = sides[0].tasks
            broken = [task for task in tasks if task.problem is not None]
            if broken:
                display.say(f"{len(broken)} tasks cannot run and are left out, e.g. {broken[0].id}")
            todo = [task for task in tasks if task.problem is None]
            display.begin("diff", len(todo))

            def finished(task: Task, same: bool) -> None:
                display.advance()
                display.say(f"{'same' if same else 'DIFFERS'} {task.id}")

            rows = await compare(sides[0], sides[1], todo, concurrency, finished)
            display.end()
    return rows, names, len(todo)


def _print_differences(rows: Sequence[Difference], names: Sequence[str], count: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", *(escape(one_line(name)) for name in names), "tasks")
    for row in rows:
        where = "all" if len(row.tasks) == count else ", ".join(row.tasks[:3])
        more = f" and {len(row.tasks) - 3} more" if len(row.tasks) > 3 and where != "all" else ""
        cells = (row.topic, row.name, row.first, row.second, where + more)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    Console().print(table)


def _choice(split: str | None, only: Sequence[str] | None) -> Choose:
    from rollhook.errors import UsageError
    from rollhook.installed import nearest

    def choose(environment: Environment) -> list[Task]:
        tasks = environment.tasks(split)
        chosen = [t for t in tasks if not only or any(fnmatchcase(t.id, pattern) for pattern in only)]
        if not chosen:
            near = nearest(only[0], [task.id for task in tasks]) if only else ""
            meant = f", did you mean {near!r}?" if near else ""
            raise UsageError(f"no task matches {', '.join(only)}{meant}" if only else "there are no tasks")
        return chosen

    return choose


def _recipe(pack: str, environment: str, keys: Sequence[str] | None) -> Recipe:
    from rollhook.runtime.task_runs import proof_recipe, task_source

    return proof_recipe(task_source(pack, environment, parse_keys(keys)), None)


def _tasks(recipe: Recipe, split: str | None) -> Sequence[Task]:
    from rollhook.packs import packs_directory
    from rollhook.runtime.task_runs import build_environment, load_parts

    environment: Environment = build_environment(load_parts(recipe, packs_directory()))
    return environment.tasks(split)


def _plain(task: Task) -> dict[str, Any]:
    names = ("id", "digest", "split", "family", "limits", "problem")
    return {name: getattr(task, name) for name in names}


def _json(value: Any, indent: bool = False) -> str:
    import orjson
    from pydantic import BaseModel

    def default(item: Any) -> Any:
        return item.model_dump() if isinstance(item, BaseModel) else str(item)

    return orjson.dumps(value, default=default, option=orjson.OPT_INDENT_2 if indent else None).decode()
