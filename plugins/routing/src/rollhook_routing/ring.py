"""consistent_hash: a key always goes to the same worker, and few keys move when workers come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from rollhook.component import BuildContext
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook_routing import ConsistentHashConfig
from rollhook_routing.loads import draw, position, with_room


class ConsistentHash(RouterPolicy):
    """Picks the worker whose point on a ring follows the key's, skipping those that may not have it.

    A worker has `points` points; when it leaves, its keys go to their next ones and all others stay. With
    `load_factor` a worker that is full is skipped, too (consistent hashing with bounded loads).
    """

    always_picks: ClassVar[bool] = True

    def __init__(self, config: ConsistentHashConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._seed = context.seed
        #: (position, worker), ascending by position
        self._ring: list[tuple[int, Worker]] = []
        self._members: frozenset[Worker] = frozenset()

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the first worker on the ring after the request's key that is on offer and has room."""
        if not workers:
            return None
        factor = self.config.load_factor
        free = {load.worker for load in (workers if factor is None else with_room(workers, factor))}
        if not free <= self._members:
            self._place(self._members | free)
        return next(worker for worker in self._after(self._key(request)) if worker in free)

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Take the points of workers that exist no more off the ring."""
        self._place(workers)

    def _key(self, request: RouteRequest) -> str:
        own = (request.session_id, request.task_id)
        return own[0] or own[1] if self.config.key == "session" else own[1] or own[0]

    def _after(self, key: str) -> Iterator[Worker]:
        start = bisect_right(self._ring, position(f"{self._seed}\n{key}"), key=lambda point: point[0])
        for number in range(len(self._ring)):
            yield self._ring[(start + number) % len(self._ring)][1]

    def _place(self, members: Iterable[Worker]) -> None:
        self._members = frozenset(members)
        points = (
            (draw(self._seed, "point", worker, number), worker)
            for worker in self._members
            for number in range(self.config.points)
        )
        self._ring = sorted(points, key=lambda point: point[0])
