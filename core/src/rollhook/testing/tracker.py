"""The contract of trackers: inherit `TrackerContract`, give it a tracker and what it wrote, run pytest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.testing.contract import Contract
from rollhook.tracker import Tracker

MakeTracker = Callable[[], Tracker]
#: (step, metrics) of every row that the destination holds, in order; values that are no numbers are absent
ReadRows = Callable[[], Sequence[tuple[int, Mapping[str, float]]]]

RECIPE: Mapping[str, Any] = {"name": "demo", "steps": 2, "trackers": [{"use": "mine"}], "seed": 0}


class TrackerContract(Contract):
    """What every tracker must do. A suite gives two fixtures.

    `make_tracker` returns a callable that builds the tracker afresh, always with the same destination;
    `read_rows` returns a callable that reads the destination back.
    """

    @pytest.fixture
    def make_tracker(self) -> MakeTracker:
        """Build the tracker under test, each time anew."""
        raise NotImplementedError("give the contract a fixture make_tracker that returns a builder")

    @pytest.fixture
    def read_rows(self) -> ReadRows:
        """Read what has been tracked."""
        raise NotImplementedError("give the contract a fixture read_rows that returns a reader")

    def test_building_it_does_nothing(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        make_tracker()
        assert list(read_rows()) == []

    def test_rows_are_kept_in_order(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        tracked(make_tracker(), [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})])
        assert rows(read_rows) == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})]

    def test_values_are_kept_exactly(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        values = {"a": 0.1, "b": 1e-300, "c": -3.0, "d": 2.0**60}
        tracked(make_tracker(), [(1, values)])
        assert rows(read_rows) == [(1, values)]

    def test_rows_may_have_different_metrics(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        wanted = [(0, {"eval/pass_rate": 0.5}), (1, {"train/loss": 1.0, "time/step": 2.0}), (2, {"x": 1.0})]
        tracked(make_tracker(), wanted)
        assert rows(read_rows) == wanted

    def test_a_step_may_have_two_rows(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        """An evaluation after step 1 is a row of its own; together they hold both metrics."""
        tracked(make_tracker(), [(1, {"train/loss": 1.0}), (1, {"eval_family/files": 0.5})])
        merged: dict[str, float] = {}
        for step, metrics in rows(read_rows):
            assert step == 1
            merged |= metrics
        assert merged == {"train/loss": 1.0, "eval_family/files": 0.5}

    def test_what_is_not_a_number_does_no_harm(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        tracked(make_tracker(), [(1, {"bad": float("nan"), "worse": float("inf"), "good": 1.0})])
        ((step, metrics),) = rows(read_rows)
        assert step == 1
        assert metrics["good"] == 1.0

    def test_the_caller_s_metrics_are_not_changed(
        self, make_tracker: MakeTracker, read_rows: ReadRows
    ) -> None:
        metrics = {"train/loss": 1.0}
        tracked(make_tracker(), [(1, metrics)])
        assert metrics == {"train/loss": 1.0}

    def test_finishing_twice_is_safe(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        tracker = tracked(make_tracker(), [(1, {"x": 1.0})])
        tracker.finish("succeeded")
        assert rows(read_rows) == [(1, {"x": 1.0})]

    def test_finishing_what_never_started_is_safe(
        self, make_tracker: MakeTracker, read_rows: ReadRows
    ) -> None:
        make_tracker().finish("failed")
        assert list(read_rows()) == []

    @pytest.mark.parametrize("status", ["succeeded", "failed", "stopped"])
    def test_every_end_keeps_the_rows(
        self, make_tracker: MakeTracker, read_rows: ReadRows, status: str
    ) -> None:
        tracked(make_tracker(), [(1, {"x": 1.0})], status=status)
        assert rows(read_rows) == [(1, {"x": 1.0})]

    def test_a_second_attempt_adds_to_the_first(self, make_tracker: MakeTracker, read_rows: ReadRows) -> None:
        tracked(make_tracker(), [(1, {"x": 1.0})], status="failed")
        tracked(make_tracker(), [(2, {"x": 2.0})], attempt=2)
        assert rows(read_rows) == [(1, {"x": 1.0}), (2, {"x": 2.0})]

    def test_it_works_on_a_thread_that_did_not_build_it(
        self, make_tracker: MakeTracker, read_rows: ReadRows
    ) -> None:
        tracker, errors = make_tracker(), []

        def work() -> None:
            try:
                tracked(tracker, [(1, {"x": 1.0})])
            except Exception as error:  # noqa: BLE001 - handed over
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert errors == []
        assert rows(read_rows) == [(1, {"x": 1.0})]


def tracked(
    tracker: Tracker,
    metrics: Sequence[tuple[int, Mapping[str, float]]],
    *,
    attempt: int = 1,
    status: str = "succeeded",
) -> Tracker:
    """Take a tracker through an attempt."""
    tracker.start("demo-0a1b2c", attempt, RECIPE)
    for step, row in metrics:
        tracker.log(step, row)
    tracker.finish(status)
    return tracker


def rows(read: ReadRows) -> list[tuple[int, dict[str, float]]]:
    """Return the rows in a form that compares."""
    return [(step, dict(metrics)) for step, metrics in read()]


class ListTracker(Tracker):
    """Keeps rows in the list that is its configuration: the reference for authors' tests."""

    def __init__(self, config: list[tuple[int, Mapping[str, float]]], context: BuildContext) -> None:
        super().__init__(config, context)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a row."""
        self.config.append((step, dict(metrics)))
