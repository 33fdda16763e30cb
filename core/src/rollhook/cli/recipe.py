"""`rollhook check`, `rollhook explain` and `rollhook needs`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rollhook.cli.output import as_json, table

if TYPE_CHECKING:
    from rollhook.recipe import check as checking
    from rollhook.recipe.load import Loaded

Recipe = Annotated[str, typer.Argument(help="a recipe's path, or the name of a shipped one")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, +key=value or ~key")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Site = Annotated[
    str | None,
    typer.Option(help="here: also look at this machine; none: do not. Default: here for launcher local"),
]


def site_of(text: str | None) -> checking.Site | None:
    """Return what `--site` says. Raises BadParameter for anything but its words."""
    if text not in {None, "here", "none"}:
        raise typer.BadParameter("is here or none", param_hint="--site")
    return text  # type: ignore[return-value]


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    site: Site = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 also for what only this machine lacks.")
    ] = False,
    json: Json = False,
) -> None:
    """Prove a recipe, or a lock, before anything starts. Exit code 1 if it cannot work anywhere.

    What only this machine lacks is listed: it stops `rollhook run` here, but does not decide the exit code
    unless --strict says so. That something differs from a lock never does.
    """
    from rollhook.recipe.check import check_recipe

    checked = check_recipe(recipe, overrides or [], site=site_of(site))
    wrong, here = checked.composition, checked.here
    if json:
        as_json(
            {
                "recipe": checked.loaded.name,
                "ok": not wrong,
                "site": checked.site,
                "runs_here": not (wrong or here) if checked.site == "here" else None,
                "remarks": checked.loaded.remarks,
                "problems": [dataclasses.asdict(each) for each in [*wrong, *here]],
            }
        )
    else:
        for problem in wrong:
            typer.echo(str(problem))
        if here:
            typer.echo("On this machine:")
        for problem in here:
            typer.echo(str(problem))
        for remark in checked.loaded.remarks:
            typer.echo(remark)
        typer.echo(_verdict(checked.loaded.name, len(wrong), len(here), checked.site))
    lacking = [each for each in here if each not in checked.mismatches] if strict else []
    raise typer.Exit(1 if wrong or lacking else 0)


def explain(recipe: Recipe, overrides: Overrides = None, json: Json = False) -> None:
    """Say which distribution supplies each part of a recipe, and where every value came from."""
    from rollhook.recipe import paths
    from rollhook.recipe.check import check_recipe
    from rollhook.recipe.explain import supplied, values, wrong_keys
    from rollhook.recipe.problem import RecipeError
    from rollhook.recipe.validate import show

    checked = check_recipe(recipe, overrides or [], site="none")
    parts, rows = supplied(checked), values(checked)
    wrong = wrong_keys(checked)
    deviations = {
        key: deviation
        for key, deviation in checked.loaded.deviations.items()
        if not any(paths.below(paths.parse(key), each) for each in wrong)
    }
    if json:
        as_json(
            {
                "sources": checked.loaded.sources,
                "parts": [dataclasses.asdict(each) for each in parts],
                "values": [dataclasses.asdict(each) for each in rows],
                "deviations": {key: dataclasses.asdict(each) for key, each in deviations.items()},
            }
        )
    else:
        typer.echo(f"Sources: {', '.join(checked.loaded.sources)}")
        table([(each.key, each.component, f"{each.distribution} {each.version}") for each in parts])
        typer.echo("")
        table([(each.key, show(each.value), each.source) for each in rows])
        if deviations:
            typer.echo("\nDeviations from the reference:")
            table([(key, show(d.value), f"instead of {show(d.reference)}") for key, d in deviations.items()])
    if checked.composition:
        raise RecipeError(checked.composition)


def needs(recipe: Recipe, overrides: Overrides = None, json: Json = False) -> None:
    """List the components that a recipe and the recipes it needs name, one `kind.name` per line.

    No plugin has to be installed.
    """
    names = list(dict.fromkeys(_needed(recipe, overrides or [], ())))
    if json:
        as_json([{"kind": kind, "name": name} for kind, name in names])
        return
    for kind, name in names:
        typer.echo(f"{kind}.{name}")


def _needed(recipe: str, overrides: list[str], above: tuple[str, ...]) -> list[tuple[str, str]]:
    from rollhook.recipe.load import read_recipe
    from rollhook.recipe.names import names_in

    loaded = read_recipe(recipe, overrides)
    _readable(loaded)
    names = names_in(loaded.defaulted())
    inner = loaded.resolved.get("needs")
    for need in inner.values() if isinstance(inner, dict) else ():
        if isinstance(need, dict) and isinstance(need.get("recipe"), str) and loaded.name not in above:
            names += _needed(need["recipe"], list(need.get("overrides") or []), (*above, loaded.name))
    return names


def _readable(loaded: Loaded) -> None:
    """Raise RecipeError for a recipe of which nothing could be read; the rest is for the verb to report."""
    from rollhook.recipe.problem import RecipeError

    if not loaded.resolved:
        raise RecipeError(loaded.problems)


def _verdict(name: str, wrong: int, here: int, site: str) -> str:
    if wrong:
        return f"{name}: {_count(wrong)}" + (f", and {here} more on this machine" if here else "")
    if here:
        problems = f"{_count(here)} on this machine: `rollhook run` stops here"
        return f"{name}: nothing wrong in itself, but {problems}"
    return f"{name}: no problems" + ("" if site == "here" else " (this machine was not looked at)")


def _count(number: int) -> str:
    return f"{number} problem" if number == 1 else f"{number} problems"
