"""Evaluation: choice of tasks, rates, the test between two of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.environment import Task
from rollhook.runtime.evaluate import Evaluation, Rate, choose, comparison, one_sided_p
from rollhook.runtime.progress import summaries

TASKS = [Task(f"{f}{n}", f"{f}{n}", "heldout", f) for f in ("big",) for n in range(40)]
TASKS += [Task(f"s{n}", f"s{n}", "heldout", "small") for n in range(10)]


def test_a_choice_is_the_same_each_time_and_spread_over_the_families():
    chosen = choose(TASKS, 16, 1, seed=3)
    assert chosen == choose(TASKS, 16, 1, seed=3)
    assert chosen != choose(TASKS, 16, 1, seed=4)
    assert Counter(t.family for t in chosen) == {"big": 8, "small": 8}


def test_without_a_number_every_task_is_chosen_and_samples_repeat_it():
    assert sorted(t.id for t in choose(TASKS, None, 1, 0)) == sorted(t.id for t in TASKS)
    repeated = Counter(t.id for t in choose(TASKS, 20, 4, 0))
    assert set(repeated.values()) == {4}
    assert len(repeated) == 5


@given(st.integers(1, 500), st.data())
def test_a_rate_lies_between_none_and_all(count, data):
    rate = Rate(data.draw(st.integers(0, count)), count)
    assert 0 <= rate.value <= 1
    assert 0 <= rate.stderr <= 0.5 / count**0.5 + 1e-12


def test_metric_names_are_those_that_readers_know():
    found = Evaluation(4, "greedy", {"sort": Rate(3, 4, 1)}).metrics()
    assert found["eval/pass_rate_greedy"] == 0.75
    assert found["eval/errors_greedy"] == 1
    assert found["eval_family_greedy/sort"] == 0.75
    assert Evaluation(4, "sampled", {"sort": Rate(1, 4)}).metrics()["eval_family/sort"] == 0.25


def test_a_comparison_ends_with_the_total():
    before = Evaluation(0, "sampled", {"a": Rate(1, 4), "b": Rate(2, 4)})
    after = Evaluation(9, "sampled", {"a": Rate(4, 4), "b": Rate(2, 4)})
    assert comparison(before, after)[-1] == ("all", Rate(3, 8), Rate(6, 8))


@pytest.mark.parametrize(
    ("families", "labels"),
    [
        ({"": Rate(1, 4)}, ["all"]),
        ({"": Rate(1, 4), "sort": Rate(2, 4)}, ["(none)", "sort", "all"]),
        ({"all": Rate(1, 4), "some": Rate(2, 4)}, ["all", "some", "all"]),
    ],
)
def test_the_table_has_a_row_for_each_family_and_one_for_all(families, labels):
    (shown,) = summaries(
        [Evaluation(step, mode, families) for step in (0, 9) for mode in ("sampled", "greedy")]
    )
    assert shown is not None
    assert list(shown.columns[0].cells) == labels
    assert len(shown.columns) == 1 + 2 * 3


def test_the_one_sided_test_agrees_with_a_table():
    # 100/200 against 120/200: z = 2.0101, upper tail 0.02221
    assert one_sided_p(Rate(100, 200), Rate(120, 200)) == pytest.approx(0.02221, abs=1e-4)
    assert one_sided_p(Rate(120, 200), Rate(100, 200)) == pytest.approx(1 - 0.02221, abs=1e-4)
    assert one_sided_p(Rate(0, 10), Rate(0, 10)) == 1.0


def test_a_rate_without_a_verdict_is_no_zero():
    assert str(Rate(0, 0, 5)) == "no verdict"
    assert str(Rate(3, 4)) == "0.750 ± 0.217"


def test_each_of_several_environments_has_its_metrics_and_its_table():
    found = [Evaluation(s, "sampled", {"x": Rate(s, 9)}, environment=e) for s in (1, 9) for e in ("a", "b")]
    assert [table.title for table in summaries(found)] == [
        f"Held-out pass rate of {name}, before and after" for name in "ab"
    ]
    assert found[3].metrics()["eval/b/pass_rate"] == 1.0
    assert found[3].metrics()["eval_family/b/x"] == 1.0
