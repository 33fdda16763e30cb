"""The policies that need no data structure of their own: a few lines of choice, and what they remember."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from rollhook.component import BuildContext
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook_routing import (
    MinLoadConfig,
    PowerOfTwoConfig,
    RandomConfig,
    RoundRobinConfig,
    StickyConfig,
)
from rollhook_routing.loads import amount, least_loaded, mean_sessions


class RoundRobin(RouterPolicy):
    """Offers each worker in turn, skipping those that are not on offer."""

    always_picks: ClassVar[bool] = True

    def __init__(self, config: RoundRobinConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._last: Worker | None = None

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the next worker after the last one, in the workers' own order."""
        if not workers:
            return None
        order = sorted((load.worker for load in workers), key=_key)
        after = (w for w in order if self._last is None or _key(w) > _key(self._last))
        self._last = next(after, order[0])
        return self._last


class Random(RouterPolicy):
    """Draws a worker at random, reproducibly from the run's seed."""

    always_picks: ClassVar[bool] = True

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

    always_picks: ClassVar[bool] = True

    def __init__(self, config: MinLoadConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._seed = context.seed

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the least loaded worker."""
        return least_loaded(self._seed, request, workers)


class PowerOfTwo(RouterPolicy):
    """Draws two workers and picks the less loaded, by the same order as min_load.

    Nearly as even as min_load, and no herd where several routers see loads late (Mitzenmacher 2001, "The
    Power of Two Choices in Randomized Load Balancing").
    """

    always_picks: ClassVar[bool] = True

    def __init__(self, config: PowerOfTwoConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._random = random.Random(context.seed)  # noqa: S311 - a choice of worker is no secret

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the less loaded of two workers."""
        if not workers:
            return None
        return min(self._random.sample(workers, min(2, len(workers))), key=amount).worker


class Sticky(RouterPolicy):
    """Keeps a session on its worker while that is on offer; leaves the first choice to the next policy.

    When workers join, a session moves to one of them on its next turn if its own worker has more than
    `1 + rebalance` times the mean of open sessions; a newcomer that has the mean is none any more, so that
    no session moves twice for one joining.
    """

    def __init__(
        self, config: StickyConfig, context: BuildContext, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, context)
        self._ttl = config.ttl
        self._max = config.max_sessions
        self._margin = config.rebalance
        self._now = now
        #: session -> (worker, last used), the longest idle first
        self._table: OrderedDict[str, tuple[Worker, float]] = OrderedDict()
        self._present: frozenset[Worker] = frozenset()
        self._newcomers: frozenset[Worker] = frozenset()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def each_turn(self) -> bool:
        """Only while workers that joined have less than their share."""
        return bool(self._newcomers)

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the session's worker if it is known and on offer, or a newcomer that relieves it.

        A session that was forgotten stays on the worker that the request names.
        """
        self._expire()
        known, _ = self._table.get(request.session_id, (request.worker, 0.0))
        own = next((load for load in workers if load.worker == known), None)
        if own is None:
            return None
        worker = self._relief(own, workers) or own.worker
        self._remember(request.session_id, worker)
        return worker

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Remember the decision."""
        self._remember(request.session_id, worker)

    def closed(self, session_id: str) -> None:
        """Forget the session."""
        self._table.pop(session_id, None)

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Forget the sessions of workers that exist no more, and note those that have joined."""
        present = frozenset(workers)
        if self._margin is not None and self._present:
            self._newcomers = (self._newcomers & present) | (present - self._present)
        self._present = present
        for session_id in [s for s, (worker, _) in self._table.items() if worker not in present]:
            del self._table[session_id]

    def _relief(self, own: WorkerLoad, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the emptiest newcomer if `own` has too many sessions, None when the session stays."""
        if not self._newcomers or self._margin is None:
            return None
        mean = mean_sessions(workers)
        joined = [load for load in workers if load.worker in self._newcomers]
        full = {load.worker for load in joined if load.open_sessions + 1 > mean}
        self._newcomers -= full
        free = [load for load in joined if load.worker not in full]
        if not free or own.open_sessions <= mean * (1 + self._margin):
            return None
        return min(free, key=amount).worker

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
