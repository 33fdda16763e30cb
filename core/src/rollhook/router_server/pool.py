"""The workers behind the router: which of them gets a request, and the sessions that came lately."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollhook.router import Worker
from rollhook.router_server.asked import Asked
from rollhook.routing import Chain
from rollhook.session.breaker import Breaker
from rollhook.session.workers import Entry, WorkerTable


@dataclass
class _Session:
    entry: Entry | None
    used: float
    requests: int = 0


class Pool:
    """Chooses the worker of a session, which keeps it while that is on offer, and counts who is where.

    A session is a routing key; nobody says when it ends, so it counts as open on its worker until it has
    been idle for `session_idle` seconds, or `forget` is called. Until then the policies are asked once, as
    those of a run are, unless they want to be asked each turn. A request without a key is a session of its
    own.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        session_idle: float = 600.0,
        breaker_faults: int = 10,
        breaker_seconds: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = WorkerTable(lambda: Breaker(breaker_faults, breaker_seconds, now))
        self._chain = chain
        self._idle = session_idle
        self._now = now
        #: the longest idle first
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    @property
    def sessions(self) -> int:
        """Routing keys that count as open now."""
        return len(self._sessions)

    def add(self, workers: Sequence[Worker]) -> None:
        """Offer further workers; those that are there stay as they are."""
        self.table.add(workers, self.table.version)
        self._chain.workers_changed(self.table.workers)

    def remove(self, worker: Worker) -> None:
        """Take a worker out, without a rank all of its engine's; what is under way there goes on."""
        self.table.remove({entry.worker for entry in self.of(worker)})
        self._chain.workers_changed(self.table.workers)

    def of(self, worker: Worker) -> list[Entry]:
        """Return the entry of a worker, without a rank all of its engine's."""
        if worker.dp_rank is None:
            return self.table.of(worker.url)
        entry = self.table.get(worker)
        return [] if entry is None else [entry]

    def choose(self, asked: Asked, failed: Container[Worker]) -> Entry | None:
        """Return the worker for a request, None when none is on offer.

        Those in `failed` have failed this request and are chosen again only when all others have too.
        """
        self._expire()
        offered = [
            entry
            for entry in self.table.offered()
            if asked.rank is None or asked.rank == entry.worker.dp_rank
        ]
        candidates = [entry for entry in offered if entry.worker not in failed] or offered
        session = self._sessions.get(asked.route.session_id)
        if session is not None and session.entry in candidates and not self._chain.each_turn:
            return session.entry
        before = session.entry.worker if session is not None and session.entry is not None else None
        request = replace(asked.route, worker=before)
        worker = self._chain.pick(request, [self.table.load(entry) for entry in candidates])
        entry = self.table.get(worker)
        if worker is not None:
            self._assign(session, entry)
            self._chain.assigned(request, worker)
        return entry

    @contextmanager
    def request(self, asked: Asked) -> Iterator[None]:
        """Count a request's session as in use while it lasts; one without a key ends with it."""
        name = asked.route.session_id
        session = self._sessions.setdefault(name, _Session(None, self._now()))
        session.requests += 1
        try:
            yield
        finally:
            session.requests -= 1
            if not asked.keyed:
                self.forget(name)
            elif name in self._sessions:
                self._touch(name, session)

    def forget(self, name: str) -> bool:
        """End a session, for policies too; False when there is none of that name."""
        self._chain.closed(name)
        return self._uncount(name)

    def _uncount(self, name: str) -> bool:
        session = self._sessions.pop(name, None)
        if session is None:
            return False
        self._assign(session, None)
        return True

    def _assign(self, session: _Session | None, entry: Entry | None) -> None:
        if session is None:  # forgotten while its request is under way
            return
        if session.entry is not None:
            session.entry.open_sessions -= 1
        if entry is not None:
            entry.open_sessions += 1
        session.entry = entry

    def _touch(self, name: str, session: _Session) -> None:
        session.used = self._now()
        self._sessions.move_to_end(name)

    def _expire(self) -> None:
        """Count no more the sessions that have been idle for long, but for those with a request under way.

        They may come back, so the policies keep what they know of them within their own bounds.
        """
        limit = self._now() - self._idle
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.used > limit:
                return
            if session.requests:
                self._touch(name, session)
            else:
                self._uncount(name)
