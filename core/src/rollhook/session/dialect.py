"""What the gateway's dialects share: a request in our own terms, refusals, and the budget in every reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.errors import BudgetExceeded, EngineError, RollhookError
from rollhook.messages import Message, ToolSchema
from rollhook.reply.parser import Delta
from rollhook.session.common import SessionError
from rollhook.session.render import RenderError, ToolsNotShownError

_SAMPLING = ("temperature", "top_p", "top_k")


class RefusedError(Exception):
    """A request that is answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """One turn that a client asks for; `usage` says whether a stream ends with the counts of tokens."""

    messages: list[Message]
    tools: list[ToolSchema] | None
    max_tokens: int | None
    model: str
    stream: bool
    usage: bool = False


@dataclass(frozen=True)
class Left:
    """What a session may still use after a reply."""

    turns: int
    tokens: int

    def fields(self) -> dict[str, int]:
        """Return it as keys of a body."""
        return {"turns_left": self.turns, "tokens_left": self.tokens}

    def headers(self) -> dict[str, str]:
        """Return it as HTTP headers."""
        return {"X-Rollhook-Turns-Left": str(self.turns), "X-Rollhook-Tokens-Left": str(self.tokens)}


class Events(Protocol):
    """Makes the server-sent events of one streamed reply, in the order of these methods."""

    def begin(self) -> Iterator[bytes]:
        """Give what comes before the text."""

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """Give a piece of the text."""

    def end(self, reply: Reply, left: Left) -> Iterator[bytes]:
        """Give what comes after the text."""

    def failed(self, status: int, message: str, code: str | None) -> Iterator[bytes]:
        """Give what ends a stream that failed, in place of `end`."""


class Dialect(Protocol):
    """Translates a protocol of chat to our messages and back."""

    def request(self, body: Mapping[str, Any], sampling: SamplingParams) -> ChatRequest:
        """Return what a body asks for; RefusedError for what it may not or cannot hold."""

    def reply(self, request: ChatRequest, reply: Reply, left: Left) -> dict[str, Any]:
        """Return the body of a reply."""

    def events(self, request: ChatRequest) -> Events:
        """Return the events of a streamed reply."""

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return the body of an error."""


def check_fields(
    body: Mapping[str, Any], read: Iterable[str], neutral: Mapping[str, Any], sampling: SamplingParams
) -> None:
    """Refuse every field that would be ignored though it matters.

    Fields in `read` are fine, those in `neutral` with that value (None: with any), all with null. Sampling is
    the session's, for its tokens are trained on as samples of that distribution.
    """
    for key, value in body.items():
        if value is None or key in read:
            continue
        if key in _SAMPLING:
            own = getattr(sampling, key)
            if value != own:
                raise RefusedError(
                    400, f"{key} is set when a session is opened, here to {own:g}; leave it out"
                )
        elif key not in neutral:
            raise RefusedError(400, f"{key[:100]} is not supported; leave it out")
        elif neutral[key] is not None and value != neutral[key]:
            raise RefusedError(400, f"{key} other than {neutral[key]!r} is not supported; leave it out")


def whole(body: Mapping[str, Any], key: str, default: Any, most: int, *, least: int = 1) -> Any:
    """Return a whole number of a body, or the default where it is absent."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RefusedError(422, f"{key} must be a whole number from {least} to {most}")
    return value


def number(body: Mapping[str, Any], key: str, default: float, least: float, most: float) -> float:
    """Return a number of a body, or the default where it is absent."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RefusedError(422, f"{key} must be a number from {least:g} to {most:g}")
    return float(value)


def flag(body: Mapping[str, Any], key: str) -> bool:
    """Return a truth value of a body, False where it is absent."""
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise RefusedError(400, f"{key} must be true or false")
    return bool(value)


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of objects of a body, empty where it is absent."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RefusedError(400, f"{key} must be a list of objects")
    return value


def conversation(body: Mapping[str, Any]) -> list[Any]:
    """Return a body's messages, at least one, whatever they are."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages must be a list with at least one message")
    return messages


def text_of(parts: list[Any], where: str) -> str:
    """Return the text of content parts, one behind the other."""
    if not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
    ):
        raise RefusedError(422, f"only text parts are supported in {where}")
    return "".join(part["text"] for part in parts)


def failure(error: Exception) -> tuple[int, str, str | None]:
    """Return the HTTP status of an error, its text, and OpenAI's `code` for it."""
    if isinstance(error, RefusedError | SessionError):
        return error.status, str(error), None
    if isinstance(error, RenderError):
        tools = isinstance(error, ToolsNotShownError)
        return (400 if tools else 422), str(error), "tools_not_supported" if tools else None
    if isinstance(error, BudgetExceeded):
        return 403, str(error), "budget_exceeded"
    if isinstance(error, EngineError):
        return (422 if error.kind == "user" else 502), str(error), "engine_error"
    if isinstance(error, RollhookError):
        return 500, str(error), None
    return 500, "the gateway failed; its log says why", "server_error"
