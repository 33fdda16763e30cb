"""Values that a task takes from the host: `${NAME}` and `${NAME:-default}`, as whole values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:(?!\$\{).)*))?\}", re.DOTALL)

#: what a name stands for; None where the recipe says nothing of it
Lookup = Callable[[str], str | None]


@dataclass(frozen=True)
class Template:
    """A value that is asked for by name; without `default` it must be given."""

    name: str
    default: str | None


def parse(value: str) -> Template | None:
    """Return the template that a whole value is, or None."""
    match = _TEMPLATE.fullmatch(value)
    return Template(match[1], match[2]) if match else None


def missing(env: Mapping[str, str], given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (variable, name asked for) of values that have no default and are not given."""
    for variable, value in env.items():
        template = parse(value)
        if template is not None and template.default is None and template.name not in given:
            yield variable, template.name


def resolve(env: Mapping[str, str], lookup: Lookup) -> dict[str, str]:
    """Return the environment with every template replaced; the caller has seen to `missing`."""
    return {variable: _resolved(value, lookup) for variable, value in env.items()}


def _resolved(value: str, lookup: Lookup) -> str:
    template = parse(value)
    if template is None:
        return value
    given = lookup(template.name)
    return given if given is not None else template.default or ""
