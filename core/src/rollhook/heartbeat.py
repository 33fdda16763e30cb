"""The sign of life of an attempt: a counter in a file, judged by whether it moves, never by a clock.

Works on NFS: the file is opened, written and closed at every beat, and opened anew at every look. A reader
compares two looks on its own monotonic clock, so clocks that differ or jump do not matter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

#: seconds between two beats
INTERVAL = 2.0
#: seconds a counter must stand still before its attempt counts as dead
STALE = 20.0


class Heartbeat:
    """Counts up in a file from a daemon thread until stopped."""

    def __init__(self, path: Path, *, interval: float = INTERVAL) -> None:
        self.path = path
        self._interval = interval
        self._count = 0
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, then go on in the background."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Count one up. A beat that cannot be written is logged once; the attempt then looks dead."""
        self._count += 1
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, b"%020d\n" % self._count, 0)
            finally:
                os.close(fd)
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.error(
                    "%s: the heartbeat cannot be written (%s); others will take this attempt for dead",
                    self.path,
                    error.strerror,
                )
            self._failing = True

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()


def read_counter(path: Path) -> int | None:
    """Return the counter of a heartbeat file; None when there is none."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def moving(
    paths: Iterable[Path],
    *,
    stale: float = STALE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> set[Path]:
    """Watch heartbeats and return those whose counter moved before it had stood still for `stale` seconds.

    Returns as soon as all have moved, else blocks for `stale` seconds: call it off the event loop.
    """
    first, started = {path: read_counter(path) for path in paths}, clock()
    moved: set[Path] = set()
    while len(moved) < len(first) and clock() - started < stale:
        sleep(0.25)
        moved |= {path for path, count in first.items() if read_counter(path) != count}
    return moved
