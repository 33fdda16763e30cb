"""`rollhook workload`: jobs of verl on a Ray cluster, from a job spec and a base config."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollhook.cli.output import as_json
from rollhook.errors import UsageError
from rollhook_ray.snapshot import SHARED_ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollhook_ray.workload import Request
    from rollhook_ray.workload_render import Rendered

app = typer.Typer(
    help="Run verl's workloads (ppo, grpo, sft) on a Ray cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="the job spec, .yaml or .json")]
Base = Annotated[Path | None, typer.Option(metavar="BASE", help="the base config of the site")]
SiteBase = Annotated[Path, typer.Option("--base", metavar="BASE", help="the base config of the site")]
Id = Annotated[str | None, typer.Option("--id", metavar="ID", help="id of the job; default: the spec's")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]


@app.callback()
def workload() -> None:
    """Run verl's workloads (ppo, grpo, sft) on a Ray cluster."""


@app.command("submit")
def submit(
    spec: Spec,
    base: Base = None,
    submission_id: Id = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="follow the job until it has ended")] = True,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="how long to wait; the job goes on then")
    ] = None,
) -> None:
    """Submit a job; its log goes to stdout, and the exit code says how it ended."""
    from rollhook_ray.verbs.submitting import follow, submit_request

    request, rendered = _rendered(spec, base, submission_id)
    _notes(rendered)
    submitted = asyncio.run(submit_request(request, rendered))
    _say(f"submitted {request.id}; `rollhook jobs status {request.id}` says how it stands")
    if not wait:
        typer.echo(request.id)
        return
    raise typer.Exit(follow(submitted, _say, timeout))


@app.command("plan")
def plan(
    spec: Spec,
    base: Base = None,
    submission_id: Id = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="write the files there")
    ] = None,
    json: Json = False,
) -> None:
    """Print what would be submitted, or write it to a directory; nothing is contacted."""
    from rollhook_ray.verbs.submitting import planned
    from rollhook_ray.workload_artefacts import artefacts

    request, rendered = _rendered(spec, base, submission_id)
    made = planned(request, rendered)
    files = {f"config/{name}": text for name, text in artefacts(request, rendered, made).items()}
    files |= {f"attempts/1/{name}": text.encode() for name, text in made.files.items()}
    if output is not None:
        for name, content in files.items():
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if json:
        as_json(made.to_data() | {"command": list(rendered.command)})
        return
    _notes(rendered)
    typer.echo(" \\\n    ".join(rendered.command))
    if output is not None:
        _say(f"{len(files)} files written to {output}")
        return
    for name, content in files.items():
        typer.echo(f"\n# {name}\n{content.decode('utf-8', 'replace').rstrip()}")


@app.command("check")
def check(spec: Spec, base: Base = None, submission_id: Id = None, json: Json = False) -> None:
    """Look for all that would keep a job from running: shared storage, code, model, data, the cluster."""
    from rollhook_ray.verbs.submitting import nodes_of, problems_of

    request, rendered = _rendered(spec, base, submission_id)
    here, there = asyncio.run(problems_of(request, rendered))
    nodes = asyncio.run(nodes_of(rendered))
    if json:
        as_json({"problems": [*here, *there], "notes": list(rendered.notes), "nodes": nodes})
    else:
        _notes(rendered)
        for line in nodes:
            _say(line)
        _say_problems([*here, *there])
    raise typer.Exit(1 if here or there else 0)


@app.command("prepare")
def prepare(
    root: Annotated[str, typer.Option(help="the shared root")] = SHARED_ROOT,
    model: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help="a model's directory, or its id at a hub")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="what it is called; default: its last part")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train set, JSON lines of question and answer")
    ] = None,
    test_data: Annotated[Path | None, typer.Option(metavar="FILE", help="test set, the same")] = None,
    rl_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train.parquet for ppo and grpo, as it is")
    ] = None,
    sft_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train.parquet for sft, as it is")
    ] = None,
    name: Annotated[str, typer.Option(help="what the data sets are called: NAME and NAME_sft")] = "gsm8k",
) -> None:
    """Make the tree of the shared root, and bring a model and data sets there, unless they are there."""
    from rollhook_ray import prepare as made

    if data is not None and rl_data is not None and sft_data is not None:
        raise UsageError("--data makes what --rl-data and --sft-data give: leave one of them out")
    if test_data is not None and data is None:
        raise UsageError("--test-data goes with --data")
    for each in (name, model_name):
        if each is not None and (not each or "/" in each or each.startswith(".")):
            raise UsageError(f"{each!r} is no name of a directory")

    made.make_tree(root, _say)
    if model is not None:
        made.prepare_model(model, model_name or Path(model).name, root, _say)
    if rl_data is not None or data is not None:
        source = rl_data or data
        assert source is not None
        made.prepare_rl(source, test_data if rl_data is None else None, name, root, _say)
    if sft_data is not None or data is not None:
        source = sft_data or data
        assert source is not None
        made.prepare_sft(source, test_data if sft_data is None else None, f"{name}_sft", root, _say)


@app.command("up")
def up(
    base: SiteBase,
    install: Annotated[
        bool, typer.Option("--install", help="install the pinned packages on each host first")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="how long to wait")] = 900.0,
) -> None:
    """Bring up the cluster of a base config, its `cluster` section; one that is up is left as it is."""
    from rollhook.launcher import ClusterOptions
    from rollhook_ray.verbs.submitting import build_launcher
    from rollhook_ray.workload import read_base

    options = ClusterOptions(timeout=timeout, install=install)
    for each in asyncio.run(build_launcher(read_base(base)).cluster_up([], options, _say)):
        typer.echo(f"{each.name} {each.state}, dashboard {each.dashboard}")


@app.command("down")
def down(
    base: SiteBase,
    old: Annotated[
        bool, typer.Option("--old", help="also older deployments that are found, each after a question")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="answer every question with yes")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="how long to wait")] = 300.0,
) -> None:
    """End the cluster of a base config, and nothing else. What is not there is no error."""
    from rollhook.launcher import ClusterOptions
    from rollhook_ray.verbs.submitting import build_launcher
    from rollhook_ray.workload import read_base

    options = ClusterOptions(
        timeout=timeout, old=old, confirm=lambda question: yes or typer.confirm(question, err=True)
    )
    done = asyncio.run(build_launcher(read_base(base)).cluster_down([], options, _say))
    for line in done or ["There was nothing to end."]:
        typer.echo(line)


def _rendered(spec: Path, base: Path | None, submission_id: str | None) -> tuple[Request, Rendered]:
    from rollhook_ray.workload import read_request
    from rollhook_ray.workload_render import render

    request = read_request(spec, base, submission_id=submission_id)
    return request, render(request)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _notes(rendered: Rendered) -> None:
    for note in rendered.notes:
        _say(f"note: {note}")


def _say_problems(problems: Sequence[str]) -> None:
    if not problems:
        typer.echo("nothing is missing")
    for each in problems:
        typer.echo(f"- {each}")
