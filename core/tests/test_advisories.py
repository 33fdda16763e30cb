"""Hints from the metrics of recent steps: each fires at its threshold, stays, and clears."""

import io

import pytest
from driving import Rig
from rich.console import Console

from rollhook.metric_names import unlisted
from rollhook.runtime.advisories import LEAST, RULES, WINDOW, advise
from rollhook.runtime.batch import Batch, batch_metrics
from rollhook.runtime.books import Books
from rollhook.runtime.progress import Display

STEP = {
    "time/step": 100.0, "time/wait_groups": 10.0, "rollout/episodes": 64.0, "rollout/turns_mean": 5.0,
    "rollout/truncated_ratio": 0.1, "rollout/prefix_cache_hit_rate": 0.8, "groups/accepted": 6.0,
    "groups/rejected": 2.0, "groups/rejected/zero_variance": 2.0, "buffer/groups": 2.0, "staleness/max": 2.0,
    "outcome/infra_error": 1.0, "router/token_imbalance": 1.1, "router/tokens_in_flight/0.0": 10.0,
    "router/tokens_in_flight/0.1": 30.0,
}  # fmt: skip


def steps(count=WINDOW, **changes):
    """Rows of `count` sound steps with some metrics changed, `/` as `__`; 64 episodes begin in each."""
    changed = {name.replace("__", "/"): value for name, value in changes.items()}
    stale = changed.pop("stale", 0.0)
    return [
        {**STEP, "books/submitted": 64.0 * n, "books/rejected/stale": 64.0 * n * stale, **changed}
        for n in range(count)
    ]


#: rule -> changes at which it fires, at which it stays, at which it clears; and what it says
SERIES = {
    "rollout bound": ({"time__wait_groups": 40.0}, {"time__wait_groups": 15.0}, {"time__wait_groups": 9.0},
                      "rollout bound: the trainer waits 40 % of the time"),
    "training bound": ({"time__wait_groups": 1.0, "buffer__groups": 12.0},
                       {"time__wait_groups": 1.0, "buffer__groups": 5.0},
                       {"time__wait_groups": 1.0, "buffer__groups": 3.0},
                       "training bound: 1.5 steps' groups wait"),
    "stale": ({"stale": 0.25}, {"stale": 0.15}, {"stale": 0.05}, "stale: 25 % of the episodes"),
    "failing": ({"outcome__infra_error": 4.0}, {"outcome__infra_error": 2.0}, {"outcome__infra_error": 1.0},
                "failing: the machinery fails 6 %"),
    "no variance": ({"groups__rejected/zero_variance": 4.0}, {"groups__rejected/zero_variance": 3.5},
                    {"groups__rejected/zero_variance": 3.0}, "no variance: 50 % of the groups"),
    "truncated": ({"rollout__truncated_ratio": 0.3}, {"rollout__truncated_ratio": 0.22},
                  {"rollout__truncated_ratio": 0.19}, "truncated: 30 % of the episodes"),
    "prefix cache": ({"rollout__prefix_cache_hit_rate": 0.05}, {"rollout__prefix_cache_hit_rate": 0.12},
                     {"rollout__prefix_cache_hit_rate": 0.2}, "prefix cache: engines compute 95 %"),
    "hot rank": ({"router__token_imbalance": 1.6}, {"router__token_imbalance": 1.3},
                 {"router__token_imbalance": 1.2}, "one dp rank is hot: worker 0.1 has 1.6 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERIES)
def test_a_hint_fires_at_its_threshold_stays_below_it_and_clears(name):
    fires, stays, clears, says = SERIES[name]
    assert advise(steps()) == {}, "a sound run has none"
    found = advise(steps(**fires))
    assert list(found) == [name]
    assert found[name].startswith(says)
    assert advise(steps(**stays)) == {}
    assert list(advise(steps(**stays), found)) == [name]
    assert advise(steps(**clears), found) == {}
    assert advise(steps(LEAST - 1, **fires)) == {}, "too few steps to say"


def test_a_slow_step_is_told_if_it_is_long():
    usual = steps()
    slow = [*usual, {**STEP, "time/step": 1900.0}]
    assert list(advise(slow)) == ["slow step"]
    assert advise([*usual, {**STEP, "time/step": 1700.0}]) == {}
    assert advise([*slow, STEP], ["slow step"]) == {}


def test_a_hot_rank_is_named_by_its_load_in_recent_steps_or_not_at_all():
    hot = steps(router__token_imbalance=2.0)
    hot[-1] |= {"router/tokens_in_flight/0.0": 90.0}  # by chance, in the newest alone
    assert "hot: worker 0.1 has 2.0 times" in advise(hot)["hot rank"]
    where = {"0.0": "http://a rank 0", "0.1": "http://a rank 1"}
    assert "dp rank is hot: http://a rank 1 has 2.0" in advise(hot, workers=where)["hot rank"]
    idle = {"router__tokens_in_flight/0.0": 0.0, "router__tokens_in_flight/0.1": 0.0}  # between two steps
    assert "hot: the busiest has 2.0 times" in advise(steps(router__token_imbalance=2.0, **idle))["hot rank"]


def test_only_recent_steps_count():
    old = steps(50, router__token_imbalance=9.0)
    assert advise([*old, *steps()]) == {}


def test_a_trainer_that_waits_where_nothing_is_made_in_training_is_no_news():
    assert advise(steps(time__wait_groups=90.0, staleness__max=0.0)) == {}


def test_every_rule_is_tried_and_reads_metrics_that_exist():
    assert {rule.name for rule in RULES} == {*SERIES, "slow step"}
    assert unlisted([*STEP, "books/submitted", "books/rejected/stale"]) == set()


def test_a_metric_that_is_missing_is_no_hint():
    assert advise([{}] * WINDOW) == {}


def test_the_display_says_a_hint_once():
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    with display.running():
        for number, row in enumerate(
            [*steps(**SERIES["stale"][0]), *steps(20), *steps(**SERIES["stale"][0])]
        ):
            display.step(number, 100, row, every=100)
    assert out.getvalue().count("Hint: stale: ") == 1


def test_off_a_terminal_a_line_says_now_and_then_how_far_a_stretch_is():
    out, now = io.StringIO(), [0.0]
    display = Display(Console(file=out, width=200), now=lambda: now[0])
    with display.running():
        display.advance()  # of nothing
        display.begin("evaluate (greedy)", 50)
        for _ in range(50):
            now[0] += 7.0
            display.advance()
        display.end()
        now[0] += 100
        display.advance()
    lines = out.getvalue().splitlines()
    assert lines == [f"evaluate (greedy): {done} of 50" for done in range(5, 51, 5)]


def test_the_books_are_metrics_that_are_listed():
    books = Books()
    books.submit("a")
    books.submit("b")
    books.reject(["a"], "timeout")
    metrics = batch_metrics(Batch(books=books.metrics(), waiting_staleness=[1.0, 3.0]))
    assert (metrics["books/submitted"], metrics["books/in_flight"], metrics["books/rejected"]) == (2, 1, 1)
    assert (metrics["buffer/staleness_mean"], metrics["buffer/staleness_max"]) == (2, 3)
    assert unlisted(metrics) == set()


async def test_steps_that_train_nothing_are_told_once_and_counted_at_the_end(tmp_path, caplog):
    out = io.StringIO()
    rig = Rig(tmp_path, rollout={"group_size": 1, "drop_zero_variance": False}, evaluation={"every": 3})
    await rig.drive(shown=out)
    warned = [each.message for each in caplog.records if "nothing" in each.message and each.levelno >= 30]
    assert warned == [
        "step 1 trains nothing: no group was accepted (2 too_few_rewards)",
        "3 steps trained nothing: no group was accepted in them",
    ]
    assert "\nevaluating at step 3 ...\n" in out.getvalue()
