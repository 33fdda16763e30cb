"""The command line. Nothing is imported for a verb until that verb is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import rollhook
from rollhook.errors import RollhookError, UsageError, first_of
from rollhook.failpoints import arm_from_environment
from rollhook.terminal import plain

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_TIMEOUT = 124

#: verb -> (where it is, one line of help); the order is that of `--help`
VERBS: dict[str, tuple[str, str]] = {
    "run": ("rollhook.cli.run:run", "Run a recipe, and the recipes that it needs before it."),
    "check": ("rollhook.cli.recipe:check", "Prove a recipe before anything starts: all problems at once."),
    "explain": (
        "rollhook.cli.recipe:explain",
        "Say which plugin supplies each part, and where each value came from.",
    ),
    "lock": (
        "rollhook.cli.lock:lock",
        "Write a recipe with all its values, versions and digests, to run it.",
    ),
    "plan": ("rollhook.cli.plan:plan", "Show all that a run would submit: files, commands and requests."),
    "jobs": ("rollhook.cli.jobs:app", "List, watch and stop the jobs that runs were submitted as."),
    "cluster": ("rollhook.cli.cluster:app", "Bring up and end the clusters that a recipe's launcher keeps."),
    "debug": ("rollhook.cli.debug:debug", "Pack all that helps to find a fault of a run, secrets masked."),
    "needs": ("rollhook.cli.recipe:needs", "List the components that a recipe and those it needs name."),
    "report": ("rollhook.cli.report:report", "Write one page about a run, or print its figures."),
    "plugins": ("rollhook.cli.plugins:plugins", "List the installed plugins."),
    "show": ("rollhook.cli.plugins:show", "Show the keys of a component or of a section of a recipe."),
    "new": ("rollhook.cli.new:new", "Write a package with one plugin, to be finished by its author."),
    "schema": ("rollhook.cli.lock:schema", "Write the JSON Schema of recipes, for editors of YAML."),
    "tasks": ("rollhook.cli.tasks:app", "List, show and prove the tasks of an environment."),
    "data": ("rollhook.cli.data:app", "Prepare generated data."),
    "eval": (
        "rollhook.cli.eval:evaluate",
        "Evaluate a recipe alone: pass@k with intervals, also of an endpoint.",
    ),
    "compare": ("rollhook.cli.eval:compare", "Compare two evaluations, with a paired test."),
    "replay": (
        "rollhook.cli.replay:replay",
        "Train again on what a run recorded, and compare the losses.",
    ),
    "rescore": ("rollhook.cli.rescore:rescore", "Run the verifiers of a run again, without a model."),
    "sandboxes": ("rollhook.cli.sandboxes:app", "List and reap the sandboxes of runs."),
    "router": (
        "rollhook.cli.router:router",
        "Route requests to engines: the router policies as a proxy of their own.",
    ),
    "doctor": ("rollhook.cli.doctor:doctor", "Say what works on this machine, or how a run stands."),
    "drive": (
        "rollhook.cli.run:drive",
        "Drive the next attempt of a run that a launcher has set up (internal).",
    ),
}


class LazyCommand(TyperCommand):
    """A verb that is imported when it is called; until then its name and one line of help are enough."""

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary, short_help=summary)
        self.target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the verb and go on with the real command."""
        return self.real().make_context(info_name, args, parent=parent, **extra)

    def real(self) -> Any:
        """Return the command itself. Raises UsageError if it cannot be imported."""
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(import_module(module), attribute or "app")
        except (ImportError, AttributeError) as error:
            raise UsageError(f"the verb {self.name!r} is not available: {error}") from error
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        wrapper = _typer(add_completion=False)
        wrapper.command(self.name)(found)
        return typer.main.get_command(wrapper)


class LazyGroup(TyperGroup):
    """The verbs of the core and those that plugins add as entry points `command.<verb>`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the core's verbs in the order of the table, then those of plugins."""
        return [*VERBS, *sorted(_plugin_verbs().keys() - VERBS.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb without importing it."""
        if cmd_name in VERBS:
            return LazyCommand(cmd_name, *VERBS[cmd_name])
        found = _plugin_verbs().get(cmd_name, [])
        if len(found) > 1:
            raise UsageError(f"the verb {cmd_name!r} is claimed by {' and '.join(each[1] for each in found)}")
        return LazyCommand(cmd_name, found[0][0], f"(from {found[0][1]})") if found else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb; for an unknown one say which may be meant."""
        from rollhook.installed import nearest

        verb = args[0]
        if not verb.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, verb) is None:
            near = nearest(verb, self.list_commands(ctx))
            ctx.fail(f"No such command {verb!r}." + (f" Did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; interrupted, it ends with the exit code of a stopped run."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("Stopped.", err=True)
            raise typer.Exit(EXIT_STOPPED) from None


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 success, 1 failed, 2 wrong usage, 3 stopped, 124 waited too long."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    if debug:
        arguments.remove("--debug")
    arguments = _infra_last(arguments)
    try:
        arm_from_environment()
        app(arguments, prog_name="rollhook")
    except Exception as error:
        if debug:
            raise
        sys.exit(_report(error))
    sys.exit(0)


def _infra_last(arguments: list[str]) -> list[str]:
    """Return the arguments with every `--infra FILE` as the override `infra=FILE` behind the recipe."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept: list[str] = []
    infra: list[str] = []
    words = iter(arguments[:end])
    for word in words:
        if word == "--infra" and kept:
            infra.append(f"infra={next(words, '')}")
        elif word.startswith("--infra=") and kept:
            infra.append(word.removeprefix("--"))
        else:
            kept.append(word)
    return [*kept, *infra, *arguments[end:]]


def _report(error: BaseException) -> int:
    """Say on stderr what is wrong, and return the exit code."""
    error = first_of(error)
    if isinstance(error, RollhookError):
        said = plain(str(error))
        typer.echo(said if "\n" in said else f"rollhook: {said}", err=True)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    text = plain(" ".join(str(error).split()))
    typer.echo(f"rollhook: {type(error).__name__}: {text} (--debug shows where)", err=True)
    return EXIT_TIMEOUT if isinstance(error, TimeoutError) else EXIT_FAILED


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def _plugin_verbs() -> dict[str, list[tuple[str, str]]]:
    from rollhook.installed import installed

    found: dict[str, list[tuple[str, str]]] = {}
    for entry in installed():
        if entry.kind == "command":
            found.setdefault(entry.name, []).append((entry.module, entry.distribution))
    return found


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rollhook {rollhook.__version__}")
        raise typer.Exit


app = _typer(cls=LazyGroup, no_args_is_help=True)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    infra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Behind a verb that takes a recipe: fill its launcher section from FILE."
        ),
    ] = None,
) -> None:
    """A plugin-based agent-environment runtime for reinforcement learning of language-model agents."""


if __name__ == "__main__":
    main()
