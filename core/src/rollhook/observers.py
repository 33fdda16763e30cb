"""Trackers and observer hooks, called on one thread of their own from a bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rollhook.tracker import Tracker

if TYPE_CHECKING:
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Recipe
    from rollhook.records import EpisodeRecord

logger = logging.getLogger(__name__)

Call = Callable[[], Any]


class Observers:
    """Tells every tracker and every plugin's observer hooks what happens; never blocks the caller.

    What one of them raises is logged with its distribution's name and counted in `failures`; it stops
    nothing. While the queue is full, episodes and steps are dropped, counted in `dropped` and logged; start
    and end of a run never are.
    """

    def __init__(
        self,
        plugins: Plugins,
        trackers: Mapping[str, Tracker],
        resolved: Mapping[str, Any],
        *,
        capacity: int = 4096,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.dropped = 0
        self._resolved = resolved
        self._capacity = capacity
        self._trackers = [(plugins.distribution("tracker", name)[0], each) for name, each in trackers.items()]
        self._plugins = plugins
        self._queue: queue.SimpleQueue[tuple[str, Call] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="observers", daemon=True)
        self._thread.start()

    def run_started(self, run_id: str, attempt: int, recipe: Recipe) -> None:
        """An attempt has begun."""
        for distribution, tracker in self._trackers:
            self._put(distribution, partial(tracker.start, run_id, attempt, self._resolved))
        self._hook("rollhook_run_started", run_id=run_id, attempt=attempt, recipe=recipe)

    def episode(self, record: EpisodeRecord) -> None:
        """An episode has finished."""
        if self._room():
            self._hook("rollhook_episode_finished", record=record)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of metrics is there; `metrics` is not changed afterwards."""
        if self._room():
            for distribution, tracker in self._trackers:
                self._put(distribution, partial(tracker.log, step, metrics))
            self._hook("rollhook_step_finished", step=step, metrics=dict(metrics))

    def run_finished(self, run_id: str, status: str) -> None:
        """The attempt has ended."""
        self._hook("rollhook_run_finished", run_id=run_id, status=status)
        for distribution, tracker in self._trackers:
            self._put(distribution, partial(tracker.finish, status))

    def close(self, timeout: float = 10.0) -> None:
        """Let the thread finish what is queued, for at most `timeout` seconds. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error(
                "observers did not finish within %g s; %d of their calls are lost",
                timeout,
                self._queue.qsize(),
            )
        if self.dropped:
            logger.warning("observers were too slow: %d events were not shown to them", self.dropped)

    def _room(self) -> bool:
        if self._queue.qsize() < self._capacity and not self._closed:
            return True
        self.dropped += 1
        if self.dropped == 1:
            logger.warning(
                "observers are too slow: their queue of %d is full, events are lost", self._capacity
            )
        return False

    def _hook(self, name: str, **arguments: Any) -> None:
        """Queue one call per implementation, so that one that raises does not hide the event from others."""
        for implementation in getattr(self._plugins.manager.hook, name).get_hookimpls():
            distribution = self._plugins.owner(implementation.plugin) or implementation.plugin_name
            wanted = {argument: arguments[argument] for argument in implementation.argnames}
            self._put(distribution, partial(implementation.function, **wanted))

    def _put(self, distribution: str, call: Call) -> None:
        self._queue.put((distribution, call))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            distribution, call = item
            try:
                call()
            except Exception as error:
                self.failures[distribution] += 1
                first = self.failures[distribution] == 1
                logger.warning(
                    "%s: an observer failed (%d so far): %s: %s",
                    distribution,
                    self.failures[distribution],
                    type(error).__name__,
                    error,
                    exc_info=first,
                )
