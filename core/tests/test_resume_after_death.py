"""A driver that dies at any durable write, and the next attempt: nothing lost, twice or left."""

import asyncio
import itertools
from collections import Counter

import pytest
from driving import Rig, chain
from dying import DIED

from rollhook import failpoints, journal
from rollhook.checkpoints import CheckpointStore
from rollhook.episode_store import read_records, read_samples
from rollhook.metrics_file import read_metrics
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.results import read_result
from rollhook.testing.records import check_episodes

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
    """The run on disk is as if nobody had died, but for what the dead attempts say of themselves."""
    lineage = Lineage.read(rig.run)
    batches = [lineage.batches[step] for step in range(STEPS)]
    assert len(lineage.batches) == STEPS
    assert_prompts(lineage, batches)
    assert_weights(rig, batches)
    assert_episodes(rig, batches)
    assert sorted(each["step"] for each in lineage.evaluations) == [0, 2, 4]
    surviving = lineage.surviving(read_metrics(rig.run.metrics_path))
    rows = [row["step"] for row in surviving if "time/train" in row]
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert_nothing_left(rig)


def assert_prompts(lineage, batches):
    """Each prompt that was ever drawn was taken once, to train on or to reject."""
    taken = Counter()
    for batch in batches:
        taken.update(group["group_id"] for group in batch["groups"])
        taken.update(batch["rejected"])
    assert set(taken.values()) == {1}
    assert set(taken) == set(lineage.prompts)


def assert_weights(rig, batches):
    """The trainer's state is that of the surviving batches in order; no number was published twice."""
    digest = ""
    for step, batch in enumerate(batches):
        ids = [episode for group in batch["groups"] for episode in group["episodes"]]
        digest = chain(digest, step, ids)
    assert rig.trained() == {"steps": STEPS, "digest": digest}
    versions = [entry.data["version"] for entry in events(rig) if entry.event == "published"]
    assert versions == sorted(set(versions))


def assert_episodes(rig, batches):
    trained = [episode for batch in batches for group in batch["groups"] for episode in group["episodes"]]
    assert len(set(trained)) == len(trained)
    records = [record.episode_id for record in read_records(rig.run.episodes)]
    assert len(set(records)) == len(records)
    assert set(trained) <= set(records)
    assert {sample.episode_id for sample in read_samples(rig.run.episodes, trained)} == set(trained)
    assert check_episodes(rig.run.episodes) == []


def assert_nothing_left(rig):
    assert rig.sandboxes() == []
    assert list(rig.run.path.rglob(".*.tmp")) == []
    # what the last attempt went on from is its trainer's model directory
    base = f"{max(Lineage.read(rig.run).bases.values(), default=0):08d}"
    kept = {"00000003", "00000004", base} - {"00000000"}
    assert {checkpoint.path.name for checkpoint in CheckpointStore(rig.run.checkpoints).all()} == kept
    assert read_result(rig.run.path).status == "succeeded"
    assert rig.run.newest_attempt().status == "succeeded"


def events(rig):
    for attempt in rig.run.attempts():
        if attempt.journal_path.exists():
            yield from journal.read(attempt.journal_path)
