"""Death at each durable write: what a later process finds is whole, and it can go on."""

import asyncio
import re
from pathlib import Path

import dying
import pytest
from driving import Shelf, ShelfConfig
from dying import DIED, elsewhere

import rollhook
from rollhook import failpoints, journal
from rollhook.checkpoints import CheckpointStore
from rollhook.engine.weights import WeightStore
from rollhook.episode_store import EpisodeStore, read_records, read_samples
from rollhook.errors import RunError, UsageError
from rollhook.metrics_file import MetricsWriter, read_metrics
from rollhook.rundir import RunDir
from rollhook.runtime.results import read_result
from rollhook.sandbox.lease import leases
from rollhook.sandbox.reap import reap
from rollhook.testing.records import check_episodes

#: what each test dies at; together they are all points
AT = {
    "journal": ["journal.before_write", "journal.before_fsync", "journal.after_fsync"],
    "file": ["durable.before_write", "durable.before_rename", "durable.after_rename"],
    "checkpoint": [
        "checkpoint.after_begin", "checkpoint.before_rename", "checkpoint.before_marker",
        "durable.before_write", "durable.before_rename", "durable.after_rename", "checkpoint.after_marker",
    ],
    "weights": [
        "weights.after_new", "weights.before_marker", "durable.before_write", "durable.before_rename",
        "durable.after_rename", "weights.after_marker",
    ],
    "removal": ["checkpoint.amid_removal", "weights.amid_removal"],
    "episodes": [
        "episodes.after_open", "episodes.before_tokens", "episodes.before_lines", "episodes.after_lines",
        "durable.before_rename",
    ],
    "create": ["rundir.before_index"],
    "claim": ["rundir.before_owner", "rundir.after_owner"],
    "end": [
        "result.before_write", "result.after_write", "rundir.before_status", "durable.before_rename",
        "durable.after_rename",
    ],
    "metrics": ["metrics.before_row", "metrics.after_row"],
    "sandbox": ["sandbox.before_create", "sandbox.after_create"],
}  # fmt: skip


def at(name):
    return pytest.mark.parametrize("point", AT[name])


def test_every_point_is_died_at_here_and_stands_in_the_code():
    assert {point for points in AT.values() for point in points} == set(failpoints.NAMES)
    sources = [path.read_text() for path in Path(rollhook.__file__).parent.rglob("*.py")]
    found = [name for source in sources for name in re.findall(r"\bfail\(\"([a-z_.]+)\"\)", source)]
    assert sorted(found) == sorted(failpoints.NAMES)


@at("journal")
def test_a_journal_is_readable_and_goes_on(tmp_path, point):
    path = tmp_path / "journal.jsonl"
    assert elsewhere(point, 3, dying.keep_a_journal, path) == DIED
    found = [entry.data.get("number") for entry in journal.read(path)]
    assert found == [None, 0, 1, 2][: len(found)]
    assert len(found) >= 1
    with journal.Journal(path) as again:
        again.append("after")
    assert [entry.event for entry in journal.read(path)][-1] == "after"


@at("file")
def test_a_file_has_its_old_or_its_new_bytes(tmp_path, point):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    assert elsewhere(point, 1, dying.replace_a_file, path) == DIED
    assert path.read_bytes() == (b"new" * 100 if point == "durable.after_rename" else b"old")


@at("checkpoint")
def test_the_newest_checkpoint_is_the_old_or_the_new_one(tmp_path, point):
    assert elsewhere(point, 2, dying.commit_steps, tmp_path) == DIED
    store = CheckpointStore(tmp_path)
    newest = store.newest()
    assert newest.step == (2 if point in ("checkpoint.after_marker", "durable.after_rename") else 1)
    assert list(newest.episode_ids) == [f"e{newest.step}"]
    assert (newest.path / "model").read_text() == f"weights of {newest.step}"
    if newest.step == 1:
        dying.save(store, 2)
    store.prune(1)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


@at("weights")
def test_the_newest_weights_are_the_old_or_the_new_ones(tmp_path, point):
    assert elsewhere(point, 4, dying.publish_versions, tmp_path) == DIED
    store = WeightStore(tmp_path)
    version, path = store.newest()
    assert version == (4 if point in ("weights.after_marker", "durable.after_rename") else 3)
    assert (path / "model").read_text() == f"weights of {version}"
    dying.publish(store, 5)
    store.prune()
    kept = {3: {"v000003", "v000005"}, 4: {"v000004", "v000005"}}
    assert {path.name for path in tmp_path.iterdir()} == kept[version]


@at("removal")
def test_what_was_being_removed_never_looks_complete(tmp_path, point):
    if point.startswith("checkpoint"):
        assert elsewhere(point, 1, dying.commit_steps, tmp_path) == DIED
        store = CheckpointStore(tmp_path)
        assert [checkpoint.step for checkpoint in store.all()] == [2]
        store.prune(1)
        assert [path.name for path in tmp_path.iterdir()] == ["00000002"]
    else:
        assert elsewhere(point, 1, dying.publish_versions, tmp_path) == DIED
        store = WeightStore(tmp_path)
        assert len(store.complete()) == 3
        store.prune()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003", "v000004"]


@at("episodes")
@pytest.mark.parametrize("hit", [1, 2])
def test_episodes_are_there_with_their_tokens_or_not_at_all(tmp_path, point, hit):
    assert elsewhere(point, hit, dying.finish_episodes, tmp_path) == DIED
    found = [record.episode_id for record in read_records(tmp_path)]
    assert found == ["e0", "e1", "e2"][: len(found)]
    assert [sample.episode_id for sample in read_samples(tmp_path)] == found
    store = EpisodeStore(tmp_path)
    dying.finish(store, "after")
    store.close()
    assert [record.episode_id for record in read_records(tmp_path)] == [*found, "after"]
    assert check_episodes(tmp_path) == []


@at("create")
def test_a_run_that_was_being_made_keeps_its_name(tmp_path, point):
    assert elsewhere(point, 1, dying.make_a_run, tmp_path) == DIED
    assert RunDir.find(tmp_path / "demo").attempts() == []
    with pytest.raises(RunError, match="choose another id"):
        RunDir.create(tmp_path, "demo", run_id="demo")


@at("claim")
def test_a_claim_that_died_is_followed_by_the_next(tmp_path, point):
    run = RunDir.create(tmp_path, "demo", run_id="demo")
    assert elsewhere(point, 1, dying.attempt_a_run, run.path) == DIED
    attempt = run.claim(sleep=no_wait)
    assert attempt.number == (2 if point == "rundir.after_owner" else 1)
    attempt.finish("succeeded")
    assert [entry.event for entry in journal.read(attempt.path / "journal.jsonl")] == ["journal"]


@at("end")
@pytest.mark.parametrize("hit", [1, 2])
def test_an_end_is_told_wholly_or_not_at_all(tmp_path, point, hit):
    run = RunDir.create(tmp_path, "demo", run_id="demo")
    code = elsewhere(point, hit, dying.attempt_a_run, run.path)
    assert code == (DIED if hit == 1 or point.startswith("durable") else 0)
    result, (attempt,) = read_result(run.path), run.attempts()
    assert result is None or result.steps == 7
    assert attempt.status in (None, "succeeded")
    assert result is not None or attempt.status is None
    assert attempt.surely_dead()
    run.claim(sleep=no_wait).finish("succeeded")
    assert not list(run.path.rglob(".*.tmp"))


@at("metrics")
def test_rows_of_metrics_are_whole_and_go_on(tmp_path, point):
    path = tmp_path / "metrics.jsonl"
    assert elsewhere(point, 2, dying.write_metrics, path) == DIED
    with path.open("ab") as file:
        file.write(b'{"schema":')  # what a crash of the machine may leave
    writer = MetricsWriter(path)
    writer.write(3, 2, {})
    writer.close()
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == ([1, 2, 3] if point == "metrics.after_row" else [1, 3])


@at("sandbox")
async def test_a_sandbox_of_the_dead_is_found_and_reaped(tmp_path, point):
    run = RunDir.create(tmp_path, "demo", run_id="demo")
    provider = tmp_path / "provider"
    assert await asyncio.to_thread(elsewhere, point, 1, dying.ask_for_a_sandbox, run.path, provider) == DIED
    (lease,) = leases(journal.read(run.attempts()[0].journal_path)).values()
    assert lease.open
    report = await reap(Shelf(ShelfConfig(directory=provider), None))
    assert list(report.deleted.values()) == (
        ["its attempt's process is gone"] if point == "sandbox.after_create" else []
    )
    assert not list(provider.glob("*"))


@pytest.mark.parametrize(
    ("text", "ends"), [("", 0), ("durable.before_write:2", DIED), ("metrics.after_row", 0)]
)
def test_the_environment_arms_a_point(tmp_path, monkeypatch, text, ends):
    monkeypatch.setenv(failpoints.VARIABLE, text)
    code = elsewhere(None, 0, dying.replace_a_file_as_the_environment_says, tmp_path / "file")
    assert (code, (tmp_path / "file").read_bytes()) == (ends, b"new" * 100)


def test_a_misspelt_point_is_named(monkeypatch):
    for text in ("journal.nowhere", "journal.before_write:0", "journal.before_write:x"):
        monkeypatch.setenv(failpoints.VARIABLE, text)
        with pytest.raises(UsageError, match=r"there is no failpoint journal\..*there are: durable"):
            failpoints.arm_from_environment()


def no_wait(seconds):
    raise AssertionError("waited for a process that is dead")
