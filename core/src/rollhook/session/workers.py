"""What the gateway knows of the engines' workers, and the gate that weight updates close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollhook.router import Worker, WorkerLoad


@dataclass
class Entry:
    """One worker: its load from here, its state, and how long its last request queued (seconds).

    `queued` is how many requests wait at the engine, where it reports that.
    """

    worker: Worker
    version: int
    healthy: bool = True
    draining: bool = False
    open_sessions: int = 0
    tokens_in_flight: int = 0
    queued: int | None = None
    queue_seconds: float = 0.0
    failures: int = 0
    probe: asyncio.Task[bool] | None = None


class WorkerTable:
    """The workers by (URL, rank), in a fixed order, with the load that comes from here and from elsewhere."""

    def __init__(self) -> None:
        self.version = 0
        self._entries: dict[Worker, Entry] = {}
        self._remote: dict[Worker, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, worker: Worker | None) -> Entry | None:
        """Return a worker's entry, None when there is no such worker (any more)."""
        return None if worker is None else self._entries.get(worker)

    @property
    def workers(self) -> list[Worker]:
        """All workers, whatever their state."""
        return list(self._entries)

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Replace the workers; those that stay keep their load."""
        self.version = version
        old = self._entries
        self._entries = {}
        for worker in sorted(workers, key=lambda w: (w.url, -1 if w.dp_rank is None else w.dp_rank)):
            entry = old.get(worker) or Entry(worker, version)
            entry.version, entry.healthy, entry.failures = version, True, 0
            self._entries[worker] = entry

    def set_version(self, version: int, failed: Container[Worker]) -> None:
        """Note that all workers but the failed ones serve a version now; the failed ones are not offered."""
        self.version = version
        for entry in self._entries.values():
            entry.healthy = entry.worker not in failed
            if entry.healthy:
                entry.version, entry.failures = version, 0

    def offered(self) -> list[Entry]:
        """Return the entries that may get requests: healthy, not draining, at the current version."""
        return [
            entry
            for entry in self._entries.values()
            if entry.healthy and not entry.draining and entry.version == self.version
        ]

    def load(self, entry: Entry) -> WorkerLoad:
        """Return what a router policy sees of a worker: its load from here and from other processes."""
        sessions, tokens = self._remote.get(entry.worker, (0, 0))
        return WorkerLoad(
            entry.worker, entry.open_sessions + sessions, entry.tokens_in_flight + tokens, entry.queued
        )

    def local_loads(self) -> dict[Worker, tuple[int, int]]:
        """Return (open sessions, tokens in flight) of each worker as far as they come from here."""
        return {entry.worker: (entry.open_sessions, entry.tokens_in_flight) for entry in self}

    def set_remote(self, loads: Mapping[Worker, tuple[int, int]]) -> None:
        """Replace the loads that come from other processes: the sum of their `local_loads`."""
        self._remote = dict(loads)


class Gate:
    """Open, or paused around a weight update; counts the seconds it was paused."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open = asyncio.Event()
        self._open.set()
        self._since: float | None = None
        self._total = 0.0
        #: how often it was closed
        self.pauses = 0

    @property
    def paused(self) -> bool:
        """Whether requests wait now."""
        return self._since is not None

    def seconds(self) -> float:
        """Return the seconds paused so far, the current pause included."""
        return self._total + (0.0 if self._since is None else self._now() - self._since)

    def pause(self) -> None:
        """Close the gate; nothing when it is closed."""
        if self._since is None:
            self._since = self._now()
            self.pauses += 1
            self._open.clear()

    def resume(self) -> None:
        """Open the gate; nothing when it is open."""
        if self._since is not None:
            self._total = self.seconds()
            self._since = None
            self._open.set()

    async def wait(self, timeout: float) -> None:
        """Return once the gate is open; TimeoutError after `timeout` seconds."""
        if self.paused:
            await asyncio.wait_for(self._open.wait(), timeout)

    async def open_or_done(self, task: asyncio.Task[object]) -> None:
        """Return once the gate is open or the task is done."""
        opened = asyncio.ensure_future(self._open.wait())
        try:
            await asyncio.wait({task, opened}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
