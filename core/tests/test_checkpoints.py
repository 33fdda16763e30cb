"""Checkpoints: complete or not there, whatever moment a crash or a full disk takes."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from rollhook import checkpoints, durable
from rollhook.checkpoints import CheckpointStore, read_checkpoint
from rollhook.errors import RunError


class Crash(BaseException):
    """The process ends here."""


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    path = store.begin(step)
    (path / "model").mkdir()
    (path / "model" / "model.safetensors").write_text(text)
    return path


def committed(store: CheckpointStore, step: int) -> checkpoints.Checkpoint:
    return store.commit(save(store, step), step, step + 10, [f"e{step}"], 100 + step, {"draw": [1, 2]})


def test_a_commit_is_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", attempt=3)
    assert store.newest() is None
    made = committed(store, 5)
    assert store.newest() == made == read_checkpoint(tmp_path / "checkpoints" / "00000005")
    assert (made.step, made.version, made.journal_seq, made.attempt) == (5, 15, 105, 3)
    assert list(made.episode_ids) == ["e5"]
    assert made.extra == {"draw": [1, 2]}
    assert (made.path / "model" / "model.safetensors").read_text() == "weights"
    assert json.loads((made.path / "checkpoint.json").read_text())["schema"] == 1


def test_a_marker_that_was_copied_along_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    first = committed(store, 1)
    path = save(store, 2)
    shutil.copy(first.path / "checkpoint.json", path)

    def crash(path: Path, data: bytes) -> None:
        raise Crash

    monkeypatch.setattr(checkpoints, "write_atomic", crash)
    with pytest.raises(Crash):
        store.commit(path, 2, 12, [], 102)
    assert CheckpointStore(tmp_path).newest() == first


def test_the_newest_is_the_highest_committed_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 10, 2):
        committed(store, step)
    save(store, 11)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 10


def test_the_marker_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash at each durable step in turn: afterwards the new checkpoint is either wholly there or not."""
    store = CheckpointStore(tmp_path)
    committed(store, 1)
    count = {"left": 0}
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def crashing(name: str) -> None:
        def call(*arguments: object) -> object:
            count["left"] -= 1
            if count["left"] == 0:
                raise Crash
            return real[name](*arguments)

        monkeypatch.setattr(os, name, call)

    for name in real:
        crashing(name)
    survived = []
    for point in range(1, 30):
        path = save(store, 2)
        count["left"] = point
        try:
            store.commit(path, 2, 12, [], 102)
            survived.append(point)
            break
        except Crash:
            count["left"] = 0
            newest = CheckpointStore(tmp_path).newest()
            assert newest is not None
            if newest.step == 2:
                assert (newest.path / "model" / "model.safetensors").read_text() == "weights"
                store._remove(newest.path)
    assert survived[0] > 6, "every fsync and rename was a crash point"
    CheckpointStore(tmp_path).prune(2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["00000001", "00000002"]


def test_a_step_is_never_committed_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    committed(store, 1)
    with pytest.raises(RunError, match="step 1 is committed already"):
        committed(store, 1)


def test_a_leftover_without_a_marker_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    leftover = tmp_path / "00000001"
    leftover.mkdir()
    (leftover / "half").write_text("")
    assert store.newest() is None
    with pytest.raises(RunError, match=r"no complete checkpoint \(it has no checkpoint.json\)"):
        read_checkpoint(leftover)
    assert sorted(each.name for each in committed(store, 1).path.iterdir()) == ["checkpoint.json", "model"]


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 6):
        committed(store, step)
    CheckpointStore(tmp_path).begin(6)
    open_one = store.begin(7)
    (tmp_path / "notes.txt").write_text("not ours")
    store.prune(2)
    assert sorted(each.name for each in tmp_path.iterdir() if each != open_one) == [
        "00000004",
        "00000005",
        "notes.txt",
    ]
    assert open_one.is_dir()


def test_a_crash_while_pruning_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        committed(store, step)

    def crash(path: Path) -> None:
        raise Crash

    monkeypatch.setattr("shutil.rmtree", crash)
    with pytest.raises(Crash):
        store.prune(1)
    assert [each.step for each in CheckpointStore(tmp_path).all()] == [2]


def test_a_full_disk_is_said_clearly_and_harms_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    first = committed(store, 1)

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "write_all", full)
    with pytest.raises(RunError, match=r"checkpoint.json cannot be written: no space is left on the device"):
        committed(store, 2)
    assert CheckpointStore(tmp_path).newest() == first


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    made = committed(store, 1)
    marker = json.loads((made.path / "checkpoint.json").read_text())
    (made.path / "checkpoint.json").write_text(json.dumps(marker | {"schema": 9}))
    with pytest.raises(RunError, match="schema 9"):
        store.newest()


@pytest.mark.parametrize("raw", ["[]", "7", "{}", '{"schema": "1"}', '{"schema": 1, "step": 3}'])
def test_a_marker_that_is_none_is_said_with_what_to_do(tmp_path: Path, raw: str) -> None:
    store = CheckpointStore(tmp_path)
    made = committed(store, 1)
    (made.path / "checkpoint.json").write_text(raw)
    with pytest.raises(RunError, match=r"is not the marker of a checkpoint; remove .*00000001"):
        store.newest()
