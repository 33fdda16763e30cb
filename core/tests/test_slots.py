"""The slots of episodes, and their number as the engines bear it."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producing import holding, settle

from rollhook.runtime.concurrency import CROWDED, ROOMY, AdaptiveLimit
from rollhook.runtime.slots import Slots


@pytest.fixture
async def held():
    async with holding() as made:
        yield made


@pytest.mark.parametrize("submission", ["episode", "group"])
async def test_an_evaluation_shares_the_slots_of_training(held, submission):
    runner, make = held
    made = make(9, max_staleness=4, max_concurrent=5, submission=submission)
    await runner.until(4)
    await settle()
    async with contextlib.AsyncExitStack() as stack:
        if submission == "group":
            await stack.enter_async_context(made.slots)
        assert made.slots.free == 0
        made.pause()
        entering = asyncio.ensure_future(made.slots.__aenter__())
        await settle()
        assert not entering.done()
        await runner.end(1, *sorted(runner.waiting)[:2])
        await entering
        assert made.slots.used <= 5
        await made.slots.__aexit__()


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["ask", "cancel", "release", "limit"])), max_size=40
    )
)
@settings(deadline=None)
def test_slots_are_given_in_order_and_never_too_many(events):
    async def play():
        slots, limit = Slots(4), 4
        asked, given = [], []

        async def hold(number, count, release):
            async with slots.holding(slots.ask(count), count):
                given.append(number)
                await release.wait()

        tasks = []
        for number, (count, event) in enumerate(events):
            if event == "ask":
                release = asyncio.Event()
                task = asyncio.ensure_future(hold(number, count, release))
                await asyncio.sleep(0)
                asked.append(number)
                tasks.append((task, release))
            elif event == "limit":
                limit = slots.limit = max(count, slots.used)
            elif tasks:
                task, release = tasks.pop(count % len(tasks))
                release.set() if event == "release" else task.cancel()
            await settle()
            assert 0 <= slots.used <= max(limit, 4)
        for _, release in tasks:
            release.set()
        await settle()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        await settle()
        assert slots.used == 0
        assert given == sorted(given), "who asked first is served first"

    asyncio.run(play())


def test_the_limit_shrinks_while_requests_queue_and_grows_back():
    adaptive = AdaptiveLimit(8, 128)
    assert adaptive.look(CROWDED + 1) == 96
    assert adaptive.look(CROWDED + 1) == 72
    assert adaptive.look((CROWDED + ROOMY) / 2) == 72
    assert [adaptive.look(0.0), adaptive.look(None)] == [80, 88]
    for _ in range(50):
        adaptive.look(CROWDED + 1)
    assert adaptive.limit == 8
    for _ in range(50):
        adaptive.look(0.0)
    assert adaptive.limit == 128
    assert AdaptiveLimit(8, 4).look(CROWDED + 1) == 4


async def test_a_producer_follows_the_pressure_of_the_engines(held):
    runner, make = held
    beats, waits = asyncio.Queue(), [9.0]

    async def sleep(seconds):
        if seconds > 100:  # the watch over stalls
            await asyncio.Event().wait()
        await beats.get()

    more = {"sleep": sleep, "pressure": lambda: waits[0]}
    made = make(99, max_staleness=9, max_concurrent=8, adaptive_concurrency=True, more=more)
    await runner.until(8)
    beats.put_nowait(None)
    await settle()
    assert made.slots.limit == 6
    await runner.end(1, *sorted(runner.waiting)[:4])
    await settle()
    assert len(runner.waiting) == 6
    waits[0] = 0.0
    beats.put_nowait(None)
    await runner.until(8)
    assert (await made.batch()).limit == 8


async def test_an_old_queue_time_takes_no_slots_from_a_run_whose_trainer_trains(held):
    runner, make = held
    beats = asyncio.Queue()

    async def sleep(seconds):
        if seconds > 100:  # the watch over stalls
            await asyncio.Event().wait()
        await beats.get()

    more = {"sleep": sleep, "pressure": lambda: 9.0}
    made = make(99, max_staleness=0, max_concurrent=8, adaptive_concurrency=True, more=more)
    await runner.until(4)
    await runner.end(1)
    await made.batch()
    assert not runner.waiting, "no request is at the engines"
    beats.put_nowait(None)
    await settle()
    assert made.slots.limit == 8
