"""Results of runs: what a broken or abandoned one is to those who look for a finished run."""

from pathlib import Path

import pytest

from rollhook.runtime.results import RunResult, finished_run, read_result


def finished(root: Path) -> Path:
    """Write a finished run with a complete checkpoint and return its directory."""
    run = root / "sft-1"
    checkpoint = run / "checkpoints" / "00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    RunResult("sft-1", "succeeded", "d", steps=3, checkpoint=str(checkpoint)).write(run)
    return run


def test_a_finished_run_is_found_by_its_digest(tmp_path: Path) -> None:
    finished(tmp_path)
    found = finished_run(tmp_path, "d")
    assert found is not None
    assert (found.run_id, found.steps) == ("sft-1", 3)
    assert finished_run(tmp_path, "other") is None


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b"null", b'"text"', b'{"evaluations": [7]}', b"\xff", b'{"evaluations": 7}'],
)
def test_a_damaged_result_is_none_at_all(tmp_path: Path, raw: bytes) -> None:
    run = finished(tmp_path)
    (run / "result.json").write_bytes(raw)
    assert read_result(run) is None
    assert finished_run(tmp_path, "d") is None


def test_a_result_of_a_later_schema_does_not_count(tmp_path: Path) -> None:
    run = finished(tmp_path)
    raw = (run / "result.json").read_bytes()
    (run / "result.json").write_bytes(raw.replace(b'"schema": 1', b'"schema": 2'))
    assert read_result(run) is None
    assert finished_run(tmp_path, "d") is None


def test_a_result_whose_checkpoint_is_half_there_does_not_count(tmp_path: Path) -> None:
    run = finished(tmp_path)
    (run / "checkpoints" / "00000003" / "checkpoint.json").unlink()
    assert finished_run(tmp_path, "d") is None
