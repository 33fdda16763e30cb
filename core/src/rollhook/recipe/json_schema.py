"""`rollhook schema`: recipes with the installed plugins as JSON Schema (draft 7), for editors of YAML."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from rollhook import installed as metadata
from rollhook.component import Component
from rollhook.hookspecs import PROVIDER_HOOKS
from rollhook.plugins import LoadError, load
from rollhook.recipe.refs import ComponentRef
from rollhook.recipe.schema import EnvironmentUse, Recipe, RouterUse, SandboxUse, Use

#: text with `${...}` may stand wherever a value is wanted
_INTERPOLATED = r"\$\{"

#: the models that hold the core's keys beside `use`
_CORE_KEYS: dict[str, type[Use]] = {"environment": EnvironmentUse, "sandbox": SandboxUse}


def recipe_schema() -> tuple[dict[str, Any], list[str]]:
    """Return the schema, and why plugins were left out that cannot be loaded.

    Imports the plugins' modules. What depends on several keys at once is for `rollhook check` to say.
    """
    components, left_out = _components()
    schema = _model(Recipe)
    schema.pop("required")
    definitions = {kind: _component(kind, found) for kind, found in components.items() if kind != "router"}
    definitions["router"] = _router(components["router"])
    for key, wanted in schema["properties"].items():
        if key in definitions:
            schema["properties"][key] = _described(wanted, {"$ref": f"#/definitions/{key}"})
    environment, tracker = {"$ref": "#/definitions/environment"}, {"$ref": "#/definitions/tracker"}
    observers = sorted({entry.name for entry in metadata.installed() if entry.kind == "plugin"})
    name_of_observer = {"type": "string", "enum": observers} if observers else {"type": "string"}
    own = schema["properties"]
    own["environment"] = _described(own["environment"], *_one_or_list(environment))
    own["trackers"] = _described(own["trackers"], *_one_or_list(tracker))
    own["plugins"] = _described(own["plugins"], *_one_or_list(name_of_observer))
    need = own["needs"]["additionalProperties"]
    own["needs"]["additionalProperties"] = {"anyOf": [{"type": "string"}, need]}
    recipes = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    extends = {"description": "recipe to start from, by path or name, or several: later ones win"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Rollhook recipe",
        "description": "A run: which plugins it is composed of, and their keys.",
        "type": "object",
        "properties": {"extends": extends | recipes, **own},
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": ["name"]},
        "definitions": definitions,
    }, left_out


def _components() -> tuple[dict[str, list[Component]], list[str]]:
    """Return the components of every kind that can be loaded, and what is wrong with the others."""
    entries = [entry for entry in metadata.installed() if entry.kind in PROVIDER_HOOKS]
    plugins = load([(entry.kind, entry.name) for entry in entries], strict=False)
    found: dict[str, list[Component]] = {kind: [] for kind in PROVIDER_HOOKS}
    left_out = []
    for kind, name in dict.fromkeys((entry.kind, entry.name) for entry in entries):
        try:
            component = plugins.component(kind, name)
            component.config.model_json_schema()
        except LoadError as error:
            left_out.append(f"{kind}.{name}: {error.problem.message}")
        except PydanticInvalidForJsonSchema as error:
            left_out.append(f"{kind}.{name}: a key has a type without JSON Schema: {error.message}")
        else:
            found[kind].append(component)
    return found, left_out


def _component(kind: str, components: list[Component]) -> dict[str, Any]:
    """One component: a bare name, or a mapping whose `use` decides which other keys there are.

    Without `use`, which `extends` may give, any key of a component of the kind may stand.
    """
    core = _model(_CORE_KEYS.get(kind, Use))["properties"]
    names = _names(components)
    core["use"] = _described(core["use"], {"anyOf": [names, _text(_INTERPOLATED)]})
    variants, every = [], dict(core)
    for component in components:
        own = _model(component.config)
        keys = own["properties"]
        for key, schema in keys.items():
            every[key] = _either(every[key], schema) if key in every else schema
        then = {"properties": {**core, **keys}, "additionalProperties": False}
        if "required" in own:
            then["required"] = own["required"]
        variants.append(_when({"const": component.name}, then))
    unnamed = {"properties": every, "additionalProperties": False}
    variants.append({"if": {"not": {"required": ["use"]}}, "then": unnamed})
    mapping = {"type": "object", "properties": {"use": core["use"]}, "allOf": variants}
    return {"anyOf": [names, _text(_INTERPOLATED), mapping, {"type": "null"}]}


def _router(policies: list[Component]) -> dict[str, Any]:
    """A chain of policies, `sticky+min_load`; the keys of each stand under its name."""
    name = "|".join(policy.name for policy in policies)
    chain = {"anyOf": [_names(policies), _text(rf"^({name})( *\+ *({name}))+$|{_INTERPOLATED}")]}
    keys = _model(RouterUse)["properties"]
    keys["use"] = _described(keys["use"], chain)
    for policy in policies:
        own = _model(policy.config)
        keys[policy.name] = {**own, "type": ["object", "null"], "description": f"keys of {policy.name}"}
    mapping = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"anyOf": [*chain["anyOf"], mapping]}


def _names(components: Iterable[Component]) -> dict[str, Any]:
    summaries = {component.name: component.summary for component in components}
    return {"type": "string", "enum": list(summaries), "enumDescriptions": list(summaries.values())}


def _one_or_list(schema: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (schema, {"type": "array", "items": schema}, {"type": "null"})


def _when(use: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {"use": use}, "required": ["use"]}, "then": then}


def _described(old: Mapping[str, Any], *schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the description of `old`; draft 7 ignores what stands beside a `$ref`."""
    kept = {"description": old["description"]} if "description" in old else {}
    if len(schemas) > 1:
        return kept | {"anyOf": list(schemas)}
    return kept | ({"allOf": list(schemas)} if "$ref" in schemas[0] else schemas[0])


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if one == other:
        return one
    known = one["anyOf"] if set(one) == {"anyOf"} else [one]
    return {"anyOf": known if other in known else [*known, other]}


def _text(pattern: str, wanted: str = "text with ${...}") -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "patternErrorMessage": f"wanted: {wanted}"}


def _model(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's schema in the words of draft 7, without references, `${...}` allowed anywhere."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    found: dict[str, Any] = _plain(schema, definitions)
    found["type"] = "object"
    found.pop("description", None)
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, ComponentRef):
                reference = {"$ref": f"#/definitions/{mark.kind}"}
                found["properties"][name] = _described(found["properties"][name], reference)
    found.setdefault("properties", {})
    return found


def _plain(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Rewrite one schema of pydantic's, and those inside it."""
    if isinstance(schema, list):
        return [_plain(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = copy.deepcopy(definitions[schema["$ref"].rsplit("/", 1)[-1]])
        schema = target | {key: value for key, value in schema.items() if key != "$ref"}
    default = {"default": schema["default"]} if "default" in schema else {}
    keywords = {key: value for key, value in schema.items() if key not in {"title", "properties", "default"}}
    found = default | {key: _plain(value, definitions) for key, value in keywords.items()}
    if "properties" in schema:
        properties = schema["properties"].items()
        found["properties"] = {key: _plain(value, definitions) for key, value in properties}
    if "prefixItems" in found:
        found["items"] = found.pop("prefixItems")
    return _interpolated(found)


def _interpolated(schema: dict[str, Any]) -> dict[str, Any]:
    """Let text with `${...}` stand for what a schema asks for; `pattern` binds text alone, limits numbers."""
    if "anyOf" in schema:
        return schema
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if "enum" in schema:
        about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
        return about | {"anyOf": [schema, _text(_INTERPOLATED)]}
    if schema.get("type") == "string":
        if "pattern" in schema:
            schema["pattern"] += f"|{_INTERPOLATED}"
    elif isinstance(schema.get("type"), str) and schema["type"] != "null":
        kind = {"object": "mapping", "array": "list"}.get(schema["type"], schema["type"])
        text = _text(_INTERPOLATED, f"{kind}, or text with ${{...}}")
        schema |= text | {"type": [schema["type"], "string"]}
    return schema
