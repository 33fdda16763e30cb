"""What a sandbox costs, as far as the recipe says: an unknown price stays unknown and is never 0."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from rollhook.component import Config

_GIB = 1 << 30


class Prices(Config):
    """Key `prices` of every sandbox backend; each in any one currency, null where it is not known."""

    per_hour: Annotated[
        NonNegativeFloat | None, Field(description="price of one sandbox for an hour, whatever its size")
    ] = None
    cpu_hour: Annotated[
        NonNegativeFloat | None, Field(description="price of one processor for an hour, added to per_hour")
    ] = None
    gib_hour: Annotated[
        NonNegativeFloat | None,
        Field(description="price of one GiB of memory for an hour, added to per_hour"),
    ] = None

    def per_second(self, cpus: float | None, memory_bytes: int | None) -> float | None:
        """Return the price of a sandbox of this size for a second; None where it cannot be known.

        A size that is None is unknown: with a price that depends on it the whole is unknown.
        """
        gib = None if memory_bytes is None else memory_bytes / _GIB
        parts = [(self.per_hour, 1.0), (self.cpu_hour, cpus), (self.gib_hour, gib)]
        priced = [(price, amount) for price, amount in parts if price is not None]
        if not priced or any(amount is None and price > 0 for price, amount in priced):
            return None
        return sum(price * (amount or 0.0) for price, amount in priced) / 3600.0
