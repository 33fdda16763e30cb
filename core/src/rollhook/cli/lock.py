"""`rollhook lock` and `rollhook schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollhook.cli.recipe import Overrides, Recipe, Site, site_of

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="write it there; default: stdout")
]


def lock(recipe: Recipe, overrides: Overrides = None, output: Output = None, site: Site = None) -> None:
    """Write a recipe's lock: all its values, and the versions, revisions and digests that are here.

    `rollhook run FILE` runs it, and refuses what no longer matches. What is not here (tasks or weights that
    only the nodes have) is recorded as absent and not compared.
    """
    from rollhook.recipe.check import check_recipe
    from rollhook.recipe.facts import digests
    from rollhook.recipe.lock import lock_text
    from rollhook.recipe.problem import RecipeError

    checked = check_recipe(recipe, overrides or [], site=site_of(site))
    if checked.composition:
        raise RecipeError(checked.composition)
    _write(lock_text(checked.loaded, checked.plugins), output)
    absent = [key for key, digest in digests(checked.loaded, checked.plugins).items() if digest is None]
    if absent:
        typer.echo(f"Not here, so not compared when the lock is run: {', '.join(absent)}", err=True)


def schema(output: Output = None) -> None:
    """Write the JSON Schema of recipes with the plugins that are installed, for editors of YAML.

    Name it in a recipe's first line: `# yaml-language-server: $schema=FILE`. Write it again after plugins
    were installed or upgraded. A plugin that cannot be imported is left out, with a line that says so.
    """
    import json

    from rollhook.recipe.json_schema import recipe_schema

    found, left_out = recipe_schema()
    _write(json.dumps(found, indent=1, ensure_ascii=False) + "\n", output)
    for reason in left_out:
        typer.echo(f"left out: {reason}", err=True)


def _write(text: str, output: Path | None) -> None:
    from rollhook.durable import write_atomic

    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(output, text.encode())
