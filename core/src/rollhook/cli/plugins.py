"""`rollhook plugins` and `rollhook show`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.cli.output import as_json, table
from rollhook.errors import UsageError
from rollhook.installed import KINDS, EntryInfo, claimed_twice, installed, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel


def plugins(
    check: Annotated[bool, typer.Option("--check", help="Import each one and say whether it works.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins, from metadata alone.

    With --check each is imported; the exit code is 1 if one fails.
    """
    entries = installed()
    states = {entry: _state(entry) if check else _claims(entry, entries) for entry in entries}
    if json:
        as_json(
            [
                {
                    "kind": entry.kind,
                    "name": entry.name,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "module": entry.module,
                    "state": state,
                }
                for entry, state in states.items()
            ]
        )
    elif not entries:
        typer.echo("No plugins are installed.")
    else:
        table(
            [
                (entry.full_name, f"{entry.distribution} {entry.version}", state)
                for entry, state in states.items()
            ]
        )
    if check and any(state != "ok" for state in states.values()):
        raise typer.Exit(1)


def show(
    name: Annotated[
        str, typer.Argument(help="sandbox.local, local, or a section of a recipe such as budgets")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the JSON Schema.")] = False,
) -> None:
    """Show the keys of a component or of a section of a recipe: types, defaults, descriptions.

    Of a sandbox backend also what its provider cannot do.
    """
    models = _section(name) or _components(name)
    if json:
        as_json({title: model.model_json_schema() for title, (_, model) in models.items()})
        return
    for index, (title, (summary, model)) in enumerate(models.items()):
        typer.echo(("\n" if index else "") + f"{title}: {summary}")
        rows = list(_rows(model, deep=title != "recipe"))
        table(rows, indent="  ") if rows else typer.echo("  no keys")
        if gaps := _gaps(title):
            typer.echo("  cannot:")
            table([(case.removeprefix("test_"), reason) for case, reason in gaps.items()], indent="    ")


def _claims(entry: EntryInfo, entries: list[EntryInfo]) -> str:
    """Return what metadata alone says against an entry."""
    if entry.kind not in KINDS:
        near = nearest(entry.kind, KINDS)
        return f"unknown kind {entry.kind!r}" + (f", did you mean {near!r}?" if near else "")
    others = [e.distribution for e in claimed_twice(entries).get((entry.kind, entry.name), []) if e != entry]
    return f"also claimed by {', '.join(others)}" if others else ""


def _state(entry: EntryInfo) -> str:
    from rollhook.plugins import LoadError, load

    if entry.kind == "command":
        return "ok"
    try:
        loaded = load([(entry.kind, entry.name)])
        if entry.kind != "plugin":
            loaded.load_class(entry.kind, entry.name)
    except LoadError as error:
        return "; ".join(line.strip() for line in str(error).splitlines())
    return "ok"


def _sections() -> set[str]:
    from rollhook.recipe.schema import Recipe

    return {"recipe"} | {name for name in Recipe.model_fields if _section(name)}


def _section(name: str) -> dict[str, tuple[str, type[BaseModel]]]:
    """Return the core's section of a recipe that has this name."""
    from rollhook.recipe.schema import Recipe
    from rollhook.recipe.validate import models_at

    if name == "recipe":
        return {"recipe": ("the keys of a recipe", Recipe)}
    field = Recipe.model_fields.get(name)
    found = [*models_at(Recipe, (name,)), *models_at(Recipe, (name, 0))] if field else []
    return {name: (field.description or "", found[0])} if field and found else {}


def _components(name: str) -> dict[str, tuple[str, type[BaseModel]]]:
    """Return the components called `kind.name`, or those of every kind called `name`."""
    from rollhook.plugins import load

    entries = [e for e in installed() if e.kind not in {"plugin", "command"}]
    kind, dot, rest = name.partition(".")
    wanted = [(kind, rest)] if dot else [(e.kind, e.name) for e in entries if e.name == name]
    if not wanted:
        names = sorted({e.full_name for e in entries} | {e.name for e in entries} | _sections())
        near = nearest(name, names)
        raise UsageError(
            f"no component or section of a recipe is called {name!r}"
            + (f"; did you mean {near!r}?" if near else "")
            + "; `rollhook plugins` lists components, `rollhook show recipe` the keys of a recipe"
        )
    loaded = load(wanted)
    found = {f"{kind}.{each}": loaded.component(kind, each) for kind, each in wanted}
    return {title: (component.summary, component.config) for title, component in found.items()}


def _gaps(title: str) -> Mapping[str, str]:
    """Return the cases of the contract that a sandbox backend says it fails, each with its reason."""
    from rollhook.plugins import LoadError, load

    kind, _, name = title.partition(".")
    if kind != "sandbox" or not name:
        return {}
    try:
        gaps = getattr(load([(kind, name)]).load_class(kind, name), "gaps", {})
    except LoadError as error:
        typer.echo(f"what {title} cannot do is not known: {error}", err=True)
        return {}
    return gaps if isinstance(gaps, Mapping) else {}


def _rows(model: type[BaseModel], prefix: str = "", *, deep: bool) -> Iterator[tuple[str, str, str, str]]:
    from rollhook.recipe.schema import Use
    from rollhook.recipe.validate import models_at

    for name, field in model.model_fields.items():
        default = (
            "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
        )
        yield prefix + name, _type(model, name), default, field.description or ""
        for section in models_at(model, (name,)) if deep else ():
            if not issubclass(section, Use):
                yield from _rows(section, f"{prefix}{name}.", deep=deep)


def _default(value: Any) -> str:
    from pydantic import BaseModel

    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return "{...}" if value.model_fields_set == set() else str(value.model_dump(exclude_defaults=True))
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _type(model: type[BaseModel], name: str) -> str:
    """Return a type as a reader of a recipe knows it, out of the JSON Schema."""
    schema = model.model_json_schema()
    return _schema_type(schema["properties"][name], schema.get("$defs", {}))


def _schema_type(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _schema_type(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    if "enum" in schema or "const" in schema:
        return " | ".join(str(each) for each in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        parts = [_schema_type(each, defs) for each in schema["anyOf"] if each.get("type") != "null"]
        return " | ".join(dict.fromkeys(parts))
    names = {"integer": "int", "number": "float", "string": "text", "boolean": "true | false", "null": "null"}
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema['items'], defs)}" if schema.get("items") else "list"
    bounds = [("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")]
    limits = " ".join(f"{sign} {schema[key]:g}" for key, sign in bounds if key in schema)
    kind = names.get(schema.get("type", ""), "mapping" if schema.get("type") == "object" else "any")
    return f"{kind} {limits}".strip()
