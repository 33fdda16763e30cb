"""The jsonl tracker keeps the contract; rows say whose they are."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollhook import plugins
from rollhook.component import BuildContext
from rollhook.testing.tracker import MakeTracker, ReadRows, TrackerContract, tracked
from rollhook.tracker import Tracker

ABOUT = {"run_id", "attempt", "step"}


def build(directory: Path, **keys: Any) -> Tracker:
    context = BuildContext(logging.getLogger("test"), scratch=directory, cache=directory)
    tracker: Tracker = plugins.load([("tracker", "jsonl")]).build("tracker", "jsonl", keys, context)
    return tracker


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class TestJsonl(TrackerContract):
    @pytest.fixture
    def make_tracker(self, tmp_path: Path) -> MakeTracker:
        return lambda: build(tmp_path, path=str(tmp_path / "deep" / "{run_id}.jsonl"))

    @pytest.fixture
    def read_rows(self, tmp_path: Path) -> ReadRows:
        def rows() -> list[tuple[int, Mapping[str, float]]]:
            found = read(tmp_path / "deep" / "demo-0a1b2c.jsonl")
            return [
                (row["step"], {k: v for k, v in row.items() if k not in ABOUT and v is not None})
                for row in found
            ]

        return rows


def test_a_row_says_whose_it_is(tmp_path: Path) -> None:
    tracked(build(tmp_path), [(3, {"train/loss": 0.5})], attempt=2)
    assert read(tmp_path / "tracker.jsonl") == [
        {"run_id": "demo-0a1b2c", "attempt": 2, "step": 3, "train/loss": 0.5}
    ]


def test_a_row_before_the_start_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before start"):
        build(tmp_path).log(1, {})


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    tracker = build(tmp_path)
    tracker.start("demo", 1, {})
    tracker.log(1, {"x": 1.0})
    assert len(read(tmp_path / "tracker.jsonl")) == 1
    tracker.finish("stopped")
