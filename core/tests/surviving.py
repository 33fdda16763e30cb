"""What must be true of a run on disk, however often its drivers died: as if nobody had died."""

from collections import Counter

from rollhook import journal
from rollhook.checkpoints import CheckpointStore
from rollhook.episode_store import read_records, read_samples
from rollhook.metrics_file import read_metrics
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.results import read_result
from rollhook.testing.records import check_episodes


def assert_survived(run, steps):
    """Nothing is lost, nothing twice, nothing half; return the batches by step, in order."""
    lineage = Lineage.read(run)
    assert sorted(lineage.batches) == list(range(steps))
    batches = [lineage.batches[step] for step in range(steps)]
    _prompts(lineage, batches)
    _episodes(run, batches)
    published = [entry.data["version"] for entry in events(run) if entry.event == "published"]
    assert published == sorted(set(published)), "a version was published twice"
    rows = [row["step"] for row in lineage.surviving(read_metrics(run.metrics_path)) if "time/train" in row]
    assert sorted(rows) == list(range(1, steps + 1))
    result = read_result(run.path)
    assert (result.status, result.steps) == ("succeeded", steps)
    assert run.newest_attempt().status == "succeeded"
    assert list(run.path.rglob(".*.tmp")) == []
    _checkpoints(run, lineage, steps)
    return batches


def trained(batch):
    """Return the ids of the episodes that a step trained, in order."""
    return [episode for group in batch["groups"] for episode in group["episodes"]]


def events(run):
    """Yield the entries of all attempts' journals."""
    for attempt in run.attempts():
        if attempt.journal_path.exists():
            yield from journal.read(attempt.journal_path)


def _prompts(lineage, batches):
    """Each prompt that was ever drawn was taken once, to train on or to reject."""
    taken = Counter()
    for batch in batches:
        taken.update(group["group_id"] for group in batch["groups"])
        taken.update(batch["rejected"])
    assert set(taken.values()) == {1}
    assert set(taken) == set(lineage.prompts)


def _episodes(run, batches):
    ids = [episode for batch in batches for episode in trained(batch)]
    assert len(set(ids)) == len(ids), "an episode was trained twice"
    records = [record.episode_id for record in read_records(run.episodes)]
    assert len(set(records)) == len(records)
    assert set(ids) <= set(records)
    assert {sample.episode_id for sample in read_samples(run.episodes, ids)} == set(ids)
    assert check_episodes(run.episodes) == []


def _checkpoints(run, lineage, steps):
    """The newest two are kept, and what the last attempt went on from: its trainer's model directory."""
    base = max(lineage.bases.values(), default=0)
    found = CheckpointStore(run.checkpoints).all()
    assert {checkpoint.step for checkpoint in found} == {steps - 1, steps, base} - {0}
