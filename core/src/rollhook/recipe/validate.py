"""Pydantic's errors as problems: key path, value, what is allowed, nearest match."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollhook.installed import nearest
from rollhook.recipe import paths
from rollhook.recipe.problem import Problem
from rollhook.secrets import FORMS

M = TypeVar("M", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


def validate(model: type[M], keys: Mapping[str, Any], key: str = "") -> tuple[M | None, list[Problem]]:
    """Validate a mapping; return the model, or None and every problem, with paths below `key`."""
    prefix = paths.parse(key)
    problems = [
        Problem(paths.text((*prefix, *path)), f"{show(value)} is not a number")
        for path, value in _booleans_for_numbers(model, keys)
    ]
    try:
        instance = model.model_validate(dict(keys))
    except ValidationError as error:
        booleans = {problem.key for problem in problems}
        found = _problems(error.errors(include_url=False), model, keys, prefix)
        return None, problems + [each for each in found if each.key not in booleans]
    return (None if problems else instance), problems


def show(value: Any) -> str:
    """Return a value as a message shows it: one line, never long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + " ..."


def _problems(
    errors: list[ErrorDetails], model: type[BaseModel], keys: Mapping[str, Any], prefix: paths.Path
) -> list[Problem]:
    """One problem per path: the branches of a union complain separately, we say it once."""
    by_path: dict[paths.Path, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_path(error, keys), []).append(error)
    problems = []
    for path, found in by_path.items():
        deeper = any(other[: len(path)] == path and other != path for other in by_path)
        if deeper and all(error["type"] in _EXPECTED for error in found):
            continue
        problems.append(_problem(path, found, model, prefix))
    return problems


def _path(error: ErrorDetails, keys: Mapping[str, Any]) -> paths.Path:
    """Return where the error is in the data: pydantic also names the branches of a union, which we drop."""
    here: Any = keys
    path: paths.Path = ()
    for index, part in enumerate(error["loc"]):
        inside = isinstance(here, Mapping) and part in here
        inside = inside or (isinstance(here, list | tuple) and isinstance(part, int) and part < len(here))
        if inside:
            here = here[part]
            path = (*path, part)
        elif error["type"] == "missing" and index == len(error["loc"]) - 1:
            path = (*path, part)
    return path


def _problem(
    path: paths.Path,
    errors: list[ErrorDetails],
    model: type[BaseModel],
    prefix: paths.Path,
) -> Problem:
    error = errors[0]
    kind, value, context = error["type"], show(error["input"]), error.get("ctx", {})
    where = paths.text((*prefix, *path))
    message, allowed, near, hint = f"{value} {_lower(error['msg'])}", _description(model, path), "", ""
    if kind == "extra_forbidden":
        fields = _fields_at(model, path[:-1])
        near = nearest(str(path[-1]), fields)
        message, allowed = f"{path[-1]!r} is not a key", f"keys here: {', '.join(fields)}"
    elif kind == "missing":
        message = "is missing"
    elif kind in {"literal_error", "enum"}:
        choices = [choice.strip(" '") for choice in context["expected"].replace(" or ", ", ").split(",")]
        near = nearest(str(error["input"]), choices)
        message, allowed = f"{value} is not allowed", f"allowed: {', '.join(choices)}"
    elif all(each["type"] in _EXPECTED for each in errors):
        wanted = " or ".join(dict.fromkeys(_EXPECTED[each["type"]] for each in errors))
        message = f"{value} is not {wanted}"
    elif kind == "secret_reference":
        message, allowed = "is not a reference to a secret", f"allowed: {FORMS}"
        hint = "put the value where a reference can point to it, never into a recipe"
    elif kind == "value_error":
        message, allowed = str(context["error"]), ""
    return Problem(where, message, allowed=allowed, nearest=near, hint=hint)


def _lower(message: str) -> str:
    for subject in ("Input ", "String ", "List ", "Tuple ", "Dictionary "):
        if message.startswith(subject):
            return message.removeprefix(subject)
    return f"is wrong: {message[:1].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: paths.Path) -> list[str]:
    return [name for each in models_at(model, path) for name in each.model_fields]


def _description(model: type[BaseModel], path: paths.Path) -> str:
    """Return what the field says; a validator of the whole model has no field."""
    if not path:
        return ""
    for parent in models_at(model, path[:-1]):
        field = parent.model_fields.get(str(path[-1]))
        if field is not None and field.description:
            return f"{path[-1]}: {field.description}"
    return ""


def models_at(model: type[BaseModel], path: paths.Path) -> Iterator[type[BaseModel]]:
    """Yield the models that may stand at a path."""
    for each in _annotations_at(model, path):
        for branch in _branches(each):
            if isinstance(branch, type) and issubclass(branch, BaseModel):
                yield branch


def _annotations_at(model: type[BaseModel], path: paths.Path) -> list[Any]:
    annotations: list[Any] = [model]
    for part in path:
        annotations = [child for each in annotations for child in _children(each, part)]
    return annotations


def _children(annotation: Any, part: str | int) -> Iterator[Any]:
    for branch in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            if part in branch.model_fields:
                yield branch.model_fields[str(part)].annotation
        elif get_args(branch):
            yield get_args(branch)[-1 if get_origin(branch) is dict else 0]


def _branches(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _branches(get_args(annotation)[0])
    elif get_origin(annotation) in {Union, types.UnionType}:
        for branch in get_args(annotation):
            yield from _branches(branch)
    else:
        yield annotation


def _booleans_for_numbers(
    model: type[BaseModel], keys: Mapping[str, Any]
) -> Iterator[tuple[paths.Path, bool]]:
    """Yield each `true` and `false` where only a number may stand: pydantic would read them as 1 and 0."""
    for path, value in paths.leaves(keys):
        if isinstance(value, bool):
            types_here = {
                each for annotation in _annotations_at(model, path) for each in _branches(annotation)
            }
            if types_here & {int, float} and bool not in types_here:
                yield path, value
