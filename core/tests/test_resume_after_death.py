"""A driver that dies at any durable write, and the next attempt: nothing lost, twice or left."""

import asyncio
import itertools

import pytest
from driving import Rig, chain
from dying import DIED
from surviving import assert_survived, trained

from rollhook import failpoints
from rollhook.runtime.lineage import Lineage

STEPS = 4
#: point -> the times at which it is died at, out of how often a run of so many steps reaches it
HITS = dict.fromkeys(failpoints.NAMES, (2,)) | {
    "durable.before_write": (1, 4),
    "durable.before_rename": (6,),
    "durable.after_rename": (3, 9),
    "journal.before_write": (4, 16),
    "journal.before_fsync": (1, 9),
    "journal.after_fsync": (2, 14),
    "rundir.before_index": (),  # before there is an attempt
    "sandbox.after_create": (1, 9),
} | dict.fromkeys(
    [
        "rundir.before_owner", "rundir.after_owner", "rundir.before_status", "result.before_write",
        "result.after_write", "episodes.after_open", "checkpoint.amid_removal",
    ],
    (1,),
)  # fmt: skip
CASES = [(name, hit) for name in failpoints.NAMES for hit in HITS[name]]


def rig_of(tmp_path, **changes):
    """Return a run with evaluation, pruning and weights that lag."""
    rollout = {"max_staleness": 1, **changes.pop("rollout", {})}
    evaluation = {"every": 2, "episodes": 2}
    return Rig(tmp_path, steps=STEPS, rollout=rollout, evaluation=evaluation, **changes)


@pytest.mark.parametrize(("point", "hit"), CASES)
async def test_the_next_attempt_goes_on(tmp_path, point, hit):
    """Invariant 3: every prompt has an owner on disk, and a step commits with its checkpoint."""
    rig = rig_of(tmp_path)
    await asyncio.to_thread(rig.die, point, hit)
    result = await rig.drive()
    assert (result.status, result.steps) == ("succeeded", STEPS)
    assert_whole(rig)


@pytest.mark.parametrize(
    "rollout",
    [
        {"max_staleness": None, "submission": "group"},
        {"max_staleness": 2, "fill": True, "min_group": 2, "unused": "drop", "buffer_groups": 2},
    ],
    ids=["no limit", "full steps"],
)
async def test_the_next_attempt_goes_on_however_groups_are_made(tmp_path, rollout):
    rig = rig_of(tmp_path, rollout=rollout)
    await asyncio.to_thread(rig.die, "checkpoint.before_marker", 2)
    result = await rig.drive()
    assert (result.status, result.steps) == ("succeeded", STEPS)
    assert_whole(rig)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", [name for name in failpoints.NAMES if HITS[name]])
async def test_the_next_attempt_goes_on_from_any_death(tmp_path, point, record_property):
    """Every time that a run reaches the point."""
    for hit in itertools.count(1):
        rig = rig_of(tmp_path / str(hit))
        code = await asyncio.to_thread(rig.attempt_elsewhere, point, hit)
        assert code in (0, DIED)
        if code == 0:
            break
        await rig.drive()
        assert_whole(rig)
    record_property("figure", f"{point}: {hit - 1} deaths survived")
    assert hit > 1


async def test_a_run_survives_deaths_in_a_row(tmp_path):
    """Also of an attempt that has only just begun, and of one that was resumed."""
    rig = rig_of(tmp_path)
    for point, hit in (
        ("checkpoint.after_marker", 2), ("rundir.after_owner", 1), ("journal.before_write", 1),
        ("sandbox.after_create", 2), ("checkpoint.before_marker", 1), ("weights.before_marker", 2),
    ):  # fmt: skip
        await asyncio.to_thread(rig.die, point, hit)
    result = await rig.drive()
    assert (result.status, result.steps) == ("succeeded", STEPS)
    assert_whole(rig)


def assert_whole(rig):
    """The run is whole, and its trainer's state is that of the surviving batches, in order."""
    batches = assert_survived(rig.run, STEPS)
    digest = ""
    for step, batch in enumerate(batches):
        digest = chain(digest, step, trained(batch))
    assert rig.trained() == {"steps": STEPS, "digest": digest}
    assert sorted(each["step"] for each in Lineage.read(rig.run).evaluations) == [0, 2, 4]
    assert rig.sandboxes() == []


async def test_sandboxes_of_the_dead_are_reaped_where_nobody_has_indexed_the_run(tmp_path, monkeypatch):
    rig = rig_of(tmp_path)
    await asyncio.to_thread(rig.die, "sandbox.after_create", 2)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    await rig.drive()
    assert rig.sandboxes() == []
