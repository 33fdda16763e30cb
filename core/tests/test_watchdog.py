"""The watchdog of the event loop."""

import asyncio
import threading

from rollhook.runtime.watchdog import Watchdog


class Telling(Watchdog):
    """Says when a stall has been looked at."""

    def __init__(self, **keys):
        super().__init__(report=True, **keys)
        self.reported = threading.Event()

    def _stalled(self, before):
        super()._stalled(before)
        self.reported.set()


async def test_what_holds_the_loop_is_reported_with_its_stack(caplog):
    def hold_the_loop():
        assert dog.reported.wait(20)

    with Telling(limit=0.05, interval=0.01) as dog:
        hold_the_loop()
        await asyncio.sleep(0)
    assert dog.stalls == 1
    assert "hold_the_loop" in caplog.text


async def test_a_loop_that_only_waits_is_left_alone(caplog):
    with Watchdog(limit=30, interval=0.001) as dog:
        for _ in range(20):
            await asyncio.sleep(0.001)
    assert dog.stalls == 0
    assert not caplog.text


async def test_of_many_short_pieces_none_is_reported_as_what_holds_the_loop(caplog):
    looked = threading.Event()

    class Looking(Telling):
        def _callback(self):
            frame = super()._callback()
            looked.set()
            return frame

    with Looking(limit=0.05, interval=0.2) as dog:
        loop = asyncio.get_running_loop()

        def first():
            assert looked.wait(20)

        def second():
            assert dog.reported.wait(20)

        # both stand in the queue before the sign of life that is asked for while the first one runs
        loop.call_soon(first)
        loop.call_soon(second)
        while not dog.reported.is_set():
            await asyncio.sleep(0)
    assert dog.stalls == 1
    assert not caplog.text
