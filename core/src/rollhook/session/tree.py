"""The tree of turns behind a session: what was said, the exact tokens of it, and what may train."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollhook.messages import Message

Key = tuple[Any, ...]
Span = tuple[int, int, int, int]


def message_key(message: Message) -> Key:
    """Return what makes two messages the same; None, "" and [] are one, a call's index is nothing."""
    calls = tuple(
        (call.get("id") or "", (call.get("function") or {}).get("name") or "", _arguments(call))
        for call in message.get("tool_calls") or ()
    )
    return (
        message["role"],
        message.get("content") or "",
        message.get("reasoning_content") or "",
        calls,
        message.get("tool_call_id") or "",
        message.get("name") or "",
    )


def _arguments(call: Any) -> str:
    arguments = (call.get("function") or {}).get("arguments") or ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)


@dataclass(eq=False)
class Node:
    """One committed turn: what was appended to its parent, and the reply.

    `prompt` are the ids that were appended (never trained), `completion` the ids as the engine emitted
    them, with one log-probability each; `spans` are (start, end, version_first, version_last) relative
    to the completion's start. `keys` covers the appended messages and the reply.
    """

    parent: Node | None
    messages: tuple[Message, ...]
    keys: tuple[Key, ...]
    prompt: array[int]
    completion: array[int]
    logprobs: array[float]
    spans: tuple[Span, ...]
    finish_reason: str
    seq: int
    tools: str = ""
    children: list[Node] = field(default_factory=list, repr=False)
    message_count: int = field(init=False)
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        before, count = (0, 0) if self.parent is None else (self.parent.end, self.parent.message_count)
        self.message_count = count + len(self.messages)
        self.start = before + len(self.prompt)
        self.end = self.start + len(self.completion)

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
    where mask is 0; `spans` int32[S, 4] over the masked-in tokens; `messages` the whole conversation.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: NDArray[np.int32]
    messages: tuple[Message, ...] = ()
    finish_reason: str = ""


class Tree:
    """The turns of one session; nothing is ever removed from it."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.last: Node | None = None
        self.count = 0

    def attach(self, keys: Sequence[Key], tools: str = "") -> Node | None:
        """Return the deepest node whose whole path is a prefix of `keys`; None: a new root.

        Of equals it is the latest. A path with other tools than the request's is another conversation.
        """
        best: tuple[int, int, Node] | None = None
        open_nodes = [(node, 0) for node in self.roots if node.tools == tools]
        while open_nodes:
            node, offset = open_nodes.pop()
            end = offset + len(node.keys)
            if end > len(keys) or tuple(keys[offset:end]) != node.keys:
                continue
            if best is None or (end, node.seq) > best[:2]:
                best = (end, node.seq, node)
            open_nodes += [(child, end) for child in node.children]
        return None if best is None else best[2]

    def commit(self, node: Node) -> None:
        """Add a finished turn under its parent."""
        (self.roots if node.parent is None else node.parent.children).append(node)
        self.last = node
        self.count += 1

    def leaves(self) -> list[Leaf]:
        """Return one leaf per path, earliest first; a completion that they share trains in the first only."""
        ends = sorted(self._ends(), key=lambda node: node.seq)
        trained: set[Node] = set()
        return [_leaf(node, trained) for node in ends]

    def _ends(self) -> list[Node]:
        ends, stack = [], list(self.roots)
        while stack:
            node = stack.pop()
            stack += node.children
            if not node.children:
                ends.append(node)
        return ends


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
    )
