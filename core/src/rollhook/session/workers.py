"""What is known of the engines' workers, and the gate that weight updates close."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollhook.errors import EngineError
from rollhook.router import Worker, WorkerLoad
from rollhook.session.breaker import Breaker, is_fault

#: the version of a worker that has not yet said that it serves one of ours
NO_VERSION = -1


@dataclass(eq=False)
class Entry:
    """One worker: its load from here, its state, and how long its last request queued (seconds).

    `queued` is how many requests wait at the engine, where it reports that. `up` and `down` count probes of
    its health in a row that went well or not.
    """

    worker: Worker
    version: int
    healthy: bool = True
    draining: bool = False
    open_sessions: int = 0
    requests: int = 0
    tokens_in_flight: int = 0
    queued: int | None = None
    queue_seconds: float = 0.0
    failures: int = 0
    up: int = 0
    down: int = 0
    breaker: Breaker = field(default_factory=Breaker)

    @contextmanager
    def sending(self, tokens: int) -> Iterator[None]:
        """Count a request and its tokens as in flight while the block lasts; the breaker learns how it ends.

        EngineErrors that are faults of the server (`is_fault`) count against it, an answer for it.
        """
        self.requests += 1
        self.tokens_in_flight += tokens
        trying = self.breaker.sent()
        try:
            yield
        except EngineError as error:
            if is_fault(error):
                self.breaker.failed(trying)
            else:
                self.breaker.dropped(trying)
            raise
        except BaseException:
            self.breaker.dropped(trying)
            raise
        else:
            self.failures = 0
            self.breaker.answered()
        finally:
            self.tokens_in_flight -= tokens
            self.requests -= 1


class WorkerTable:
    """The workers by (URL, rank), in a fixed order, with the load that comes from here and from elsewhere.

    `breaker` makes the circuit breaker of a worker.
    """

    def __init__(self, breaker: Callable[[], Breaker] = Breaker) -> None:
        self.version = 0
        self._breaker = breaker
        self._entries: dict[Worker, Entry] = {}
        self._remote: dict[Worker, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, worker: Worker | None) -> Entry | None:
        """Return a worker's entry, None when there is no such worker (any more)."""
        return None if worker is None else self._entries.get(worker)

    def of(self, url: str) -> list[Entry]:
        """Return the entries of an engine, one per rank."""
        return [entry for entry in self._entries.values() if entry.worker.url == url]

    @property
    def workers(self) -> list[Worker]:
        """All workers, whatever their state."""
        return list(self._entries)

    @property
    def urls(self) -> list[str]:
        """The base URLs of the engines, each once."""
        return list(dict.fromkeys(worker.url for worker in self._entries))

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Replace the workers, all of them healthy and at `version`; those that stay keep their load."""
        self.version = version
        self._replace(workers, version)
        for entry in self._entries.values():
            entry.version, entry.healthy, entry.failures, entry.down = version, True, 0, 0

    def add(self, workers: Sequence[Worker], version: int = NO_VERSION) -> None:
        """Add workers; those that are there stay as they are."""
        self._replace([*self._entries, *workers], version)

    def remove(self, gone: Container[Worker]) -> None:
        """Take workers out; their requests under way go on."""
        self._entries = {worker: entry for worker, entry in self._entries.items() if worker not in gone}

    def set_version(self, version: int, failed: Container[Worker]) -> None:
        """Note that all workers but the failed ones serve a version now; the failed ones are not offered."""
        self.version = version
        for entry in self._entries.values():
            entry.healthy = entry.worker not in failed
            entry.up = 0
            if entry.healthy:
                entry.version, entry.failures, entry.down = version, 0, 0

    def offered(self) -> list[Entry]:
        """Return the entries that may get requests.

        They are healthy, not draining, at the current version, and their breaker lets requests through.
        """
        return [entry for entry in self._entries.values() if not self._held_back(entry)]

    def why_none(self) -> str:
        """Say how many workers may get no requests for which reason; empty where there is nothing to say."""
        counts = Counter(filter(None, map(self._held_back, self._entries.values())))
        return ", ".join(f"{count} {reason}" for reason, count in counts.items())

    def _held_back(self, entry: Entry) -> str:
        """Return why a worker gets no requests; empty where it may."""
        if not entry.healthy:
            return "not healthy"
        if entry.draining:
            return "draining"
        if entry.version != self.version:
            return f"not at weight version {self.version}"
        return "" if entry.breaker.lets_through else "with an open circuit breaker"

    def load(self, entry: Entry) -> WorkerLoad:
        """Return what a router policy sees of a worker: its load from here and from other processes."""
        sessions, tokens = self._remote.get(entry.worker, (0, 0))
        return WorkerLoad(
            entry.worker,
            entry.open_sessions + sessions,
            entry.tokens_in_flight + tokens,
            entry.queued,
            entry.requests,
        )

    def local_loads(self) -> dict[Worker, tuple[int, int]]:
        """Return (open sessions, tokens in flight) of each worker as far as they come from here."""
        return {entry.worker: (entry.open_sessions, entry.tokens_in_flight) for entry in self}

    def set_remote(self, loads: Mapping[Worker, tuple[int, int]]) -> None:
        """Replace the loads that come from other processes: the sum of their `local_loads`."""
        self._remote = dict(loads)

    def _replace(self, workers: Collection[Worker], version: int) -> None:
        old = self._entries
        order = sorted(set(workers), key=lambda w: (w.url, -1 if w.dp_rank is None else w.dp_rank))
        self._entries = {
            worker: old.get(worker) or Entry(worker, version, breaker=self._breaker()) for worker in order
        }


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
