"""The page about a run: its figures, its lineage, and that nothing in it can do anything."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from driving import Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook import metric_names
from rollhook.cli.main import main
from rollhook.episode_store import EpisodeStore, read_records
from rollhook.errors import RunError
from rollhook.metrics_file import MetricsWriter, read_metrics
from rollhook.records import EpisodeRecord, Outcome
from rollhook.rundir import Attempt, RunDir
from rollhook.runtime import charts
from rollhook.runtime.figures import Extremes, Figures, Tally, TaskKey, read_figures, seconds_of
from rollhook.runtime.report import render, write_report
from rollhook.runtime.transcript import MAX_MESSAGES, MAX_TEXT, cut
from rollhook.terminal import plain

TIMINGS = {
    "create": 2.0, "setup": 1.0, "agent": 10.0, "agent/tokens": 6.0, "agent/command": 1.0, "wait/engine": 2.0,
    "verify": 3.0, "teardown": 1.0, "total": 18.0,
}  # fmt: skip


def episode(episode_id: str, reward: float | None = 1.0, **changes: Any) -> EpisodeRecord:
    outcome = (
        Outcome("infra_error", boundary="sandbox", cause="gone after 12.5 s") if reward is None else None
    )
    record = EpisodeRecord(
        episode_id=episode_id, run_id="demo", attempt=1, purpose="train", group_id=episode_id[3:13],
        task_id="t1", task_digest="d", environment="rooms", family="sort", seed=0, ended="done",
        outcome=outcome or Outcome("scored", reward), reward=reward, timings=TIMINGS,
        messages=[{"role": "user", "content": "sort it"}, {"role": "assistant", "content": "done"}],
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", run_id="demo")


def step_row(step: int, **more: float) -> dict[str, float]:
    return {
        "rollout/episodes": 2, "rollout/pass_rate": 0.5, "rollout/reward_mean": 0.5, "rollout/tokens": 100,
        "outcome/scored": 2, "staleness/mean": 0.5, "staleness/max": 1, "time/step": 10, "time/train": 4,
        "time/wait_groups": 3, "sandbox/seconds": 7.0 * step, "sandbox/live": 3,
        **more,
    }  # fmt: skip


def fill(
    run: RunDir,
    episodes: list[EpisodeRecord],
    rows: list[tuple[int, int, dict[str, float]]] = [],  # noqa: B006 - read only
    attempts: Callable[[Attempt], None] | list[Callable[[Attempt], None]] = lambda attempt: None,
) -> None:
    """Write a run: its episodes, its rows of metrics, its attempts (each is told what to journal)."""
    store = EpisodeStore(run.episodes)
    for record in episodes:
        store.append(record, ())
    store.close()
    writer = MetricsWriter(run.metrics_path, clock=lambda: 0.0)
    for step, attempt, row in rows:
        writer.write(step, attempt, row)
    writer.close()
    for tell in attempts if isinstance(attempts, list) else [attempts]:
        attempt = run.claim()
        tell(attempt)
        attempt.finish("stopped")


def test_the_figures_of_a_run(run: RunDir) -> None:
    def rejects(attempt: Attempt) -> None:
        attempt.journal.append(
            "group_rejected", step=0, group_id="g", task_id="t2", reason="filter failed: KeyError: 'x'"
        )

    fill(
        run,
        [
            episode("a1-s00000-g000-e00-t0"),
            episode("a1-s00000-g000-e01-t0", None),
            episode("a1-s00000-g000-e01-t1", 0.0),
            episode("a1-s00000-g001-e00-t0", 0.5, task_id="t2", family="copy"),
            episode("a1-s00002-sampled-00000-t0", 1.0, purpose="eval", task_id="t9"),
        ],
        [
            (1, 1, step_row(1)),
            (2, 1, step_row(2)),
            (
                2,
                1,
                {"eval/pass_rate": 0.75, "eval/stderr": 0.1, "eval_family/sort": 0.8, "time/evaluate": 5.0},
            ),
        ],
        rejects,
    )
    figures = read_figures(run)
    assert figures.problems == []
    data = figures.data()
    assert data["episodes"] == 5
    assert data["outcomes"] == {"scored": 4, "infra_error": 1}
    assert data["causes"] == [{"boundary": "sandbox", "cause": "gone after # s", "episodes": 1}]
    assert data["seconds"]["driver"] == {
        "train": 8, "idle": 6, "publish": 0, "update": 0, "checkpoint": 0, "evaluate": 5, "other": 6
    }  # fmt: skip
    assert data["sandboxes"] == {"seconds": 14.0}
    assert data["tokens"] == 200
    assert data["evaluations"] == [
        {
            "step": 2,
            "environment": "",
            "mode": "sampled",
            "families": {"sort": 0.8},
            "pass_rate": 0.75,
            "stderr": 0.1,
        }
    ]
    tasks = {(row["task_id"], row["purpose"]): row for row in data["tasks"]}
    first, second = tasks["t1", "train"], tasks["t2", "train"]
    assert (first["episodes"], first["refills"], first["errors"], first["pass_rate"]) == (3, 1, 1, 0.5)
    assert (second["pass_rate"], second["reward_mean"]) == (0.0, 0.5)
    assert second["rejected"] == {"filter failed": 1}
    assert tasks["t9", "eval"]["refills"] == 0
    families = {(row["family"], row["purpose"]): row for row in data["families"]}
    assert families["copy", "train"]["rejected"] == {"filter failed": 1}
    assert json.loads(json.dumps(data)) == data


def test_only_the_surviving_lineage_counts(run: RunDir) -> None:
    def goes_on(attempt: Attempt) -> None:
        attempt.journal.append("resumed", step=1, version=4, checkpoint="00000001")
        attempt.journal.append(
            "batch", step=1, version=4, rejected=[],
            groups=[{"group_id": "s00001-g000", "episodes": ["a1-s00001-g000-e00-t0"]}],
        )  # fmt: skip

    fill(
        run,
        [
            episode("a1-s00000-g000-e00-t0"),
            episode("a1-s00001-g000-e00-t0"),  # finished before the end, trained by the second attempt
            episode("a1-s00001-g001-e00-t0"),
            episode("a1-s00002-sampled-00000-t0", purpose="eval"),
            episode("a1-s00001-sampled-00000-t0", purpose="eval"),
            episode("a2-s00001-g001-e00-t0", attempt=2),
        ],
        [
            (1, 1, step_row(1)),
            (2, 1, step_row(2, **{"rollout/pass_rate": 0.9})),
            (2, 2, step_row(2)),
        ],
        [lambda attempt: None, goes_on],
    )
    figures = read_figures(run)
    assert figures.superseded == 2
    assert figures.episodes == 4
    assert [(row["step"], row["attempt"], row["rollout/pass_rate"]) for row in figures.steps] == [
        (1, 1, 0.5),
        (2, 2, 0.5),
    ]
    assert figures.sandboxes == {"seconds": 28.0}, "what a dead attempt spent is spent"
    assert "2 more superseded" in page(run)


@pytest.mark.parametrize("known", [True, False])
def test_what_sandboxes_cost_is_told_only_if_every_attempt_knows_it(run: RunDir, known: bool) -> None:
    cost = {"sandbox/creates": 2.0, "sandbox/cost": 1.25}
    second = cost if known else {"sandbox/creates": 2.0}
    rows = [(1, 1, step_row(1, **cost)), (2, 2, step_row(2, **second))]
    fill(run, [episode("a1-s00000-g000-e00-t0")], rows, [lambda attempt: None] * 2)
    assert read_figures(run).sandboxes.get("cost") == (2.5 if known else None)
    assert ("sandbox cost" in page(run)) is known


def page(run: RunDir) -> str:
    return write_report(run, watch=lambda paths: set()).read_text()


HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\ud800\x00{{7*7}}"


class Strict(HTMLParser):
    """Collects the tags and refuses what could act or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "src", "style", "xlink:href", "srcdoc", "action", "data"), (tag, name)
            if (name, value) == ("http-equiv", "Content-Security-Policy"):
                self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_is_hostile_is_shown_as_text_everywhere(run: RunDir) -> None:
    record = episode(
        "a1-s00000-g000-e00-t0", 1.0, task_id=HOSTILE, family=HOSTILE, environment=HOSTILE,
        detail={HOSTILE: [HOSTILE]}, components={HOSTILE: 1.0}, warnings=[HOSTILE], fired=HOSTILE,
        messages=[
            {"role": HOSTILE, "content": HOSTILE, "reasoning_content": HOSTILE},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}]},
        ],
    )  # fmt: skip
    failed = Outcome("infra_error", boundary=HOSTILE, cause=HOSTILE)
    other = dataclasses.replace(record, episode_id=HOSTILE, family="f", outcome=failed, reward=None)
    rows = [
        (1, 1, step_row(1, **{f"outcome/{HOSTILE}": 1.0})),
        (1, 1, {f"eval/{HOSTILE}/pass_rate": 0.5, f"eval_family/{HOSTILE}/{HOSTILE}": 0.1}),
    ]
    lock = {
        "sources": [HOSTILE],
        "versions": {HOSTILE: HOSTILE},
        "deviations": {HOSTILE: {"value": HOSTILE, "reference": HOSTILE, "from": HOSTILE}},
        "recipe": {"name": HOSTILE, "agent": {"use": HOSTILE}, "environment": [{"use": HOSTILE}]},
    }

    def rejects(attempt: Attempt) -> None:
        attempt.journal.append("group_rejected", step=0, group_id="g", task_id=HOSTILE, reason=HOSTILE)

    fill(run, [record, other], rows, rejects)
    run.lock_path.write_text(yaml.safe_dump(json.loads(json.dumps(lock).replace("\\ud800", ""))))
    text = page(run)
    parser = Strict()
    parser.feed(text)
    assert parser.tags & {"script", "img", "iframe", "object", "embed", "link", "form", "base", "a"} == set()
    assert text.count("<script") == text.count("<img") == 0
    assert text.count("</style>") == 1
    assert "alert(1)" in text
    shown = "".join(parser.texts)
    assert "<script>alert(1)</script>" in shown
    assert "\\x1b[31m\\u202e" in shown
    assert not set("\x1b\u202e\x00") & set(text)
    assert "{{7*7}}" in shown
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert parser.policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "unsafe" not in parser.policy


def test_long_texts_and_transcripts_are_cut_with_a_note(run: RunDir) -> None:
    messages = [{"role": "user", "content": f"message {n}"} for n in range(MAX_MESSAGES + 7)]
    messages[-1]["content"] = "x" * (MAX_TEXT + 1000) + "the end"
    fill(run, [episode("a1-s00000-g000-e00-t0", messages=messages)])
    text = page(run)
    assert "7 messages are cut here" in text
    assert "message 9<" in text
    assert "message 10<" not in text
    assert "1,007 characters are cut here" in text
    assert "the end" in text


@pytest.mark.parametrize(
    ("ends", "says"), [(None, "in progress"), ("failed", "failed"), ("succeeded", "succeeded")]
)
def test_the_page_says_how_the_run_stands(run: RunDir, ends: Any, says: str) -> None:
    attempt = run.claim()
    if ends:
        attempt.finish(ends)
    text = write_report(run, watch=set).read_text()
    if not ends:
        attempt.finish("stopped")
    assert f">{says}</span>" in text


def test_a_run_whose_process_is_gone_has_died(run: RunDir) -> None:
    attempt = run.claim()
    attempt.finish("stopped")
    (attempt.path / "status.json").unlink()
    owner = attempt.path / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"pid": 0}))
    assert ">died</span>" in page(run)


def test_a_run_that_has_nothing_yet_has_a_page(run: RunDir) -> None:
    assert ">not started</span>" in page(run)
    assert read_figures(run).data()["episodes"] == 0


def test_what_is_damaged_is_said_and_the_rest_is_there(run: RunDir) -> None:
    fill(run, [episode("a1-s00000-g000-e00-t0")], [(1, 1, step_row(1))])
    with (run.episodes / "00001.jsonl").open("ab") as file:
        file.write(b"nonsense\n{}\n")
    journal = run.path / "attempts/1/journal.jsonl"
    journal.write_bytes(b"nonsense\n" + journal.read_bytes())
    figures = read_figures(run)
    assert figures.episodes == 1
    assert [record.episode_id for record in figures.best] == ["a1-s00000-g000-e00-t0"]
    assert len(figures.steps) == 1
    assert len(figures.problems) == 2
    assert page(run).count("Not everything could be read") == 2


def test_a_page_that_cannot_be_written_is_said_in_words(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written"):
        write_report(run, tmp_path / "absent/report.html")


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(TIMINGS)), st.floats(0, 1e6), max_size=9),
)
def test_the_parts_of_an_episode_add_up_to_its_time(timings: dict[str, float]) -> None:
    parts = seconds_of(episode("e", timings=timings))
    assert all(value >= 0 for value in parts.values())
    assert sum(parts.values()) >= timings.get("total", 0.0) * (1 - 1e-9)
    assert sum(seconds_of(episode("e")).values()) == pytest.approx(18.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([0.0, 0.5, 1.0])), max_size=30),
    st.integers(1, 4),
    st.sampled_from([1, -1]),
)
def test_the_extremes_are_the_newest_of_the_tasks_with_the_most(
    seen: list[tuple[str, float]], count: int, sign: int
) -> None:
    extremes = Extremes(count, sign)
    for number, (task, reward) in enumerate(seen):
        extremes.take(episode(str(number), reward, task_id=task))
    keys = {}
    for number, (task, reward) in enumerate(seen):
        keys[task] = max(keys.get(task, (float("-inf"), -1)), (sign * reward, number))
    wanted = [str(number) for _, number in sorted(keys.values(), reverse=True)[:count]]
    assert [record.episode_id for record in extremes.records()] == wanted


POINTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12)),
    min_size=1,
    max_size=400,
    unique_by=lambda point: point[0],
)


@settings(max_examples=50, deadline=None)
@given(POINTS)
def test_charts_are_well_formed_and_stay_in_their_frame(points: list[tuple[int, float]]) -> None:
    points.sort()
    both = [charts.Series("a <b>", points, 0), charts.Series("c", points[:3], 1, [0.1] * len(points[:3]))]
    root = ElementTree.fromstring(charts.lines(both))
    for line in root.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert charts.LEFT - 1 <= x <= charts.WIDTH
            assert charts.TOP - 1 <= y <= charts.HEIGHT - charts.BOTTOM + 1
    drawn = charts.stacked([step for step, _ in points], {"a&b": [abs(y) for _, y in points]}, {"a&b": 0})
    assert len(list(ElementTree.fromstring(drawn).iter("rect"))) <= charts.MOST_BARS


def test_an_axis_is_round() -> None:
    assert charts.Axis.over([0.0, 0.93]).ticks() == pytest.approx([0, 0.5, 1.0])
    assert charts.Axis.over([3.0, 3.0]).ticks()[0] < 3.0 < charts.Axis.over([3.0, 3.0]).ticks()[-1]
    assert charts.Steps.over([1, 40]).ticks() == [10, 20, 30, 40]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200), st.integers(10, 100))
def test_cut_text_is_short_and_says_what_is_missing(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert short == text if len(text) <= limit else "characters are cut here" in short
    assert len(short) <= limit + 50
    plain(text).encode()


def test_memory_does_not_grow_with_the_episodes(run: RunDir) -> None:
    store = EpisodeStore(run.episodes, part_bytes=1 << 18)
    for number in range(1500):
        said = [{"role": "assistant", "content": f"{number}" * 1000}]
        store.append(episode(f"a1-s{number:05d}-g000-e00-t0", number % 7, messages=said), ())
        if number % 50 == 0:
            store.flush()
    store.close()
    size = sum(path.stat().st_size for path in run.episodes.iterdir())
    tracemalloc.start()
    try:
        assert read_figures(run).episodes == 1500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2, (peak, size)


def test_many_tasks_are_shown_in_part_and_all_are_in_the_figures(run: RunDir) -> None:
    figures = Figures("demo")
    for number in range(500):
        figures.tasks[TaskKey("rooms", "sort", f"t{number}", "train")] = Tally(episodes=1)
    assert "300 more are in" in render(run, figures, "stopped")
    assert len(figures.data()["tasks"]) == 500


async def test_a_driven_run_has_listed_metrics_and_a_page(tmp_path: Path) -> None:
    rig = Rig(tmp_path, steps=2, evaluation={"every": 2, "episodes": 2})
    await rig.drive()
    rows = list(read_metrics(rig.run.metrics_path))
    assert metric_names.unlisted({name for row in rows for name in row}) == {
        "schema",
        "step",
        "attempt",
        "time",
    }
    figures = read_figures(rig.run)
    assert figures.problems == []
    assert [row["step"] for row in figures.steps] == [1, 2]
    assert figures.episodes == len(list(read_records(rig.run.episodes)))
    assert figures.data()["sandboxes"]["seconds"] > 0
    assert ">succeeded</span>" in page(rig.run)


def test_the_verb_writes_the_page_or_prints_the_figures(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(run, [episode("a1-s00000-g000-e00-t0")], [(1, 1, step_row(1))])
    for arguments in (["demo"], [str(run.path), "--output", str(tmp_path / "p.html")], ["demo", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        assert ended.value.code == 0
    first, second, figures = capsys.readouterr().out.split("\n", 2)
    assert Path(first) == run.path / "report.html"
    assert Path(second).read_text() == (run.path / "report.html").read_text()
    assert json.loads(figures)["state"] == "stopped"
    assert json.loads(figures)["episodes"] == 1


async def test_a_run_that_ends_leaves_its_page(tmp_path):
    rig = Rig(tmp_path, steps=1)
    await rig.drive()
    assert "rig" in (rig.run.path / "report.html").read_text()
