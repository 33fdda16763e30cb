"""Keys and values of finished prefixes, shared by all later requests that begin with the same tokens.

A radix tree over token ids, as SGLang's RadixAttention has it (Zheng et al., 2024, arXiv:2312.07104): a node
holds the tensors of its own stretch of tokens only, so replies to one prompt share the prompt's. When the
tree is full, the leaf that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Ids = tuple[int, ...]
#: one tensor [heads, tokens, size] per layer for its keys and one for its values, in the model's order
Tensors = list[Tensor]


@dataclass(eq=False)
class Node:
    """A stretch of tokens that follows its parent's."""

    #: under which its parent has it: its first token, or a namespace
    edge: int | str
    ids: Ids
    tensors: Tensors
    parent: Node | None = None
    children: dict[int | str, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class PrefixCache:
    """The tree, at most `capacity` bytes of it. Not safe to call from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.clear()

    def clear(self) -> None:
        """Drop everything, as after new weights."""
        self.size = 0
        self._root = Node("", (), [])
        # a node stands behind its children, so the first is always a leaf
        self._used: OrderedDict[Node, None] = OrderedDict()

    def match(self, namespace: str, ids: Ids) -> tuple[int, list[Tensors]]:
        """Return how many tokens at the beginning of `ids` are held, and their tensors stretch by stretch."""
        node, at, stretches = self._root.children.get(namespace), 0, list[Tensors]()
        path = [node] if node is not None else []
        while node is not None and at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = _common(child.ids, ids, at)
            stretches.append([tensor[:, :same] for tensor in child.tensors])
            path.append(child)
            at += same
            node = child if same == len(child.ids) else None
        self._touch(path)
        return at, stretches

    def insert(self, namespace: str, ids: Ids, tensors: Callable[[int, int], Tensors]) -> None:
        """Hold all of `ids`; `tensors(start, stop)` gives those of a stretch, which are copied."""
        node = self._root.children.setdefault(namespace, Node(namespace, (), [], self._root))
        path, at = [node], 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = _common(child.ids, ids, at)
            node = child if same == len(child.ids) else self._split(child, same)
            path.append(node)
            at += same
        if at < len(ids):
            leaf = Node(ids[at], ids[at:], tensors(at, len(ids)), node)
            if leaf.size <= self.capacity:
                leaf.tensors = [tensor.clone() for tensor in leaf.tensors]
                node.children[leaf.edge] = leaf
                self.size += leaf.size
                path.append(leaf)
        self._touch(path)
        while self.size > self.capacity:
            self._evict()

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two and return the upper one."""
        assert node.parent is not None
        upper = Node(node.edge, node.ids[:at], [t[:, :at].clone() for t in node.tensors], node.parent)
        node.parent.children[node.edge] = upper
        # copies, so that dropping either frees its memory
        node.ids, node.tensors = node.ids[at:], [t[:, at:].clone() for t in node.tensors]
        node.parent, node.edge = upper, node.ids[0]
        upper.children[node.edge] = node
        return upper

    def _touch(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self._used[node] = None
            self._used.move_to_end(node)

    def _evict(self) -> None:
        leaf, _ = self._used.popitem(last=False)
        assert leaf.parent is not None
        del leaf.parent.children[leaf.edge]
        self.size -= leaf.size


def _common(stretch: Ids, ids: Ids, at: int) -> int:
    """Return how many tokens of `stretch` stand in `ids` from `at` on."""
    if ids[at : at + len(stretch)] == stretch:
        return len(stretch)
    pairs = zip(stretch, ids[at:], strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(stretch), len(ids) - at))
