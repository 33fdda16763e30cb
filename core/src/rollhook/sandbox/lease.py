"""Leases: who asked for a sandbox, and until when; written before the request, readable by anyone.

A lease is a `lease` entry in its attempt's journal and labels on the sandbox at its provider. The random
nonce ties the two together. `lease_created` adds the sandbox's id, `lease_assigned` the episode of one that
was created ahead, `lease_released` closes it once the sandbox is deleted, `lease_lost` says that it could
not be deleted.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollhook.journal import Entry

PREFIX = "rollhook."
#: how far beyond its lifetime a sandbox's label lets strangers delete it, in seconds
EXPIRY_MARGIN = 300.0
#: lifetime assumed where none is asked for, in seconds
DEFAULT_LIFETIME = 24 * 3600.0
_LATER = ("lease_created", "lease_assigned", "lease_released", "lease_lost")


class LeaseJournal(Protocol):
    """Where a pool writes its leases: `rollhook.journal.Journal`, or a worker's channel to it."""

    def append(self, event: str, /, **data: Any) -> int:
        """Add an entry; durable with the next commit."""

    async def append_durable(self, event: str, /, **data: Any) -> int:
        """Add an entry and return once it is durable."""


@dataclass(frozen=True)
class Lease:
    """The right to one sandbox; `expiry` in epoch seconds, for those who cannot read the journal.

    `price` is that of a second, where it is known; it stands in the journal only.
    """

    run_id: str
    attempt: int
    host: str
    expiry: float
    nonce: str
    episode: str = ""
    box: str = ""
    price: float | None = None

    @classmethod
    def new(
        cls,
        *,
        run_id: str,
        attempt: int,
        now: float,
        lifetime: float | None,
        episode: str = "",
        box: str = "",
        price: float | None = None,
    ) -> Lease:
        """Return a fresh lease that expires `lifetime` seconds (and a margin) after the epoch time `now`."""
        expiry = now + (DEFAULT_LIFETIME if lifetime is None else lifetime) + EXPIRY_MARGIN
        return cls(run_id, attempt, socket.gethostname(), expiry, secrets.token_hex(8), episode, box, price)

    def labels(self) -> dict[str, str]:
        """Return what the provider keeps with the sandbox: short text without spaces."""
        labels = {
            "run": self.run_id,
            "attempt": str(self.attempt),
            "host": self.host,
            "expiry": str(int(self.expiry)),
            "nonce": self.nonce,
            "episode": self.episode,
            "box": self.box,
        }
        return {PREFIX + key: value for key, value in labels.items() if value}

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> Lease | None:
        """Return the lease that labels carry; None when they are not (wholly) ours."""
        try:
            return cls(
                run_id=labels[PREFIX + "run"],
                attempt=int(labels[PREFIX + "attempt"]),
                host=labels.get(PREFIX + "host", ""),
                expiry=float(labels[PREFIX + "expiry"]),
                nonce=labels[PREFIX + "nonce"],
                episode=labels.get(PREFIX + "episode", ""),
                box=labels.get(PREFIX + "box", ""),
            )
        except (KeyError, ValueError, TypeError):
            return None

    def data(self) -> dict[str, Any]:
        """Return what the journal keeps beside run and attempt, which its header names."""
        return {
            "nonce": self.nonce,
            "host": self.host,
            "expiry": self.expiry,
            "episode": self.episode,
            "box": self.box,
            **({} if self.price is None else {"price": self.price}),
        }


@dataclass(frozen=True)
class LeaseState:
    """What a journal says of a lease: `sandbox_id` once created, `open` until its sandbox is deleted.

    `taken_at` is the writer's wall clock, in epoch seconds.
    """

    nonce: str
    host: str
    expiry: float
    episode: str
    box: str
    taken_at: float
    sandbox_id: str | None = None
    open: bool = True
    price: float | None = None


def leases(entries: Iterable[Entry]) -> dict[str, LeaseState]:
    """Return the leases of a journal by nonce, in the order in which they were taken."""
    found: dict[str, LeaseState] = {}
    for entry in entries:
        data = entry.data
        if entry.event == "lease":
            found[data["nonce"]] = LeaseState(
                data["nonce"],
                data["host"],
                data["expiry"],
                data["episode"],
                data["box"],
                entry.time,
                price=data.get("price"),
            )
        elif entry.event in _LATER and data["nonce"] in found:
            before = found[data["nonce"]]
            found[before.nonce] = dataclasses.replace(
                before,
                episode=data.get("episode") or before.episode,
                box=data.get("box") or before.box,
                sandbox_id=data.get("sandbox_id") or before.sandbox_id,
                open=before.open and entry.event != "lease_released",
            )
    return found
