"""Weight directories: complete or not there, and words for a disk that cannot take them."""

from pathlib import Path

import pytest

from rollhook.engine.weights import WeightStore
from rollhook.errors import EngineError, RunError


def test_a_version_is_complete_once_committed_and_published_once(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    path = store.new(3)
    (path / "model.safetensors").write_bytes(b"x")
    assert store.complete() == []
    store.commit(path, 3)
    assert store.newest() == (3, path)
    with pytest.raises(EngineError, match="was published before"):
        store.new(3)


def test_a_disk_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="v000001 cannot be written"):
        WeightStore(tmp_path / "file").new(1)
    store = WeightStore(tmp_path / "weights")
    with pytest.raises(RunError, match=r"v000002.* cannot be written"):
        store.commit(tmp_path / "weights" / "v000002", 2)
