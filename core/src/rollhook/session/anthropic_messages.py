"""Anthropic's Messages (https://docs.anthropic.com/en/api/messages), whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import orjson

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.messages import Message, ToolCall, ToolSchema
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

_READ = frozenset(("messages", "system", "tools", "tool_choice", "max_tokens", "model", "stream"))
#: whether the model thinks is its chat template's choice, so `thinking` is taken and changes nothing
_NEUTRAL: Mapping[str, Any] = {
    "stop_sequences": [],
    **dict.fromkeys(("metadata", "service_tier", "thinking"), None),
}
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicMessages:
    """The dialect of Anthropic's clients; reasoning is in thinking blocks, whose signature says nothing."""

    def request(self, body: Mapping[str, Any], sampling: SamplingParams) -> ChatRequest:
        """Return what a body asks for; RefusedError for what it may not or cannot hold."""
        check_fields(body, _READ, _NEUTRAL, sampling)
        messages = _system(body.get("system"))
        for message in conversation(body):
            messages += _messages(message)
        tools = [_tool(tool) for tool in objects(body, "tools")]
        _check_choice(body.get("tool_choice"), bool(tools))
        return ChatRequest(
            messages,
            tools or None,
            whole(body, "max_tokens", None, 2**31),
            str(body.get("model") or "policy"),
            flag(body, "stream"),
        )

    def reply(self, request: ChatRequest, reply: Reply, left: Left) -> dict[str, Any]:
        """Return a message."""
        return {
            **_head(request),
            "content": _blocks(reply.message),
            "stop_reason": _STOP.get(reply.finish_reason, "end_turn"),
            "usage": _usage(reply, left),
            "rollhook": left.fields(),
        }

    def events(self, request: ChatRequest) -> BlockEvents:
        """Return the events of a streamed message."""
        return BlockEvents(request, self)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return Anthropic's form of an error."""
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class BlockEvents:
    """Named events: the message begins, its blocks one after the other, and it ends."""

    def __init__(self, request: ChatRequest, dialect: AnthropicMessages) -> None:
        self._request = request
        self._dialect = dialect
        self._index = -1
        self._open = ""

    def begin(self) -> Iterator[bytes]:
        """Give the empty message."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**_head(self._request), "content": [], "stop_reason": None, "usage": usage}
        yield _event("message_start", message=message)

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """Give thinking and text, each in a block."""
        if delta.reasoning:
            yield from self._block("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.text:
            yield from self._block("text", {"text": ""})
            yield self._delta("text_delta", text=delta.text)

    def end(self, reply: Reply, left: Left) -> Iterator[bytes]:
        """Give tool calls, the reason of the end and the counts of tokens."""
        yield from self._close()
        for call in reply.message.get("tool_calls") or ():
            block = _tool_use(call)
            yield from self._block("tool_use", {**block, "input": {}})
            yield self._delta("input_json_delta", partial_json=orjson.dumps(block["input"]).decode())
            yield from self._close()
        ended = {"stop_reason": _STOP.get(reply.finish_reason, "end_turn"), "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=_usage(reply, left), rollhook=left.fields())
        yield _event("message_stop")

    def failed(self, status: int, message: str, code: str | None) -> Iterator[bytes]:
        """Give the error."""
        body = self._dialect.error(status, message, code)
        yield _event("error", error=body["error"])

    def _block(self, kind: str, empty: dict[str, Any]) -> Iterator[bytes]:
        """Open a block unless one of this kind is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, kind: str, **more: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **more})


_SIGNATURE = "rollhook"


def _head(request: ChatRequest) -> dict[str, Any]:
    head = {"id": f"msg_{uuid4().hex[:24]}", "type": "message", "role": "assistant"}
    return {**head, "model": request.model, "stop_sequence": None}


def _event(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))


def _usage(reply: Reply, left: Left) -> dict[str, Any]:
    """Return the counts; Anthropic's `input_tokens` are those that were not cached."""
    return {
        "input_tokens": max(0, reply.prompt_tokens - reply.cached_tokens),
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
        **left.fields(),
    }


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": _SIGNATURE})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_tool_use(call) for call in message.get("tool_calls") or ()]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return a call as a block; arguments that are no object, for which there is no form, are wrapped."""
    function = call["function"]
    try:
        arguments = orjson.loads(function.get("arguments") or "{}")
    except orjson.JSONDecodeError:
        arguments = function["arguments"]
    given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _system(system: Any) -> list[Message]:
    if system is None or system in ("", []):
        return []
    text = text_of(system, "system") if isinstance(system, list) else system
    if not isinstance(text, str):
        raise RefusedError(400, "system must be text or a list of text blocks")
    return [{"role": "system", "content": text}]


def _messages(message: Any) -> list[Message]:
    """Return one of Anthropic's messages as ours: each tool result is a message of its own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise RefusedError(400, "every message is an object with role, user or assistant, and content")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RefusedError(400, "content of a message must be text or a list of blocks")
    return [_assistant(content)] if role == "assistant" else _user(content)


def _user(blocks: Sequence[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    texts: list[Any] = []

    def said() -> None:
        if texts:
            messages.append({"role": "user", "content": text_of(texts, "content")})
            texts.clear()

    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        said()
        result, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(result, str):
            raise RefusedError(400, "tool_use_id of a tool_result must be text")
        if isinstance(content, list):
            content = text_of(content, "a tool_result")
        if not isinstance(content, str | None):
            raise RefusedError(400, "content of a tool_result must be text or a list of blocks")
        messages.append({"role": "tool", "content": content or "", "tool_call_id": result})
    said()
    return messages


def _assistant(blocks: Sequence[dict[str, Any]]) -> Message:
    texts = [block for block in blocks if block.get("type") not in ("thinking", "tool_use")]
    message: Message = {"role": "assistant", "content": text_of(texts, "content of an assistant")}
    thoughts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise RefusedError(400, "thinking of a block must be text")
    if thoughts:
        message["reasoning_content"] = "".join(map(str, thoughts))
    if calls := [_call(block) for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any]) -> ToolCall:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(block.get("id"), str) or not isinstance(given, dict):
        raise RefusedError(400, "a tool_use has id and name, which are text, and input, an object")
    arguments = json.dumps(given, ensure_ascii=False)
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_choice(choice: Any, tools: bool) -> None:
    """Refuse what would be ignored: a choice that is forced, and calls that may not be parallel."""
    if choice is None:
        return
    kinds = ("auto",) if tools else ("auto", "none")
    free = isinstance(choice, dict) and not choice.get("disable_parallel_tool_use")
    if not free or choice.get("type") not in kinds:
        raise RefusedError(400, f"tool_choice {str(choice)[:100]} is not supported, only type auto")


def _tool(tool: Mapping[str, Any]) -> ToolSchema:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise RefusedError(400, "every tool is of type custom and has a name and an input_schema")
    function = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}
