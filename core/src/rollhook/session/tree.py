"""The tree of turns behind a session: what was said, the exact tokens of it, and what may train."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollhook.messages import Message, ToolSchema
from rollhook.session.spill import Spill, Spilled

#: a digest of what makes a message the one that it is
Key = bytes
Span = tuple[int, int, int, int]

#: bytes of messages that a session keeps in memory
TEXT_BYTES = 32 << 10


def message_key(message: Message, *, bare: bool = False) -> Key:
    """Return what makes two messages the same, as a digest of 16 bytes.

    None, "" and [] are one, a call's index is nothing, and its arguments are compared as JSON, for a client
    may parse them and write them anew. `bare` leaves the reasoning out.
    """
    reasoning = "" if bare else message.get("reasoning_content")
    parts = [
        message["role"],
        message.get("content"),
        reasoning,
        message.get("tool_call_id"),
        message.get("name"),
    ]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]
    digest = blake2b(digest_size=16)
    for part in parts:
        raw = str(part or "").encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(raw))
        digest.update(raw)
    return digest.digest()


def _arguments(given: Any) -> str:
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        parsed = json.loads(text, parse_float=_number)
        return json.dumps(parsed, sort_keys=True) if parsed else ""
    except (TypeError, ValueError, RecursionError):
        return str(given)


def _number(text: str) -> float | int:
    """Return a number of JSON; 1.0 is 1, as JavaScript writes it."""
    value = float(text)
    return int(value) if value.is_integer() else value


@dataclass(eq=False, slots=True)
class Node:
    """One committed turn: what was appended to its parent, and the reply.

    `prompt` are the ids that were appended (never trained), `completion` the ids as the engine emitted
    them, with one log-probability each; `spans` are (start, end, version_first, version_last) relative
    to the completion's start. `keys` covers the appended messages and the reply, `bare` is the reply's key
    without its reasoning; `text` holds these messages as JSON. `seq` counts commits; the request came
    when `asked` turns were committed.
    """

    parent: Node | None
    text: bytes | Spilled
    keys: tuple[Key, ...]
    bare: Key
    prompt: array[int]
    completion: array[int]
    logprobs: array[float]
    spans: tuple[Span, ...]
    finish_reason: str
    seq: int
    asked: int
    tools: str = ""
    children: list[Node] = field(default_factory=list, repr=False)
    message_count: int = field(init=False)
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        before, count = (0, 0) if self.parent is None else (self.parent.end, self.parent.message_count)
        self.message_count = count + len(self.keys)
        self.start = before + len(self.prompt)
        self.end = self.start + len(self.completion)

    @property
    def messages(self) -> list[Message]:
        """The appended messages and the reply; OSError when they were spilled and the disk fails."""
        messages: list[Message] = orjson.loads(
            self.text.read() if isinstance(self.text, Spilled) else self.text
        )
        return messages

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def token_ids(self) -> array[int]:
        """Return all ids of the path, in order."""
        ids = array("i")
        for node in self.path():
            ids.extend(node.prompt)
            ids.extend(node.completion)
        return ids

    def conversation(self) -> list[Message]:
        """Return all messages of the path, in order."""
        return [message for node in self.path() for message in node.messages]


@dataclass(frozen=True)
class Leaf:
    """One path through the tree as it is trained on (see `rollhook.records.Sample`).

    `token_ids` int32[T]; `mask` uint8[T], 1 on generated tokens that train here; `logprobs` float32[T], 0
    where mask is 0; `spans` int32[S, 4] over the masked-in tokens; `messages` the whole conversation,
    `replies` the places (start, end) in `token_ids` of what was generated, trained here or not.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: NDArray[np.int32]
    messages: tuple[Message, ...] = ()
    finish_reason: str = ""
    tools: tuple[ToolSchema, ...] = ()
    replies: tuple[tuple[int, int], ...] = ()


class Tree:
    """The turns of one session; nothing is ever removed from it.

    Of their messages it keeps about `text_bytes` in memory; beyond that they are spilled.
    """

    def __init__(self, spill: Spill | None = None, text_bytes: int = TEXT_BYTES) -> None:
        self.roots: list[Node] = []
        self.last: Node | None = None
        self.count = 0
        self._spill = spill
        self._text_bytes = text_bytes
        self._in_memory: list[Node] = []
        self._tools: dict[str, str] = {}
        self._size = 0

    def attach(self, keys: Sequence[Key], tools: str = "", *, thin: bool = False) -> Node | None:
        """Return the deepest node whose whole path is a prefix of `keys`; None: a new root.

        Of equals it is the latest. A path with other tools than the request's is another conversation.
        With `thin` a reply may come back without its reasoning; one that matches as it is comes first.
        """
        best: tuple[int, bool, int, Node] | None = None
        open_nodes = [(node, 0, True) for node in self.roots if node.tools == tools]
        while open_nodes:
            node, offset, whole = open_nodes.pop()
            end = offset + len(node.keys)
            if end > len(keys) or tuple(keys[offset : end - 1]) != node.keys[:-1]:
                continue
            if keys[end - 1] != node.keys[-1]:
                if not thin or keys[end - 1] != node.bare:
                    continue
                whole = False
            if best is None or (end, whole, node.seq) > best[:3]:
                best = (end, whole, node.seq, node)
            open_nodes += [(child, end, whole) for child in node.children]
        return None if best is None else best[3]

    def commit(self, node: Node) -> None:
        """Add a finished turn under its parent."""
        (self.roots if node.parent is None else node.parent.children).append(node)
        node.tools = self._tools.setdefault(node.tools, node.tools)
        self.last = node
        self.count += 1
        self._in_memory.append(node)
        self._size += len(node.text) if isinstance(node.text, bytes) else 0
        if self._spill is not None and self._size > self._text_bytes:
            self._spill_to(self._spill)

    def _spill_to(self, spill: Spill) -> None:
        for node in self._in_memory:
            if isinstance(node.text, bytes):
                node.text = spill.write(node.text) or node.text
        self._in_memory, self._size = [], 0

    def leaves(self) -> list[Leaf]:
        """Return one leaf per path, earliest first; a completion that they share trains in the first only.

        A reply that was not gone on from, and whose request was made again after it, is left out.
        """
        ends = sorted(self._ends(), key=lambda node: node.seq)
        trained: set[Node] = set()
        return [_leaf(node, trained) for node in ends]

    def _ends(self) -> list[Node]:
        ends, stack = [], list(self.roots)
        while stack:
            node = stack.pop()
            stack += node.children
            if not node.children and not _replaced(node):
                ends.append(node)
        return ends


def _replaced(node: Node) -> bool:
    """Whether a leaf's request was made again under the same parent once the leaf was there.

    Calls that overlap are parallel samples, and at a root the same request may be a sub-agent's.
    """
    return node.parent is not None and any(
        other.asked >= node.seq and other.keys[:-1] == node.keys[:-1] and other.tools == node.tools
        for other in node.parent.children
        if other is not node
    )


def _leaf(end: Node, trained: set[Node]) -> Leaf:
    mask = np.zeros(end.end, np.uint8)
    logprobs = np.zeros(end.end, np.float32)
    spans: list[Span] = []
    path = end.path()
    for node in path:
        if node in trained:
            continue
        trained.add(node)
        mask[node.start : node.end] = 1
        logprobs[node.start : node.end] = node.logprobs
        spans += [(node.start + a, node.start + b, first, last) for a, b, first, last in node.spans]
    return Leaf(
        token_ids=np.array(end.token_ids(), np.int32),
        mask=mask,
        logprobs=logprobs,
        spans=np.array(spans, np.int32).reshape(-1, 4),
        messages=tuple(message for node in path for message in node.messages),
        finish_reason=end.finish_reason,
        tools=tuple(orjson.loads(end.tools)) if end.tools else (),
        replies=tuple((node.start, node.end) for node in path),
    )
