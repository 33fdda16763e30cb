"""prefix_cache: prompts go where their start was computed before, unless too much is under way there."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import ClassVar

from rollhook.component import BuildContext
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook_routing import PrefixCacheConfig
from rollhook_routing.loads import amount, draw, with_room


class PrefixCache(RouterPolicy):
    """Weighs what a worker has in flight against how much of the prompt it would have to compute.

    A worker costs its tokens in flight, which every step of decoding reads, and `recompute_cost` for each
    token of the prompt that it is not known to hold. A new session opens at the cheapest worker that has no
    more than `load_factor` times the mean of open sessions with it. On a turn a session stays, unless its
    worker would have more requests under way than any other: then it moves to the cheapest of those with
    the fewest, if that costs less than the tokens in flight where it is. What the engines hold is estimated
    from what was sent to them.
    """

    needs_prefix: ClassVar[bool] = True

    def __init__(self, config: PrefixCacheConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._seed = context.seed
        self._prefixes = PrefixTree(config.chunk, config.max_chunks)

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def each_turn(self) -> bool:
        """Always: a session may move on any turn."""
        return True

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the cheapest worker with room for a new session, or where a session's turn goes."""
        if not workers:
            return None
        home = next((load for load in workers if load.worker == request.worker), None)
        if home is None:
            return self._cheapest(request, with_room(workers, self.config.load_factor))[1]
        others = [load for load in workers if load is not home]
        if home.requests + 1 <= max((load.requests for load in others), default=home.requests + 1):
            return home.worker
        fewest = min(load.requests for load in others)
        cost, worker = self._cheapest(request, [load for load in others if load.requests == fewest])
        if cost >= home.tokens_in_flight:
            return home.worker
        self._prefixes.add(request.prefix_ids, home.worker)  # but for what the agent has just added
        return worker

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Note that the worker computes this prompt; one that has served the session is known to."""
        if worker != request.worker:
            self._prefixes.add(request.prefix_ids, worker)

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Forget what workers held that exist no more."""
        self._prefixes.keep(workers)

    def _cheapest(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> tuple[float, Worker]:
        """Return the least cost, in tokens in flight, and whose it is; ties as in min_load."""
        known, length = self._prefixes.match(request.prefix_ids), len(request.prefix_ids)
        price: float = self.config.recompute_cost

        def cost(load: WorkerLoad) -> float:
            return load.tokens_in_flight + price * (length - known.get(load.worker, 0))

        def order(load: WorkerLoad) -> tuple[object, ...]:
            return cost(load), amount(load), draw(self._seed, request.session_id, load.worker)

        best = min(workers, key=order)
        return cost(best), best.worker


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
