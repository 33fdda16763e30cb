"""An orderly end on a signal, for the verbs that keep what they have done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollhook.runtime.progress import Display


@contextmanager
def stopping(display: Display) -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM cancel the current task, once; gives what takes the signals again."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = asyncio.Event()

    def stop() -> None:
        if not asked.is_set():
            asked.set()
            display.say("Stopping ...")
            task.cancel()

    def take() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, stop)

    take()
    try:
        yield take
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
