"""Observers and trackers run on a thread of their own; one that fails or hangs costs only what it missed."""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook import hookspecs
from rollhook.component import BuildContext
from rollhook.errors import RunError
from rollhook.hookspecs import hookimpl
from rollhook.metrics_file import MetricsWriter, read_metrics
from rollhook.observers import Observers
from rollhook.recipe.schema import Recipe
from rollhook.testing.tracker import ListTracker
from rollhook.tracker import Tracker

CONTEXT = BuildContext(logging.getLogger("test"), scratch=Path(), cache=Path())


class FakePlugins:
    """What Observers asks of the loaded plugins."""

    def __init__(self, *observers: object) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        for observer in observers:
            self.manager.register(observer)

    def owner(self, observer: object) -> str:
        return f"rollhook-{type(observer).__name__.lower()}"

    def distribution(self, kind: str, name: str) -> tuple[str, str]:
        return f"rollhook-{name}", "1.0"


def observing(
    *observers: object, trackers: Mapping[str, Tracker] | None = None, capacity: int = 100
) -> Observers:
    plugins: Any = FakePlugins(*observers)
    return Observers(plugins, trackers or {}, {"name": "demo"}, capacity=capacity)


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.threads: set[int] = set()

    def note(self, *what: Any) -> None:
        self.seen.append(what)
        self.threads.add(threading.get_ident())

    @hookimpl
    def rollhook_run_started(self, run_id: str, attempt: int, recipe: Recipe) -> None:
        self.note("started", run_id, attempt, recipe.name)

    @hookimpl
    def rollhook_episode_finished(self, record: Any) -> None:
        self.note("episode", record)

    @hookimpl
    def rollhook_step_finished(self, metrics: dict[str, float]) -> None:
        self.note("step", metrics)

    @hookimpl
    def rollhook_run_finished(self, run_id: str, status: str) -> None:
        self.note("finished", run_id, status)


class Failing:
    @hookimpl
    def rollhook_episode_finished(self, record: Any) -> None:
        raise ValueError("cannot count")


class Started(ListTracker):
    def start(self, run_id: str, attempt: int, recipe: Mapping[str, Any]) -> None:
        self.log(-1, {run_id: attempt, **dict.fromkeys(recipe, 0.0)})

    def finish(self, status: str) -> None:
        self.log(-2, {status: 0.0})


def test_everybody_is_told_in_order_and_on_another_thread() -> None:
    watcher = Watcher()
    rows: list[Any] = []
    observers = observing(watcher, trackers={"list": Started(rows, CONTEXT)})
    record: Any = object()
    observers.run_started("demo-1", 2, Recipe(name="demo"))
    observers.episode(record)
    observers.step(7, {"train/loss": 0.5})
    observers.run_finished("demo-1", "succeeded")
    observers.close()
    observers.close()
    assert watcher.seen == [
        ("started", "demo-1", 2, "demo"),
        ("episode", record),
        ("step", {"train/loss": 0.5}),
        ("finished", "demo-1", "succeeded"),
    ]
    assert rows == [(-1, {"demo-1": 2, "name": 0.0}), (7, {"train/loss": 0.5}), (-2, {"succeeded": 0.0})]
    assert watcher.threads.isdisjoint({threading.get_ident()})


def test_one_that_fails_is_named_and_counted_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Watcher(), Watcher()
    observers = observing(before, Failing(), after)
    record: Any = object()
    for _ in range(3):
        observers.episode(record)
    observers.close()
    assert len(before.seen) == len(after.seen) == 3
    assert observers.failures == {"rollhook-failing": 3}
    assert "rollhook-failing: an observer failed (3 so far): ValueError: cannot count" in caplog.text
    assert caplog.text.count("Traceback") == 1


def test_a_tracker_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("unreachable")

    rows: list[Any] = []
    observers = observing(trackers={"broken": Broken({}, CONTEXT), "list": ListTracker(rows, CONTEXT)})
    observers.step(1, {"x": 1.0})
    observers.close()
    assert observers.failures == {"rollhook-broken": 1}
    assert rows == [(1, {"x": 1.0})]


class Slow(Watcher):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()

    @hookimpl
    def rollhook_episode_finished(self, record: Any) -> None:
        self.entered.set()
        self.gate.wait()
        self.note("episode", record)


def test_a_full_queue_drops_and_counts_but_never_loses_the_end(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    observers = observing(slow, capacity=3)
    record: Any = object()
    observers.episode(record)
    slow.entered.wait()
    for _ in range(10):
        observers.episode(record)
    observers.step(1, {})
    observers.run_finished("demo", "failed")
    slow.gate.set()
    observers.close()
    assert len([each for each in slow.seen if each[0] == "episode"]) == 4
    assert slow.seen[-1] == ("finished", "demo", "failed")
    assert observers.dropped == 8
    assert "observers are too slow: their queue of 3 is full" in caplog.text
    assert "8 events were not shown to them" in caplog.text


def test_one_that_hangs_does_not_hold_the_run_up(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    observers = observing(slow)
    record: Any = object()
    observers.episode(record)
    observers.episode(record)
    slow.entered.wait()
    observers.close(timeout=0.01)
    assert "observers did not finish within 0.01 s" in caplog.text
    slow.gate.set()
    observers.close()


def test_metrics_are_rows_of_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", clock=lambda: 12.5)
    writer.write(1, 2, {"eval/pass_rate": 0.5, "bad": float("nan")})
    writer.close()
    writer.close()
    row = {"schema": 1, "step": 1, "attempt": 2, "time": 12.5, "eval/pass_rate": 0.5, "bad": None}
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [row]
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [row]


@settings(deadline=None)
@given(cut=st.integers(0, 200))
def test_a_torn_row_is_removed_before_the_next(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write(step, 1, {"x": 1.0})
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = [row["step"] for row in read_metrics(path)]
    writer = MetricsWriter(path)
    writer.write(9, 2, {"x": 1.0})
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [*kept, 9]


def test_a_damaged_row_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"schema": 1, "step": 1}\nbroken\n{"schema": 1, "step": 2}\n')
    with pytest.raises(RunError, match="line 2: not a row of metrics"):
        list(read_metrics(path))
    path.write_text('{"schema": 2, "step": 1}\n')
    with pytest.raises(RunError, match="has schema 2, this Rollhook reads up to 1"):
        list(read_metrics(path))
    with pytest.raises(RunError, match="cannot be read"):
        list(read_metrics(tmp_path / "absent"))
