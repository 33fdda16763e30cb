"""Verification apart from the event loop."""

import asyncio
import threading

import pytest

from rollhook.environment import Verdict
from rollhook.errors import VerifierError
from rollhook.runtime.verifier import HomeLoop, verify_apart, verify_here


async def spin():
    while True:
        pass


async def hang():
    await asyncio.Event().wait()


async def good():
    return Verdict(1.0)


async def bad():
    raise ValueError("no such file")


async def test_a_cpu_bound_verifier_does_not_stop_the_loop_and_its_thread_ends():
    before = threading.active_count()
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    with pytest.raises(VerifierError, match="longer than"):
        await verify_apart(spin, 0.3)
    heart.cancel()
    assert beats >= 5
    for _ in range(200):
        if threading.active_count() <= before:
            break
        await asyncio.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize("run", [verify_here, verify_apart])
async def test_a_hanging_verifier_ends_at_its_limit(run):
    with pytest.raises(VerifierError, match=r"longer than 0\.1 s"):
        await run(hang, 0.1)


@pytest.mark.parametrize("run", [verify_here, verify_apart])
async def test_a_verifier_answers_or_raises(run):
    assert (await run(good, 5)).reward == 1.0
    with pytest.raises(ValueError, match="no such file"):
        await run(bad, 5)


async def test_an_object_of_the_home_loop_can_be_used_from_the_verifiers_loop():
    home = asyncio.get_running_loop()

    class Box:
        id = "b1"

        async def ask(self):
            assert asyncio.get_running_loop() is home
            return "answer"

    box = HomeLoop(Box(), home)

    async def verify():
        assert asyncio.get_running_loop() is not home
        assert box.id == "b1"
        return Verdict(1.0, detail={"said": await box.ask()})

    assert (await verify_apart(verify, 5)).detail == {"said": "answer"}
    assert await box.ask() == "answer"
