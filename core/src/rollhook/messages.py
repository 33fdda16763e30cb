"""Chat messages in the OpenAI form, as typed dictionaries."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(TypedDict):
    """A call that the model asked for; `function` is `{name, arguments}`, arguments as JSON text."""

    id: str
    type: Literal["function"]
    function: dict[str, str]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


ToolSchema = dict[str, Any]


def message(role: Role, content: str) -> Message:
    """Return a plain message."""
    return {"role": role, "content": content}
