"""The forms in which model families write tool calls, by the names of SGLang's and vLLM's parsers.

A form says where a block of calls opens and closes in a reply's text, and what a block means. What is no
well-formed block stays text, so that nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollhook.messages import ToolCall, ToolSchema
from rollhook.reply.values import load, parameters, typed


class MalformedCallError(ValueError):
    """A block is no call."""


class OpenCallError(MalformedCallError):
    """A block is no call yet: what looks like its end is inside a value."""


@dataclass(frozen=True)
class Block:
    """A block at the front of a text: where it ends, and its calls; none if it is text."""

    end: int
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls.

    `openings` and `closing` are the marks around a block; without `closing` it goes on to the end of the
    reply. `parse` gets what is between the marks, of a `whole` form all of it. `whole`: a block is all of the
    content or none of it. `frames` are control tokens inside a block. `signs`: a chat template of the
    family contains one.
    """

    name: str
    openings: tuple[str, ...]
    closing: str
    parse: Callable[[str, Sequence[ToolSchema]], list[ToolCall]]
    signs: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    whole: bool = False
    frames: tuple[str, ...] = ()

    @property
    def marks(self) -> frozenset[str]:
        """Texts of the control tokens that `parse` needs to see."""
        return frozenset((*self.openings, self.closing, *self.frames))

    def find(self, text: str) -> int | None:
        """Return where the first block opens."""
        if self.whole:
            front = len(text) - len(text.lstrip())
            return front if text.startswith(self.openings, front) else None
        return min((at for mark in self.openings if (at := text.find(mark)) >= 0), default=None)

    def take(self, text: str, tools: Sequence[ToolSchema], *, final: bool, tried: int = 0) -> Block | None:
        """Return the block that opens `text`; None while more of the reply may follow and is needed.

        The first `tried` characters were given before without an end.
        """
        opening = next(len(mark) for mark in self.openings if text.startswith(mark))
        if not self.closing:
            return self._rest(text, 0 if self.whole else opening, tools) if final else None
        end = max(opening, tried - len(self.closing) + 1)
        while (end := text.find(self.closing, end)) >= 0:
            after = end + len(self.closing)
            try:
                return Block(after, tuple(self.parse(text[opening:end], tools)))
            except OpenCallError:
                end = after
            except MalformedCallError:
                return Block(after)
        return Block(opening) if final else None

    def _rest(self, text: str, start: int, tools: Sequence[ToolSchema]) -> Block:
        try:
            return Block(len(text), tuple(self.parse(text[start:], tools)))
        except MalformedCallError:
            return Block(len(text))


def _call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    """Return a call; one without an id gets its own from the session."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise MalformedCallError("a call has no name")
    if isinstance(arguments, str):
        arguments = _load(arguments)
    if not isinstance(arguments, Mapping):
        raise MalformedCallError("a call's arguments are no object")
    function = {"name": name.strip(), "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _load(text: str) -> Any:
    try:
        return load(text)
    except json.JSONDecodeError as error:
        kind = OpenCallError if error.msg.startswith("Unterminated string") else MalformedCallError
        raise kind(str(error)) from error
    except ValueError as error:
        raise MalformedCallError(str(error)) from error


def _from_object(value: Any) -> ToolCall:
    if not isinstance(value, Mapping):
        raise MalformedCallError("a call is no object")
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    return _call(
        value.get("name"), {} if arguments is None else arguments, call_id if isinstance(call_id, str) else ""
    )


def json_calls(block: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
    """Parse one JSON object `{"name": ..., "arguments": {...}}`, or a list of them."""
    value = _load(block)
    return [_from_object(each) for each in (value if isinstance(value, list) else [value])]


def json_sequence(block: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
    """Parse JSON objects one after another, `;` or white space between them (Llama 3)."""
    rest, calls = block.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        value, rest = _load_first(rest)
        calls.append(_from_object(value))
        rest = rest.lstrip("; \n")
    return _some(calls)


_NAMED = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?(?=\s*\{)"
)


def mistral_calls(block: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
    """Parse a JSON list of calls, or `name[ARGS]{...}` one after another (Mistral)."""
    if block.lstrip().startswith("["):
        return json_calls(block, tools)
    rest, calls = block, []
    while rest.strip():
        if (head := _NAMED.match(rest)) is None:
            raise MalformedCallError("no name stands before a call's arguments")
        value, rest = _load_first(rest[head.end() :].lstrip())
        calls.append(_call(head[1], value, head[2] or ""))
    return _some(calls)


def _load_first(text: str) -> tuple[Any, str]:
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error
    return value, text[end:]


def _some(calls: list[ToolCall]) -> list[ToolCall]:
    if not calls:
        raise MalformedCallError("a block holds no call")
    return calls


@dataclass(frozen=True)
class Tagged:
    """Parses calls whose arguments are tags of their own, typed by the tool's schema.

    `head` matches a call's beginning with its `name`, `argument` one argument with `key`, `value` and perhaps
    `string` ("true": the value is text, "false": JSON), `foot` a call's end. `opens` and `closes` are the
    tags around a value.
    """

    head: re.Pattern[str]
    argument: re.Pattern[str]
    foot: re.Pattern[str]
    opens: str
    closes: str

    def __call__(self, block: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
        """Return the calls of a block."""
        at, calls = 0, []
        while block[at:].strip():
            head = self._match(self.head, block, at)
            schemas, arguments, at = parameters(tools, head["name"]), {}, head.end()
            while (found := self.argument.match(block, at)) is not None:
                key, text, at = found["key"].strip(), found["value"], found.end()
                stated = found.groupdict().get("string")
                schema = {"type": "string"} if stated == "true" else {} if stated else schemas.get(key)
                arguments[key] = typed(text, schema)
            at = self._match(self.foot, block, at).end()
            calls.append(_call(head["name"], arguments))
        return _some(calls)

    def _match(self, pattern: re.Pattern[str], block: str, at: int) -> re.Match[str]:
        if (found := pattern.match(block, at)) is not None:
            return found
        if block.rfind(self.opens) > block.rfind(self.closes):
            raise OpenCallError("a value goes on")
        raise MalformedCallError("a tag is missing")


@dataclass(frozen=True)
class Framed:
    """Parses calls framed by control tokens, arguments as JSON.

    `call` matches one, with `name`, `arguments` and perhaps `id`.
    """

    call: re.Pattern[str]

    def __call__(self, block: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
        """Return the calls of a block."""
        at, calls = 0, []
        while block[at:].strip():
            if (found := self.call.match(block, at)) is None:
                raise MalformedCallError("a frame is broken")
            calls.append(_call(found["name"], found["arguments"], found.groupdict().get("id") or ""))
            at = found.end()
        return _some(calls)
