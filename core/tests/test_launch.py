"""What comes before a run's driver."""

import asyncio
import io
import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollhook.errors import RunError
from rollhook.rundir import RunDir
from rollhook.runtime import launch
from rollhook.runtime.launch import Stop, drive_run
from rollhook.runtime.progress import Display


def display():
    return Display(Console(file=io.StringIO()))


async def test_a_run_without_a_lock_cannot_be_driven(tmp_path):
    run = RunDir.create(tmp_path, "demo")
    with pytest.raises(RunError, match=r"has no recipe\.lock\.yaml"):
        await drive_run(run, display())


async def test_the_first_interrupt_drains_and_the_second_cancels():
    stop = Stop(display())

    async def work():
        with stop.watching():
            stop.handle()
            os.kill(os.getpid(), signal.SIGINT)
            await stop.drain.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stop.drain.is_set()


async def test_a_termination_cancels_at_once():
    stop = Stop(display())

    async def work():
        with stop.watching():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())


async def test_a_run_that_is_being_driven_is_refused_before_anything_starts(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "demo")
    run.lock_path.touch()
    loaded = SimpleNamespace(remarks=(), recipe=SimpleNamespace(steps=3))
    monkeypatch.setattr(launch, "compose", lambda *_, **__: (loaded, None))
    monkeypatch.setattr(launch, "own_cluster", None)  # to start one would be an error of another kind
    attempt = run.claim(interval=0.01)
    try:
        with pytest.raises(RunError, match=r"is being driven: attempt 1 by process \d+"):
            await drive_run(run, display())
    finally:
        attempt.finish("stopped")
    with pytest.raises(TypeError, match="not callable"):
        await drive_run(run, display())
    assert [each.status for each in run.attempts()] == ["stopped", "failed"]
