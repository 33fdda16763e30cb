"""A circuit breaker: a worker whose requests keep failing gets none for a while, then one to see."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollhook.errors import EngineError

#: answers by which an engine asks to wait, or that the client was too slow: it is not broken
_NEUTRAL = frozenset({408, 425, 429, 503})


def is_fault(error: EngineError) -> bool:
    """Return whether an engine is at fault: no answer, one outside the protocol, 5xx but 503; never a 4xx."""
    return error.kind != "user" and error.status not in _NEUTRAL


class Breaker:
    """Opens after `faults` faults of the server in a row; `seconds` later one request may try.

    That request closes it when it is answered, and opens it again when it fails. One that is under way for
    as long again lets others through: a reply may take long, and who waits would give up meanwhile.
    """

    def __init__(
        self, faults: int = 10, seconds: float = 30.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = faults
        self._seconds = seconds
        self._now = now
        self._faults = 0
        self._opened: float | None = None
        self._trying = False
        #: how often it has opened
        self.openings = 0

    @property
    def open(self) -> bool:
        """Whether it has opened and no request was answered since."""
        return self._opened is not None

    @property
    def lets_through(self) -> bool:
        """Whether a request may be sent now."""
        wait = self._seconds * (2 if self._trying else 1)
        return self._opened is None or self._now() >= self._opened + wait

    def sent(self) -> bool:
        """Note that a request goes; return whether it is the one that tries."""
        trying = self.open and self.lets_through and not self._trying
        self._trying |= trying
        return trying

    def answered(self) -> None:
        """Close: a request was answered."""
        self._faults, self._opened, self._trying = 0, None, False

    def failed(self, trying: bool) -> None:
        """Note a fault of the server."""
        self._faults += 1
        if trying or (not self.open and self._faults >= self._most):
            self._opened, self._trying = self._now(), False
            self.openings += 1

    def dropped(self, trying: bool) -> None:
        """Note that a request ended without telling anything of the server."""
        if trying:
            self._trying = False
