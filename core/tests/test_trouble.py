"""Whole runs in trouble: the last words say what and where, nothing is corrupt, the next attempt goes on."""

import asyncio
import io
import json

import pytest
import troubles
from driving import CountingTrainer, Rig
from surviving import assert_survived

from rollhook import journal
from rollhook.checkpoints import CheckpointStore
from rollhook.errors import RunError
from rollhook.journal import JournalError
from rollhook.metrics_file import MetricsWriter
from rollhook.runtime.rollouts import Rollouts

STEPS = 3


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path, steps=STEPS)


async def goes_on(rig):
    await rig.drive()
    assert_survived(rig.run, STEPS)
    assert rig.trained()["steps"] == STEPS
    assert rig.sandboxes() == []


@pytest.mark.parametrize("size", [100, 2_000, 9_000, 25_000])
async def test_a_full_disk(rig, size):
    said = await asyncio.to_thread(rig.trouble, troubles.full_disk, size)
    assert said.startswith(str(rig.run.path)), said
    assert (
        "cannot be written: no space is left on the device; what is there is intact; free some space" in said
    )
    await goes_on(rig)


@pytest.mark.parametrize("after", [0, 4, 20, 50])
async def test_a_file_system_that_cannot_be_written(rig, after):
    said = await asyncio.to_thread(rig.trouble, troubles.read_only, after)
    assert said.startswith(str(rig.run.path)), said
    assert (
        "cannot be written: the file system is read-only; what is there is intact; mount it writable" in said
    )
    await goes_on(rig)


async def test_a_clock_that_runs_backwards(rig):
    assert await asyncio.to_thread(rig.trouble, troubles.clock_backwards) == ""
    assert_survived(rig.run, STEPS)
    assert rig.sandboxes() == []


async def test_a_clock_that_was_set_back_between_attempts(rig):
    await asyncio.to_thread(rig.die, "checkpoint.after_marker", 1)
    assert await asyncio.to_thread(rig.trouble, troubles.clock_backwards) == ""
    assert_survived(rig.run, STEPS)


async def test_a_torn_tail(rig):
    await asyncio.to_thread(rig.die, "checkpoint.before_marker", 2)
    with rig.run.attempts()[0].journal_path.open("ab") as file:
        file.write(b'{"data":{"step":7')
    await goes_on(rig)


async def test_an_attempt_that_does_not_do_all_steps_says_how_to_go_on(rig, monkeypatch):
    how, shown = f"Go on with: rollhook run --resume {rig.run.run_id}", io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(CountingTrainer, "save", None)
        with pytest.raises(TypeError):
            await rig.drive(shown=shown)
    assert how in shown.getvalue()
    drain, shown = asyncio.Event(), io.StringIO()
    drain.set()
    assert (await rig.drive(drain, shown=shown)).status == "stopped"
    assert how in shown.getvalue()
    shown = io.StringIO()
    assert (await rig.drive(shown=shown)).status == "succeeded"
    assert "Go on with" not in shown.getvalue()


async def test_damage_in_the_middle_of_a_journal_stops_the_next_attempt(rig):
    await asyncio.to_thread(rig.die, "checkpoint.before_marker", 2)
    path = rig.run.attempts()[0].journal_path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"data", b"dada")
    path.write_bytes(b"".join(lines))
    committed = CheckpointStore(rig.run.checkpoints).newest()
    with pytest.raises(JournalError, match=r"journal.jsonl, line 4: .*start a new run from a checkpoint"):
        await rig.drive()
    assert CheckpointStore(rig.run.checkpoints).newest() == committed
    assert rig.run.newest_attempt().status == "failed"


@pytest.mark.parametrize("kept", [0, 600])
async def test_a_journal_that_lost_what_committed_steps_trained_stops_the_next_attempt(rig, kept):
    """Else the prompts of those steps would be trained twice."""
    await asyncio.to_thread(rig.die, "checkpoint.before_marker", 2)
    path = rig.run.attempts()[0].journal_path
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunError, match=r"rig-\d+ do not say what step 1 trained, .*start a new run"):
        await rig.drive()
    assert rig.trained()["steps"] == 1


async def test_an_interrupt_between_two_steps_leaves_no_step_uncommitted(tmp_path, monkeypatch):
    rig, drain, write = (
        Rig(tmp_path, steps=STEPS, checkpoint={"every": STEPS}),
        asyncio.Event(),
        MetricsWriter.write,
    )

    def write_and_interrupt(self, *row):
        write(self, *row)
        drain.set()

    monkeypatch.setattr(MetricsWriter, "write", write_and_interrupt)
    result = await rig.drive(drain)
    assert (result.status, result.steps) == ("stopped", 1)
    assert rig.trained()["steps"] == 1
    await rig.drive()
    assert rig.trained()["steps"] == STEPS


async def test_two_drivers_at_once(tmp_path):
    rig = Rig(tmp_path, steps=1000)
    first = asyncio.create_task(rig.drive())
    await until(rig, "batch")
    with pytest.raises(
        RunError, match=r"rig-\d+ is being driven: attempt 1 by process \d+ on .* is alive; stop"
    ):
        await rig.drive()
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [(attempt.number, attempt.status) for attempt in rig.run.attempts()] == [(1, "stopped")]


async def test_a_driver_that_was_succeeded_stops_before_its_next_write(rig):
    driving = asyncio.create_task(rig.drive())
    await until(rig, "batch")
    succeed(rig)
    before = rig.run.attempts()[0].journal_path.read_bytes()
    with pytest.raises(RunError, match=r"attempt 2 of run .* was started by process 7 on elsewhere"):
        await driving
    after = rig.run.attempts()[0].journal_path.read_bytes()
    assert before.startswith(after) or after.startswith(before)
    assert not (rig.run.path / "result.json").exists()
    assert rig.run.attempts()[0].status is None
    assert CheckpointStore(rig.run.checkpoints).all() == []
    assert rig.sandboxes() == []


@pytest.mark.parametrize(("owner", "method"), [(CountingTrainer, "save"), (Rollouts, "sandbox_stats")])
async def test_a_driver_that_was_succeeded_while_it_stood_still_commits_nothing(
    rig, owner, method, monkeypatch
):
    """Such as one that was stopped by a signal amid the commit of a step, or behind it."""
    real = getattr(owner, method)

    def stand_still(self, *args):
        if not (rig.run.path / "attempts/2").exists():
            succeed(rig)
            written.update(files(rig.run))
        return real(self, *args)

    written = {}
    monkeypatch.setattr(owner, method, stand_still)
    with pytest.raises(RunError, match=r"attempt 2 of run .* was started by process 7 on elsewhere"):
        await rig.drive()
    assert files(rig.run) == written


def files(run):
    """Return what the attempts of a run share, beside the weights: metrics and committed steps."""
    return {
        "metrics": run.metrics_path.read_bytes(),
        "steps": [checkpoint.step for checkpoint in CheckpointStore(run.checkpoints).all()],
    }


def succeed(rig):
    """Claim the next attempt, as a driver elsewhere does."""
    other = rig.run.path / "attempts/2"
    other.mkdir()
    (other / "owner.json").write_text(json.dumps({"host": "elsewhere", "pid": 7}))


async def until(rig, event):
    """Return once the first attempt has written this event."""
    path = rig.run.path / "attempts/1/journal.jsonl"
    while not path.exists() or event not in [entry.event for entry in journal.read(path)]:
        await asyncio.sleep(0.001)
