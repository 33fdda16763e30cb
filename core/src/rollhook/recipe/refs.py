"""A component's key that names another component, such as a sandbox that wraps a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rollhook.recipe.schema import Use


@dataclass(frozen=True)
class ComponentRef:
    """Marks a `Use` field: `inner: Annotated[Use, ComponentRef("sandbox")]`.

    A recipe writes `inner: local` or `inner: {use: local, ...}`; the loader loads what it names, and the
    component builds it with `context.build("sandbox", config.inner)`.
    """

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: {"use": value} if isinstance(value, str) else value, handler(source)
        )


def references(config: BaseModel) -> Iterator[tuple[str, str, Use]]:
    """Yield (field, kind, value) of every component that a validated configuration names."""
    for name, field in type(config).model_fields.items():
        for mark in field.metadata:
            value = getattr(config, name)
            if isinstance(mark, ComponentRef) and isinstance(value, Use):
                yield name, mark.kind, value
