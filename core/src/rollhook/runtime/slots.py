"""The slots of episodes in flight, training and evaluation alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable


class Slots:
    """At most `limit` slots in use, given out in the order in which they are asked for.

    The limit may change at any time; slots in use stay so. `async with slots:` holds one.
    """

    def __init__(self, limit: int, changed: Callable[[], None] = lambda: None) -> None:
        self.used = 0
        self._limit = limit
        self._changed = changed
        self._asked: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def limit(self) -> int:
        """How many may be in use."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._give()
        self._changed()

    @property
    def free(self) -> int:
        """How many a newcomer could have at once: none while others wait."""
        waiting = any(not asked.done() for asked, _ in self._asked)
        return 0 if waiting else max(0, self._limit - self.used)

    def ask(self, count: int = 1) -> asyncio.Future[None]:
        """Take a place in the queue for `count` slots, to be held by `holding`."""
        asked = asyncio.get_running_loop().create_future()
        self._asked.append((asked, count))
        self._give()
        return asked

    @contextlib.asynccontextmanager
    async def holding(self, asked: asyncio.Future[None], count: int = 1) -> AsyncIterator[None]:
        """Wait for the `count` slots that were asked for, and hold them while the block runs."""
        try:
            await asked
            yield
        finally:
            if asked.done() and not asked.cancelled():
                self.used -= count
            else:
                asked.cancel()
            self._give()
            self._changed()

    async def __aenter__(self) -> None:
        asked = self.ask()
        try:
            await asked
        except asyncio.CancelledError:
            if not asked.cancelled():  # given in the same moment
                self._release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        self.used -= 1
        self._give()
        self._changed()

    def _give(self) -> None:
        while self._asked:
            asked, count = self._asked[0]
            if not asked.done():
                if self.used and self.used + count > self._limit:
                    return
                self.used += count
                asked.set_result(None)
            self._asked.popleft()
