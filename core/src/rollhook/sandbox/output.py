"""Output of unbounded length in bounded memory: the head and the tail are kept, the middle is counted."""

from __future__ import annotations

from collections import deque


class Capture:
    """Keeps at most `limit` bytes of a stream: the first half of it and the last half.

    `total` counts every byte fed, so that what was cut is known exactly.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"a capture cannot keep {limit} bytes")
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit

    def feed(self, chunk: bytes) -> None:
        """Add a chunk."""
        self.total += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk or not self._tail_limit:
            return
        chunk = chunk[-self._tail_limit :]
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_limit:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether bytes were dropped."""
        return self.total > self.limit

    def value(self) -> bytes:
        """Return the head and the tail, without a mark between them."""
        if not self._tail:
            return bytes(self._head)
        tail = b"".join(self._tail)[-self._tail_limit :]
        return bytes(self._head) + tail
