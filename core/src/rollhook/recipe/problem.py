"""One thing wrong with a recipe, in five parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollhook.errors import UsageError


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, what is allowed, the nearest match and the next command.

    `scope` is `composition` (wrong everywhere, decides the exit code) or `site` (wrong on this machine).
    """

    key: str
    message: str
    source: str = ""
    allowed: str = ""
    nearest: str = ""
    hint: str = ""
    scope: Literal["composition", "site"] = "composition"

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.source, self.key) if part)
        lines = [f"{where}: {self.message}" if where else self.message]
        if self.allowed:
            lines.append(f"  {self.allowed}")
        if self.nearest:
            lines.append(f"  did you mean {self.nearest!r}?")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


class RecipeError(UsageError):
    """A recipe that cannot be used; `problems` holds all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
