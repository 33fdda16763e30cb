"""prefix_cache: prompts that start alike go to the worker that has computed that start before."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import ClassVar

from rollhook.component import BuildContext
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook_routing import PrefixCacheConfig
from rollhook_routing.loads import amount, draw, least_loaded, requests, with_room


class PrefixCache(RouterPolicy):
    """Picks the worker with the longest known prefix among those with room, else the least loaded.

    What the engines hold is estimated from what was sent to them. The prompts of a group's siblings start
    alike, so siblings gather on few workers, but no worker gets more than `load_factor` times the mean of
    open sessions for it. With `turn_load_factor` a session leaves its worker on a turn if that would have
    more than so many times the mean of requests under way, for one that has no more than the mean.
    """

    always_picks: ClassVar[bool] = True
    needs_prefix: ClassVar[bool] = True

    def __init__(self, config: PrefixCacheConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._seed = context.seed
        self._prefixes = PrefixTree(config.chunk, config.max_chunks)

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def each_turn(self) -> bool:
        """Whether sessions may move."""
        return self.config.turn_load_factor is not None

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return a worker whose known prefix of the prompt is long enough, else the least loaded."""
        factor, home = self.config.turn_load_factor, request.worker
        if factor is not None and home is not None and any(load.worker == home for load in workers):
            return self._turn(request, home, factor, workers)
        known = self._prefixes.match(request.prefix_ids)
        enough = max(1.0, self.config.min_match * len(request.prefix_ids))
        near = [load for load in workers if known.get(load.worker, 0) >= enough]
        if near:
            free = {load.worker for load in with_room(workers, self.config.load_factor)}
            near = [load for load in near if load.worker in free]
        if not near:
            return least_loaded(self._seed, request, workers)
        return min(near, key=lambda load: self._order(load, known[load.worker], request)).worker

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Note that the worker computes this prompt; one that has served the session is known to."""
        if worker != request.worker:
            self._prefixes.add(request.prefix_ids, worker)

    def _turn(
        self, request: RouteRequest, home: Worker, factor: float, workers: Sequence[WorkerLoad]
    ) -> Worker:
        """Return the session's worker if it has room, else the one with the longest prefix up to the mean."""
        if any(load.worker == home for load in with_room(workers, factor, requests)):
            return home
        self._prefixes.add(request.prefix_ids, home)  # but for what the agent has just added
        known = self._prefixes.match(request.prefix_ids)
        free = with_room(workers, 1, requests)
        return min(free, key=lambda load: (-known.get(load.worker, 0), load.requests, amount(load))).worker

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Forget what workers held that exist no more."""
        self._prefixes.keep(workers)

    def _order(self, load: WorkerLoad, match: int, request: RouteRequest) -> tuple[object, ...]:
        return -match, amount(load), draw(self._seed, request.session_id, load.worker)


class PrefixTree:
    """Which workers were sent which prefixes, in whole chunks of `chunk` tokens; at most `most` chunks.

    A prefix is named by a hash over its chunks, so that a flat table holds the tree: a parent is used
    whenever its child is, and just after it, so the least recently used entry is always a leaf.
    """

    def __init__(self, chunk: int, most: int) -> None:
        self._chunk = chunk
        self._most = most
        self._holders: OrderedDict[int, set[Worker]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, ids: Sequence[int]) -> dict[Worker, int]:
        """Return how many tokens at the start of `ids` each worker was sent before."""
        found: dict[Worker, int] = {}
        holders: set[Worker] = set()
        length = 0
        for name in self._names(ids):
            deeper = self._holders.get(name, set())
            if len(deeper) < len(holders):  # who was sent a prefix was sent what it starts with
                found.update(dict.fromkeys(holders - deeper, length))
            if not deeper:
                return found
            holders, length = deeper, length + self._chunk
        return found | dict.fromkeys(holders, length)

    def add(self, ids: Sequence[int], worker: Worker) -> None:
        """Note that a worker was sent these tokens; forget the longest unused."""
        names = list(self._names(ids))[: self._most]
        for name in reversed(names):
            self._holders.setdefault(name, set()).add(worker)
            self._holders.move_to_end(name)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def keep(self, workers: Sequence[Worker]) -> None:
        """Forget all other workers."""
        present = set(workers)
        for name, holders in list(self._holders.items()):
            holders.intersection_update(present)
            if not holders:
                del self._holders[name]

    def _names(self, ids: Sequence[int]) -> Iterator[int]:
        raw, width = array("q", ids).tobytes(), 8 * self._chunk
        name = 0
        for start in range(0, len(raw) - width + 1, width):
            name = hash((name, raw[start : start + width]))
            yield name
