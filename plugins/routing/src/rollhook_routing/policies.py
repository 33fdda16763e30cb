"""The policies themselves; each is a few lines of choice and the state that it needs."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from rollhook.component import BuildContext
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook_routing import MinLoadConfig, RandomConfig, RoundRobinConfig, StickyConfig


class RoundRobin(RouterPolicy):
    """Offers each worker in turn, skipping those that are not on offer."""

    def __init__(self, config: RoundRobinConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._last: Worker | None = None

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the next worker after the last one, in the workers' own order."""
        order = sorted((load.worker for load in workers), key=_key)
        if not order:
            return None
        last = self._last
        self._last = order[0] if last is None else next((w for w in order if _key(w) > _key(last)), order[0])
        return self._last


class Random(RouterPolicy):
    """Draws a worker at random, reproducibly from the run's seed."""

    def __init__(self, config: RandomConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._random = random.Random(context.seed)  # noqa: S311 - a choice of worker is no secret

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return any of the workers, all equally likely."""
        return self._random.choice(workers).worker if workers else None


class MinLoad(RouterPolicy):
    """Picks by (open sessions, tokens in flight, requests queued at the engine); ties by seeded hash.

    Sessions count, not requests: an agent that idles in a tool will be back.
    """

    def __init__(self, config: MinLoadConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._seed = str(context.seed)

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the least loaded worker."""
        if not workers:
            return None
        least = min(map(_load, workers))
        tied = [load.worker for load in workers if _load(load) == least]
        return min(tied, key=lambda worker: self._draw(request, worker))

    def _draw(self, request: RouteRequest, worker: Worker) -> bytes:
        text = f"{self._seed}\n{request.session_id}\n{worker.url}\n{worker.dp_rank}"
        return blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


class Sticky(RouterPolicy):
    """Keeps a session on its worker while that is on offer; leaves the first choice to the next policy."""

    def __init__(
        self, config: StickyConfig, context: BuildContext, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, context)
        self._ttl = config.ttl
        self._max = config.max_sessions
        self._now = now
        #: session -> (worker, last used), the longest idle first
        self._table: OrderedDict[str, tuple[Worker, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the session's worker if it is known and on offer."""
        self._expire()
        known = self._table.get(request.session_id)
        if known is None or all(load.worker != known[0] for load in workers):
            return None
        self._remember(request.session_id, known[0])
        return known[0]

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Remember the decision."""
        self._remember(request.session_id, worker)

    def closed(self, session_id: str) -> None:
        """Forget the session."""
        self._table.pop(session_id, None)

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Forget the sessions of workers that exist no more."""
        present = set(workers)
        for session_id in [s for s, (worker, _) in self._table.items() if worker not in present]:
            del self._table[session_id]

    def _remember(self, session_id: str, worker: Worker) -> None:
        self._table[session_id] = (worker, self._now())
        self._table.move_to_end(session_id)
        if len(self._table) > self._max:
            self._table.popitem(last=False)

    def _expire(self) -> None:
        limit = self._now() - self._ttl
        while self._table:
            session_id, (_, used) = next(iter(self._table.items()))
            if used > limit:
                return
            del self._table[session_id]


def _key(worker: Worker) -> tuple[str, int]:
    return worker.url, -1 if worker.dp_rank is None else worker.dp_rank


def _load(load: WorkerLoad) -> tuple[int, int, int]:
    return load.open_sessions, load.tokens_in_flight, load.queued or 0
