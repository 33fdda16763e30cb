"""What comes before a run's driver."""

import asyncio
import io
import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from rollhook.errors import RunError
from rollhook.recipe.check import compose
from rollhook.recipe.lock import digest, write_lock
from rollhook.rundir import RunDir
from rollhook.runtime import launch
from rollhook.runtime.launch import Stop, drive_run
from rollhook.runtime.progress import Display
from rollhook.runtime.results import RunResult


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


async def test_a_job_runs_what_its_run_needs_first_and_its_lock_has_the_result(toys, tmp_path, monkeypatch):
    """The submitter has only written the lock; a job that is queued again does not run it twice."""
    needing = 'extends: base.yaml\nneeds: {sft: first.yaml}\nmodel: {path: "${needs.sft.checkpoint}"}\n'
    (toys / "recipe.yaml").write_text(needing)
    (toys / "first.yaml").write_text("extends: base.yaml\nname: first\n")
    run = RunDir.create(tmp_path / "runs", "demo", run_id="demo")
    write_lock(run.lock_path, *compose("recipe.yaml"))
    made = tmp_path / "made"
    made.mkdir()
    driven = []

    async def drive(loaded, _plugins, where, *_):
        driven.append((where.run_id, loaded.recipe.model.path))
        name, result = loaded.recipe.name, RunResult(where.run_id, "succeeded", digest(loaded, _plugins))
        result.checkpoint = str(made) if name == "first" else None
        where.claim("run").finish("succeeded") if where.run_id != "demo" else None
        result.write(where.path)
        return result

    @asynccontextmanager
    async def no_cluster(*_):
        yield None, Stop(display())

    monkeypatch.setattr(launch, "_drive", drive)
    monkeypatch.setattr(launch, "own_cluster", no_cluster)
    await drive_run(run, display())
    (first, _), second = driven
    assert first.startswith("first-")
    assert (run.path.parent / first).is_dir(), "what it needs is a run beside it"
    assert second == ("demo", str(made))
    found = yaml.safe_load(run.lock_path.read_text())["recipe"]
    assert (found["needs"], found["model"]["path"]) == ({}, str(made))
    await drive_run(run, display())
    assert driven[2:] == [second]
