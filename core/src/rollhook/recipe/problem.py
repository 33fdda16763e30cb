"""One thing wrong with a recipe, in five parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
        where = f"{self.source}: {self.key}" if self.source else self.key
        lines = [f"{where}: {self.message}"]
        if self.allowed:
            lines.append(f"  {self.allowed}")
        if self.nearest:
            lines.append(f"  did you mean {self.nearest!r}?")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)
