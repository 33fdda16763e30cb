from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook_torch.schedule import learning_rate

BASE: dict[str, Any] = {
    "peak": 1.0,
    "shape": "linear",
    "warmup_steps": 4,
    "decay_fraction": 1.0,
    "final_fraction": 0.1,
}


def rates(total: int, **keys: Any) -> list[float]:
    return [learning_rate(step, total, **{**BASE, **keys}) for step in range(total)]


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    assert rates(100)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(100, warmup_steps=0)[0] == 1.0


def test_a_linear_decay_ends_at_the_final_fraction() -> None:
    found = rates(14, warmup_steps=3)
    assert found[-1] == pytest.approx(0.1)
    steps = [a - b for a, b in pairwise(found[3:])]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_a_rate_holds_before_it_decays() -> None:
    found = rates(100, decay_fraction=0.2)
    assert found[3:81] == [1.0] * 78
    assert found[81] < 1.0
    assert found[-1] == pytest.approx(0.1)


def test_a_cosine_is_half_way_at_its_middle() -> None:
    found = rates(101, shape="cosine", warmup_steps=0, final_fraction=0.0)
    assert found[50] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_constant_rate_stays() -> None:
    assert set(rates(50, shape="constant", warmup_steps=0)) == {1.0}


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 50),
    decay=st.floats(0.01, 1.0),
    final=st.floats(0, 1),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_a_rate_is_never_above_the_peak_nor_below_nothing(
    total: int, warmup: int, decay: float, final: float, shape: str
) -> None:
    keys = {"warmup_steps": warmup, "decay_fraction": decay, "final_fraction": final, "shape": shape}
    found = rates(total, **keys)
    assert all(0 <= rate <= 1 + 1e-12 for rate in found)
    after = found[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
