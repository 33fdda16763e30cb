"""Deleting sandboxes so that none is forgotten: retried within a deadline, journalled, loud when it fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollhook.errors import RollhookError
from rollhook.sandbox.backend import SandboxBackend
from rollhook.sandbox.lease import PREFIX, Lease, LeaseJournal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolTimes:
    """A pool's own times, in seconds."""

    backoff_first: float = 0.5
    backoff_most: float = 30.0
    #: between two touches of a sandbox whose backend needs them
    keepalive: float = 60.0
    #: how long an abandoned create may take until it is cancelled
    abandoned_create: float = 300.0
    #: how long deleting is retried before it is given up with an error in the log
    delete: float = 120.0
    #: after how long a provider's list is asked again for what a create left whose reply was lost
    look_again: float = 5.0
    #: how long a sandbox that was created ahead may wait for its episode
    warm: float = 600.0


class Backoff:
    """The pause before another try: doubling, jittered, at least what the provider asks for."""

    def __init__(self, times: PoolTimes, rng: random.Random) -> None:
        self._times = times
        self._rng = rng

    def __call__(self, tries: int, error: Exception) -> float:
        """Return seconds after `tries` failed tries; an error may carry `retry_after`."""
        longest = min(self._times.backoff_first * 2.0 ** (tries - 1), self._times.backoff_most)
        asked = getattr(error, "retry_after", None)
        return max(self._rng.uniform(longest / 2, longest), float(asked or 0.0))


class Deletions:
    """Deletes what a lease stands for and closes the lease."""

    def __init__(
        self,
        backend: SandboxBackend,
        journal: LeaseJournal,
        times: PoolTimes,
        backoff: Backoff,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.done = self.retries = self.leaked = 0
        self._backend = backend
        self._journal = journal
        self._times = times
        self._backoff = backoff
        self._clock = clock
        self._sleep = sleep

    async def delete(
        self, lease: Lease, sandbox_id: str | None, strays: bool, tried: asyncio.Event | None = None
    ) -> None:
        """Delete a lease's sandbox, and others under its nonce if there may be any, within the deadline.

        Lists lag, so for others they are asked twice. `tried` is set after the first try. Never raises: what
        could not be deleted is logged and counted.
        """
        deadline = self._clock() + self._times.delete
        for tries in itertools.count(1):
            try:
                async with asyncio.timeout(self._times.delete):
                    await self._once(lease, sandbox_id, strays)
                if strays:
                    if tried is not None:
                        tried.set()
                    await self._sleep(self._times.look_again)
                    async with asyncio.timeout(self._times.delete):
                        await self._strays(lease, sandbox_id)
            except Exception as error:  # noqa: BLE001 - retried, then reported
                if tried is not None:
                    tried.set()
                if self._clock() >= deadline:
                    self._give_up(lease, sandbox_id, error)
                    return
                logger.info("sandbox %s was not deleted (try %d): %s", sandbox_id, tries, error)
                pause = self._backoff(tries, error)
            else:
                self._note("lease_released", nonce=lease.nonce, sandbox_id=sandbox_id)
                return
            self.retries += 1
            await self._sleep(pause)

    async def others(self, lease: Lease, sandbox_id: str | None) -> list[str]:
        """Return the sandboxes under a lease's nonce but this one."""
        found = await self._backend.list({PREFIX + "nonce": lease.nonce})
        return [info.id for info in found if info.id != sandbox_id]

    async def _once(self, lease: Lease, sandbox_id: str | None, strays: bool) -> None:
        if sandbox_id is not None:
            await self._backend.delete(sandbox_id)
            self.done += 1
        if strays:
            await self._strays(lease, sandbox_id)

    async def _strays(self, lease: Lease, sandbox_id: str | None) -> None:
        for other in await self.others(lease, sandbox_id):
            logger.info("deleting sandbox %s, left by a failed create", other)
            await self._backend.delete(other)

    def _give_up(self, lease: Lease, sandbox_id: str | None, error: Exception) -> None:
        self.leaked += 1
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            said = f"no answer within {self._times.delete:g} s"
        logger.error(
            "sandbox %s of run %s could not be deleted for %g s (%s) and may still cost money; "
            "`rollhook sandboxes reap %s` deletes it once the run has ended",
            sandbox_id or f"with nonce {lease.nonce}",
            lease.run_id,
            self._times.delete,
            said,
            lease.run_id,
        )
        self._note("lease_lost", nonce=lease.nonce, sandbox_id=sandbox_id, error=said[:500])

    def _note(self, event: str, **data: Any) -> None:
        try:
            self._journal.append(event, **data)
        except RollhookError as error:
            logger.warning("%s of %s is not in the journal: %s", event, data.get("sandbox_id"), error)
