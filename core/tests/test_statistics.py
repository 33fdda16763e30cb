"""Statistics of evaluations, against definitions, published tables and simulation."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.runtime.statistics import (
    Rate,
    mean_pass_at_k,
    one_sided_p,
    paired,
    pass_at_k,
    sign_flip_p,
    wilson,
)

COUNTS = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
PAIRS = st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=8)


@given(COUNTS, st.integers(1, 6))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(count, k):
    n, c = count
    if k > n:
        with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated"):
            pass_at_k(n, c, k)
        return
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 9_901, 100) == 1.0


@given(st.lists(COUNTS, min_size=1, max_size=30), st.integers(1, 6))
def test_an_estimate_lies_in_its_interval_and_both_between_0_and_1(counts, k):
    found = mean_pass_at_k(counts, k)
    able = [each for each in counts if each[0] >= k]
    if not able:
        assert found is None
        return
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
    assert found.tasks == len(able)


def test_wilson_agrees_with_a_published_table():
    # Newcombe 1998, Stat. Med. 17:857, table I, method 3
    for passed, size, low, high in [
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
    ]:  # fmt: skip
        assert wilson(passed / size, size) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 40), st.integers(0, 40))
def test_one_sample_per_task_gives_the_plain_wilson_interval(tasks, passed):
    passed = min(tasks, passed)
    found = mean_pass_at_k([(1, 1)] * passed + [(1, 0)] * (tasks - passed), 1)
    assert (found.low, found.high) == pytest.approx(wilson(passed / tasks, tasks))


def test_samples_of_tasks_that_are_all_or_nothing_tell_no_more_than_one_sample():
    once = mean_pass_at_k([(1, 1), (1, 0)] * 20, 1)
    often = mean_pass_at_k([(8, 8), (8, 0)] * 20, 1)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    alike = mean_pass_at_k([(8, 4)] * 40, 1)
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 320))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (8, 4)])
def test_the_interval_holds_the_truth_as_often_as_it_says(n, k):
    draw = np.random.default_rng(7)
    truth = float((1 - (1 - draw.beta(0.5, 1.0, 400_000)) ** k).mean())
    held = 0
    for _ in range(400):
        counts = [(n, int(c)) for c in draw.binomial(n, draw.beta(0.5, 1.0, 40))]
        found = mean_pass_at_k(counts, k)
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 0.985


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_the_paired_test_counts_the_sign_flips(differences):
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    extreme = sum(abs(each) >= abs(sum(differences)) for each in sums)
    assert sign_flip_p(differences) == pytest.approx(extreme / len(sums))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 10))
def test_with_one_sample_per_task_the_test_is_mcnemars(better, worse, same):
    pairs = [((1, 0), (1, 1))] * better + [((1, 1), (1, 0))] * worse + [((1, 1), (1, 1))] * same
    found = paired(pairs)
    if not pairs:
        assert found is None
        return
    changed = better + worse
    tail = sum(math.comb(changed, i) for i in range(min(better, worse) + 1)) / 2**changed
    assert found.p == pytest.approx(min(1.0, 2 * tail))
    assert found.value == pytest.approx((better - worse) / len(pairs))


@given(PAIRS)
def test_a_difference_lies_in_its_interval_and_turns_its_sign_with_the_sides(pairs):
    there, back = paired(pairs), paired([(b, a) for a, b in pairs])
    assert -1 <= there.low <= there.value <= there.high <= 1
    assert there.low < there.high
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))
    assert back.p == pytest.approx(there.p)
    assert 0 < there.p <= 1


def test_the_interval_of_a_difference_agrees_with_bonett_and_price():
    # p12 = 13/102, p21 = 3/102: 10/102 +- 1.96 * sqrt((16/102 - (10/102)**2) / 102)
    pairs = [((1, 0), (1, 1))] * 12 + [((1, 1), (1, 0))] * 2 + [((1, 1), (1, 1))] * 86
    found = paired(pairs)
    assert (found.low, found.high) == pytest.approx((0.02356, 0.17252), abs=1e-4)


def test_tasks_without_a_verdict_on_either_side_are_not_paired():
    assert paired([((0, 0), (4, 4))]) is None
    assert paired([((0, 0), (4, 4)), ((4, 1), (4, 2))]).tasks == 1


def test_many_tasks_with_odd_numbers_of_samples_are_compared_at_once():
    pairs = [((97, n % 97), (89, (n * 7) % 89)) for n in range(300)]
    assert 0 < paired(pairs).p <= 1


def test_the_one_sided_test_agrees_with_a_table():
    # 100/200 against 120/200: z = 2.0101, upper tail 0.02221
    assert one_sided_p(Rate(100, 200), Rate(120, 200)) == pytest.approx(0.02221, abs=1e-4)
    assert one_sided_p(Rate(120, 200), Rate(100, 200)) == pytest.approx(1 - 0.02221, abs=1e-4)
    assert one_sided_p(Rate(0, 10), Rate(0, 10)) == 1.0


@given(st.integers(1, 500), st.data())
def test_a_rate_lies_between_none_and_all(count, data):
    rate = Rate(data.draw(st.integers(0, count)), count)
    assert 0 <= rate.value <= 1
    assert 0 <= rate.stderr <= 0.5 / count**0.5 + 1e-12


def test_a_rate_without_a_verdict_is_no_zero():
    assert str(Rate(0, 0, 5)) == "no verdict"
    assert str(Rate(3, 4)) == "0.750 ± 0.217"
