"""What a pool has done and spent: counts, sandbox-seconds, cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Protocol


class Lived(Protocol):
    """A sandbox as far as it costs."""

    @property
    def created(self) -> float:
        """Since when it is there."""

    @property
    def price(self) -> float | None:
        """The price of a second; None: not known."""


class Accounts:
    """The books of one pool; times in seconds on the pool's clock."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def ended(self, one: Lived, now: float) -> None:
        """Take in a sandbox that was deleted."""
        lived = now - one.created
        self.seconds["alive"] += lived
        self.seconds["cost"] += lived * (one.price or 0.0)
        self.counts["unpriced"] += one.price is None

    def stats(self, alive: Collection[Lived], creating: int, now: float) -> dict[str, float]:
        """Return counts and seconds since the start, and what is alive now.

        `sandbox/cost` is there only when the price of every sandbox is known.
        """
        counts, seconds = self.counts, self.seconds
        found = {
            "sandbox/live": len(alive),
            "sandbox/creating": creating,
            "sandbox/acquired": counts["acquired"],
            "sandbox/creates": counts["creates"],
            "sandbox/adopted": counts["adopted"],
            "sandbox/create_retries": counts["retries"],
            "sandbox/create_failures": counts["failures"],
            "sandbox/seconds": seconds["alive"] + sum(now - one.created for one in alive),
            "sandbox/unpriced": counts["unpriced"] + sum(one.price is None for one in alive),
            "sandbox/create_seconds_mean": seconds["create"] / max(1, counts["creates"]),
            "sandbox/wait_seconds_mean": seconds["wait"] / max(1, counts["acquired"]),
        }
        if counts["creates"] and not found["sandbox/unpriced"]:
            running = sum((now - one.created) * (one.price or 0.0) for one in alive)
            found["sandbox/cost"] = seconds["cost"] + running
        return {name: float(value) for name, value in found.items()}
