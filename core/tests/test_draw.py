"""Drawing tasks."""

from collections import Counter

import pytest

from rollhook.environment import Task
from rollhook.runtime.draw import Draw, share_out

TASKS = [Task(f"{family}-{n}", f"{family}{n}", "train", family) for family in "abc" for n in range(10)]


def draw(how="uniform", floor=0.1, seed=0):
    return Draw(TASKS, how=how, floor=floor, seed=seed)


def test_uniform_takes_every_task_once_per_epoch():
    drawn = draw()
    first = [t.id for step in range(3) for t in drawn.take(10, step)]
    assert sorted(first) == sorted(t.id for t in TASKS)
    second = [t.id for step in range(3, 6) for t in drawn.take(10, step)]
    assert sorted(second) == sorted(first)
    assert second != first


def test_the_same_seed_gives_the_same_tasks_and_another_gives_others():
    for how in ("uniform", "learnable"):
        assert draw(how).take(8, 0) == draw(how).take(8, 0)
        assert draw(how).take(8, 0) != draw(how, seed=1).take(8, 0)


def test_learnable_prefers_families_between_never_and_always_and_starves_none():
    drawn = draw("learnable", floor=0.02)
    for _ in range(60):
        drawn.observe("a", 1.0)
        drawn.observe("b", 0.5)
        drawn.observe("c", 0.0)
    counts = Counter(t.family for step in range(100) for t in drawn.take(16, step))
    assert counts["b"] > 5 * counts["a"] > 0
    assert counts["b"] > 5 * counts["c"] > 0


def test_a_restored_draw_goes_on_as_the_saved_one_would_have():
    for how in ("uniform", "learnable"):
        one = draw(how)
        one.take(7, 0)
        one.observe("a", 0.9)
        other = draw(how)
        other.load(one.state())
        assert one.take(9, 1) == other.take(9, 1)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_environments_get_their_weight_however_small_a_batch_is(count):
    drawn = [0, 0, 0]
    for _ in range(100):
        shares = share_out(count, [0.7, 0.2, 0.1], drawn)
        assert sum(shares) == count
        drawn = [n + share for n, share in zip(drawn, shares, strict=True)]
        ideal = [weight * sum(drawn) for weight in (0.7, 0.2, 0.1)]
        assert all(abs(n - due) <= 1 for n, due in zip(drawn, ideal, strict=True))
