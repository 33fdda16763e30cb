"""The sandboxes of a rollout worker that died: deleted by the driver, which has their leases."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rollhook.sandbox.backend import SandboxBackend
from rollhook.sandbox.deletions import Backoff, Deletions, PoolTimes
from rollhook.sandbox.lease import PREFIX, Lease, LeaseJournal

logger = logging.getLogger(__name__)

#: deletes under way at once
_AT_ONCE = 16


class Orphans:
    """Deletes what leases stand for, in the background, until `aclose`."""

    def __init__(self, backend: SandboxBackend, journal: LeaseJournal, run_id: str, attempt: int) -> None:
        self._backend = backend
        self._owner = (run_id, attempt)
        times = PoolTimes()
        backoff = Backoff(times, random.Random())  # noqa: S311 - jitter
        self._deletions = Deletions(backend, journal, times, backoff, time.monotonic, asyncio.sleep)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        #: nonces under which a sandbox may still appear: its create was under way when the worker died
        self._unsure: list[str] = []

    def take(self, leases: Iterable[Mapping[str, Any]]) -> None:
        """Delete the sandboxes of these leases, as `Lease.data` has them, with `sandbox_id` where known."""
        for lease in leases:
            task = asyncio.ensure_future(self._delete(dict(lease)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Finish, and look once more for what was just being made when its worker died."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        unsure, self._unsure = self._unsure, []
        for nonce in unsure:
            try:
                for info in await self._backend.list({PREFIX + "nonce": nonce}):
                    await self._backend.delete(info.id)
            except Exception as error:  # noqa: BLE001 - its lease lets a later attempt, or anyone, reap it
                logger.warning("a sandbox with nonce %s may be left: %s", nonce, error)

    async def _delete(self, data: dict[str, Any]) -> None:
        sandbox_id = data.pop("sandbox_id", None)
        lease = Lease(*self._owner, **data)
        if sandbox_id is None:
            self._unsure.append(lease.nonce)
        async with self._slots:
            await self._deletions.delete(lease, sandbox_id, strays=True)
