"""The watchdog of the event loop."""

import asyncio
import threading

from rollhook.runtime.watchdog import Watchdog


async def test_what_holds_the_loop_is_reported_with_its_stack(caplog):
    reported = threading.Event()

    class Telling(Watchdog):
        def _stalled(self):
            super()._stalled()
            reported.set()

    def hold_the_loop():
        assert reported.wait(20)

    with Telling(limit=0.05, interval=0.01, report=True) as dog:
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
