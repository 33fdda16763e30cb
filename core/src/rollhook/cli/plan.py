"""`rollhook plan`: what `rollhook run` would submit, and nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollhook.cli.output import as_json
from rollhook.cli.recipe import Json, Overrides, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: below the directory of `-o`: argument vectors, one a line as a shell takes them, and bodies of requests
COMMANDS, REQUESTS, PLAN = "commands.sh", "requests", "plan.json"


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="write it there, a file each")
    ] = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="leave out what changes from run to run and between machines")
    ] = False,
    json: Json = False,
) -> None:
    """Show every file, command and request that `rollhook run` would use; nothing is contacted or begun.

    Secrets are references in it. Run twice, it differs in the run's id alone, and with --frozen in nothing.
    """
    from rollhook.recipe.check import compose
    from rollhook.runtime.native_job import Native, plan_of

    native = Native.of(*compose(recipe, overrides or [], site="none"))
    data = plan_of(native, frozen=frozen).to_data()
    if output is not None:
        written = write_plan(data, output)
        typer.echo(f"{len(written)} files in {output}", err=True)
    elif json:
        as_json(data)
    else:
        for line in shown(data):
            typer.echo(line)


def shown(data: Mapping[str, Any]) -> list[str]:
    """Return a plan as text: notes, commands, requests, then the files."""
    lines = [f"# launcher {data['launcher']}"]
    if "job" in data:
        lines += [f"# job {data['job']['id']} in {data['job']['directory']}"]
    lines += [f"# note: {note}" for note in data["notes"]]
    if data["commands"]:
        lines += ["", "# commands", *_commands(data["commands"])]
    for name, body in data["requests"].items():
        lines += ["", f"# request {name}", _request(body)[1].rstrip()]
    for name, text in sorted(data["files"].items()):
        lines += ["", f"# file {name}", text.rstrip()]
    return lines


def write_plan(data: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write a plan's files, commands and requests, and all of it as JSON; return what was written.

    Raises RunError when the disk is full or not writable.
    """
    from rollhook.durable import cannot_write, to_json

    texts = {f"files/{name}": text for name, text in data["files"].items()}
    for name, body in data["requests"].items():
        suffix, text = _request(body)
        texts[f"{REQUESTS}/{name}{'' if name.endswith(suffix) else suffix}"] = text
    if data["commands"]:
        texts[COMMANDS] = "".join(f"{line}\n" for line in _commands(data["commands"]))
    texts[PLAN] = to_json(data, indent=True).decode() + "\n"
    written = []
    try:
        for name, text in texts.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            written.append(path)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from error
    return written


def _commands(commands: Sequence[Sequence[str]]) -> list[str]:
    import shlex

    return [shlex.join(argv) for argv in commands]


def _request(body: Any) -> tuple[str, str]:
    """Return the suffix and the text of a request's body: YAML for objects, as it is for text."""
    if isinstance(body, str):
        return ".txt", body
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines as such."""

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Dumper.add_representer(str, text)
    dumped: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return ".yaml", dumped
