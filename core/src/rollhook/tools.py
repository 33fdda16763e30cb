"""The tool protocol: list, call, JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollhook.messages import ToolSchema


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered; a failing tool is a result with `is_error`, not an exception."""

    content: str
    is_error: bool = False


class Tools(Protocol):
    """A set of tools that the agent may call."""

    async def list(self) -> Sequence[ToolSchema]:
        """Return the tools in the OpenAI function form, parameters as JSON Schema."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one tool. Raises ToolError when the machinery fails, never for a bad argument."""
