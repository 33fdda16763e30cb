"""OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat), whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import orjson

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.messages import Message, ToolSchema
from rollhook.reply.parser import Delta
from rollhook.session.dialect import (
    ChatRequest,
    Left,
    RefusedError,
    check_fields,
    conversation,
    flag,
    objects,
    text_of,
    whole,
)

_LIMITS = ("max_tokens", "max_completion_tokens")
_READ = frozenset(("messages", "tools", "tool_choice", "model", "stream", "stream_options", *_LIMITS))
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "stop": [],
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    **dict.fromkeys(
        ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"), None
    ),
}
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_ROLES = {"developer": "system"}


class ChatCompletions:
    """The dialect of OpenAI's clients; reasoning is `reasoning_content`, as SGLang and vLLM have it."""

    def request(self, body: Mapping[str, Any], sampling: SamplingParams) -> ChatRequest:
        """Return what a body asks for; RefusedError for what it may not or cannot hold."""
        check_fields(body, _READ, _NEUTRAL, sampling)
        messages = [_message(message) for message in conversation(body)]
        tools = [_tool(tool) for tool in objects(body, "tools")]
        if (choice := body.get("tool_choice")) not in (None, "auto", *(() if tools else ("none",))):
            raise RefusedError(400, f"tool_choice {str(choice)[:100]!r} is not supported, only 'auto'")
        limit = whole(body, "max_completion_tokens", whole(body, "max_tokens", None, 2**31), 2**31)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise RefusedError(400, "stream_options must be an object")
        return ChatRequest(
            messages,
            tools or None,
            limit,
            str(body.get("model") or "policy"),
            flag(body, "stream"),
            flag(options, "include_usage"),
        )

    def reply(self, request: ChatRequest, reply: Reply, left: Left) -> dict[str, Any]:
        """Return a chat completion."""
        return {
            "id": _id(),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [
                {
                    "index": 0,
                    "message": reply.message,
                    "finish_reason": reply.finish_reason,
                    "logprobs": None,
                }
            ],
            "usage": _usage(reply, left),
            "rollhook": left.fields(),
        }

    def events(self, request: ChatRequest) -> ChunkEvents:
        """Return the chunks of a streamed completion."""
        return ChunkEvents(request, self)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return OpenAI's form of an error."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChunkEvents:
    """Chunks `data: {...}`, at last `data: [DONE]`; a tool call comes whole, once it is known."""

    def __init__(self, request: ChatRequest, dialect: ChatCompletions) -> None:
        self._request = request
        self._dialect = dialect
        self._id = _id()
        self._created = int(time.time())

    def begin(self) -> Iterator[bytes]:
        """Give the role."""
        yield self._choice({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """Give reasoning and text."""
        if delta.reasoning:
            yield self._choice({"reasoning_content": delta.reasoning})
        if delta.text:
            yield self._choice({"content": delta.text})

    def end(self, reply: Reply, left: Left) -> Iterator[bytes]:
        """Give tool calls, the reason of the end, and the counts of tokens where they were asked for."""
        calls = reply.message.get("tool_calls") or ()
        for index, call in enumerate(calls):
            yield self._choice({"tool_calls": [{"index": index, **call}]})
        yield self._choice({}, reply.finish_reason, rollhook=left.fields())
        if self._request.usage:
            yield self._chunk([], usage=_usage(reply, left))
        yield b"data: [DONE]\n\n"

    def failed(self, status: int, message: str, code: str | None) -> Iterator[bytes]:
        """Give the error."""
        yield _data(self._dialect.error(status, message, code))

    def _choice(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}], **more)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created}
        return _data({**head, "model": self._request.model, "choices": choices, **more})


def _tool(tool: dict[str, Any]) -> ToolSchema:
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if tool.get("type", "function") != "function" or not named:
        raise RefusedError(400, "every tool is of type function and its function has a name")
    return tool


def _id() -> str:
    return f"chatcmpl-{uuid4().hex[:24]}"


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _usage(reply: Reply, left: Left) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        **left.fields(),
    }


def _message(message: Any) -> Message:
    """Return a message without what is not ours, its content parts joined; its form is checked later."""
    if not isinstance(message, dict):
        raise RefusedError(400, "every message is an object with role and content")
    plain: Any = {key: message[key] for key in _MESSAGE if message.get(key) is not None}
    if isinstance(role := plain.get("role"), str):
        plain["role"] = _ROLES.get(role, role)
    content = plain.setdefault("content", None)
    if isinstance(content, list):
        plain["content"] = text_of(content, "content")
    if message.get("function_call") is not None:
        raise RefusedError(400, "function_call is not supported; use tool_calls")
    result: Message = plain
    return result
