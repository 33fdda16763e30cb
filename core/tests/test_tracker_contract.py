"""The tracker contract holds for a correct tracker, and each broken one fails just its cases."""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.testing.contract import failing_cases
from rollhook.testing.tracker import ListTracker, MakeTracker, ReadRows, TrackerContract

CONTEXT = BuildContext(logging.getLogger("test"), scratch=Path(), cache=Path())
Rows = list[tuple[int, Mapping[str, float]]]


class TestListTracker(TrackerContract):
    @pytest.fixture
    def kept(self) -> Rows:
        return []

    @pytest.fixture
    def make_tracker(self, kept: Rows) -> MakeTracker:
        return lambda: ListTracker(kept, CONTEXT)

    @pytest.fixture
    def read_rows(self, kept: Rows) -> ReadRows:
        return lambda: kept


class WritesWhenBuilt(ListTracker):
    def __init__(self, config: Rows, context: BuildContext) -> None:
        super().__init__(config, context)
        config.append((0, {}))


class NewestFirst(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.config.insert(0, (step, dict(metrics)))


class Rounds(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: round(value, 6) for name, value in metrics.items()})


class FixesItsColumns(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        columns = self.config[0][1] if self.config else metrics
        super().log(step, {name: metrics.get(name, 0.0) for name in columns})


class OneRowPerStep(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.config[:] = [row for row in self.config if row[0] != step]
        super().log(step, metrics)


class RefusesNaN(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: value for name, value in metrics.items() if int(value) is not None})


class EatsTheRow(ListTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        metrics.clear()  # type: ignore[attr-defined]


class FinishesOnce(ListTracker):
    _finished = False

    def finish(self, status: str) -> None:
        if self._finished:
            raise RuntimeError("finished already")
        self._finished = True


class MustHaveStarted(ListTracker):
    _open = False

    def start(self, run_id: str, attempt: int, recipe: Mapping[str, Any]) -> None:
        self._open = True

    def finish(self, status: str) -> None:
        if not self._open:
            raise RuntimeError("never started")


class ForgetsWhatFailed(ListTracker):
    def finish(self, status: str) -> None:
        if status == "failed":
            self.config.clear()


class ForgetsWhatWasStopped(ListTracker):
    def finish(self, status: str) -> None:
        if status == "stopped":
            self.config.clear()


class StartsAnew(ListTracker):
    def start(self, run_id: str, attempt: int, recipe: Mapping[str, Any]) -> None:
        self.config.clear()


class StaysOnItsThread(ListTracker):
    def __init__(self, config: Rows, context: BuildContext) -> None:
        import threading

        super().__init__(config, context)
        self._home = threading.get_ident()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import threading

        if threading.get_ident() != self._home:
            raise RuntimeError("wrong thread")
        super().log(step, metrics)


def failing(broken: Callable[[Rows, BuildContext], ListTracker]) -> set[str]:
    kept: Rows = []

    def make_tracker() -> MakeTracker:
        kept.clear()
        return lambda: broken(kept, CONTEXT)

    failed: set[str] = set()
    for status in ("succeeded", "failed", "stopped"):
        failed |= failing_cases(
            TrackerContract,
            {
                "make_tracker": make_tracker,
                "read_rows": lambda: lambda: kept,
                "status": functools.partial(str, status),
            },
        )
    return failed


EVERY_ROW = {
    "test_rows_are_kept_in_order",
    "test_rows_may_have_different_metrics",
    "test_a_second_attempt_adds_to_the_first",
}


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (NewestFirst, EVERY_ROW),
        (Rounds, {"test_values_are_kept_exactly"}),
        (FixesItsColumns, {"test_rows_may_have_different_metrics", "test_a_step_may_have_two_rows"}),
        (OneRowPerStep, {"test_a_step_may_have_two_rows"}),
        (RefusesNaN, {"test_what_is_not_a_number_does_no_harm"}),
        (FinishesOnce, {"test_finishing_twice_is_safe"}),
        (MustHaveStarted, {"test_finishing_what_never_started_is_safe"}),
        (ForgetsWhatFailed, {"test_every_end_keeps_the_rows", "test_a_second_attempt_adds_to_the_first"}),
        (ForgetsWhatWasStopped, {"test_every_end_keeps_the_rows"}),
        (StartsAnew, {"test_a_second_attempt_adds_to_the_first"}),
        (StaysOnItsThread, {"test_it_works_on_a_thread_that_did_not_build_it"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_tracker_fails_just_its_cases(broken: type[ListTracker], cases: set[str]) -> None:
    assert failing(broken) == cases


def test_one_that_changes_the_caller_s_metrics_is_found() -> None:
    assert "test_the_caller_s_metrics_are_not_changed" in failing(EatsTheRow)


def test_one_that_writes_when_it_is_built_is_found() -> None:
    assert "test_building_it_does_nothing" in failing(WritesWhenBuilt)
