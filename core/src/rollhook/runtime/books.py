"""The books of the training episodes of an attempt: where each is, and that none is lost or counted twice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from rollhook.errors import RollhookError

logger = logging.getLogger(__name__)

IN_FLIGHT, BUFFERED = "in flight", "buffered"


class BooksError(RollhookError):
    """An episode was where it cannot be: a fault of the runtime."""

    boundary = "rollhook"


class Books:
    """At every instant: submitted = trained + rejected (by reason) + in flight + buffered.

    An episode is `buffered` from its good end until its group trains or is rejected. One that an earlier
    attempt finished counts as submitted when it is taken over. A movement that cannot be raises BooksError if
    `strict`; else it is logged, counted in `wrong` and not made, so the sum holds.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.submitted = self.trained = self.wrong = 0
        self.rejected: Counter[str] = Counter()
        self._strict = strict
        self._where: dict[str, str] = {}
        self._over: set[str] = set()

    @property
    def in_flight(self) -> int:
        """Episodes that run."""
        return sum(where == IN_FLIGHT for where in self._where.values())

    @property
    def buffered(self) -> int:
        """Episodes that have ended well, and of whose group nothing is decided yet."""
        return len(self._where) - self.in_flight

    def submit(self, episode_id: str) -> None:
        """An episode begins to run."""
        self._open(episode_id, IN_FLIGHT)

    def take_over(self, episode_id: str) -> None:
        """An episode that an earlier attempt finished may still train."""
        self._open(episode_id, BUFFERED)

    def buffer(self, episode_id: str) -> None:
        """An episode has ended well."""
        if self._where.get(episode_id) == IN_FLIGHT:
            self._where[episode_id] = BUFFERED
        else:
            self._fault(episode_id, "cannot be buffered")

    def train(self, episode_ids: Iterable[str]) -> None:
        """These episodes are in a batch that trains."""
        for episode_id in episode_ids:
            if self._close(episode_id, BUFFERED):
                self.trained += 1

    def reject(self, episode_ids: Iterable[str], reason: str) -> None:
        """These episodes will not train."""
        for episode_id in episode_ids:
            if self._close(episode_id, self._where.get(episode_id, "")):
                self.rejected[reason] += 1

    def check(self) -> None:
        """Raise BooksError when the sum does not hold."""
        parts = self.trained + self.rejected.total() + len(self._where)
        if self.submitted != parts or self.submitted != len(self._over) + len(self._where):
            raise BooksError(f"the books do not balance: {self.metrics()}")

    def metrics(self) -> dict[str, float]:
        """Return the counts, since the attempt began."""
        counts = {
            "books/submitted": self.submitted,
            "books/finished": self.submitted - self.in_flight,
            "books/in_flight": self.in_flight,
            "books/buffered": self.buffered,
            "books/trained": self.trained,
            "books/rejected": self.rejected.total(),
            **{f"books/rejected/{reason}": count for reason, count in self.rejected.items()},
        }
        return {name: float(count) for name, count in counts.items()}

    def _open(self, episode_id: str, where: str) -> None:
        if episode_id in self._where or episode_id in self._over:
            self._fault(episode_id, "cannot begin again")
        else:
            self.submitted += 1
            self._where[episode_id] = where

    def _close(self, episode_id: str, where: str) -> bool:
        if not where or self._where.get(episode_id) != where:
            self._fault(episode_id, "cannot be trained or rejected")
            return False
        del self._where[episode_id]
        self._over.add(episode_id)
        return True

    def _fault(self, episode_id: str, what: str) -> None:
        where = self._where.get(episode_id, "over" if episode_id in self._over else "unknown")
        error = BooksError(f"episode {episode_id} {what}: it is {where}; this is a fault of rollhook")
        if self._strict:
            raise error
        self.wrong += 1
        logger.error("%s", error)
