"""Draws that are the same on every machine and Python version, unlike those of `random`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Stream:
    """An endless stream of draws that depends on its key alone."""

    def __init__(self, *key: object) -> None:
        self._key = "\x1f".join(str(part) for part in key).encode()
        self._count = 0

    def below(self, n: int) -> int:
        """Return an integer in [0, n)."""
        block = hashlib.sha256(self._key + b"\x1f%d" % self._count).digest()
        self._count += 1
        return int.from_bytes(block[:8], "big") % n

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different items in a drawn order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]
