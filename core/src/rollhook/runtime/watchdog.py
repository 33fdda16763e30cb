"""Watches that nothing blocks the event loop for long."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Self

logger = logging.getLogger(__name__)


class Watchdog:
    """Asks the running loop for a sign of life all the time, from a thread of its own.

    `longest` is the longest wait for one so far, in seconds. With `report`, what holds the loop when a sign
    has not come for `limit` seconds is logged with its stack, once per stall. Where no piece of work has
    held it for half of that time, there is only much work, or little of the machine for it: nothing is
    logged, for none of it is at fault.
    """

    def __init__(self, *, limit: float = 0.5, interval: float = 0.05, report: bool = False) -> None:
        self.longest = 0.0
        self.stalls = 0
        self._limit = limit
        self._interval = interval
        self._report = report
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            answered = threading.Event()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # the loop is closed
            if not answered.wait(self._limit / 2):
                before = self._callback()
                if not answered.wait(self._limit / 2):
                    self._stalled(before)
                del before  # a frame keeps its locals alive
                while not answered.wait(self._limit) and not self._ended.is_set():
                    pass
            self.longest = max(self.longest, time.monotonic() - asked)

    def _callback(self) -> FrameType | None:
        """Return the frame of the loop's present callback, another one for each."""
        frame = sys._current_frames().get(self._ident)
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frame = frame.f_back
        return frame

    def _stalled(self, before: FrameType | None) -> None:
        self.stalls += 1
        frame = sys._current_frames().get(self._ident)
        if self._report and before is not None and self._callback() is before:
            stack = "".join(traceback.format_stack(frame)[-6:])
            logger.warning("the event loop is held for more than %g s by:\n%s", self._limit, stack)
