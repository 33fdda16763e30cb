"""How many episodes the engines bear at once, found out by their queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollhook.runtime.slots import Slots

#: seconds between two looks at the queues
INTERVAL = 10.0
#: seconds that a request may wait at an engine before there are too many episodes
CROWDED = 1.0
#: seconds below which there is room for more
ROOMY = 0.1
#: what is left of the limit when the queues are too long
SHRINK = 0.75


class AdaptiveLimit:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989) of the episodes in flight.

    The limit is between `least` and `most`, and starts at `most`. Every look at long queues takes a quarter
    of it, every look at short ones gives `least` back.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = min(least, most), most
        self.limit = most

    def look(self, queue_seconds: float | None) -> int:
        """Take the mean time that requests wait at the engines, None if unknown; return the new limit."""
        if queue_seconds is not None and queue_seconds > CROWDED:
            self.limit = max(self.least, int(self.limit * SHRINK))
        elif queue_seconds is None or queue_seconds < ROOMY:
            self.limit = min(self.most, self.limit + self.least)
        return self.limit


async def follow_pressure(
    slots: Slots, least: int, pressure: Callable[[], float | None], sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Let the limit of `slots` follow the engines' queue times, for ever.

    While no slot is in use nothing queues, whatever the last request had to wait.
    """
    adaptive = AdaptiveLimit(least, slots.limit)
    while True:
        await sleep(INTERVAL)
        slots.limit = adaptive.look(pressure() if slots.used else None)
