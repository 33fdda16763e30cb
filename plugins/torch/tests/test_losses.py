"""Every loss against a plain, slow implementation of its paper's formula: loops over tokens, float64."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollhook.records import Sample
from rollhook.testing.trainer import batch, sample_of
from rollhook_torch.losses import advantages, kl_k3, policy_loss, token_weights

numbers = st.floats(-4.0, 0.0)


def tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slow_policy_loss(
    logp: float, old: float, engine: float, advantage: float, low: float, high: float, cap: float | None
) -> float:
    """DAPO's equation 8 for one token, times the truncated importance weight."""
    ratio = math.exp(logp) / math.exp(old)
    if ratio < 1 - low:
        bounded = 1 - low
    elif ratio > 1 + high:
        bounded = 1 + high
    else:
        bounded = ratio
    weight = math.exp(old) / math.exp(engine)
    if cap is None:
        weight = 1.0
    elif weight > cap:
        weight = cap
    return -weight * min(ratio * advantage, bounded * advantage)


@given(
    tokens=st.lists(st.tuples(numbers, numbers, numbers, st.floats(-2, 2)), min_size=1, max_size=12),
    low=st.floats(0.05, 0.5),
    high=st.floats(0.05, 1.0),
    cap=st.none() | st.floats(0.5, 4.0),
)
def test_the_policy_loss_is_the_clipped_surrogate_token_by_token(
    tokens: list[tuple[float, float, float, float]], low: float, high: float, cap: float | None
) -> None:
    logp, old, engine, advantage = (list(column) for column in zip(*tokens, strict=True))
    result = policy_loss(
        tensor(logp),
        tensor(old),
        tensor(engine),
        tensor(advantage),
        clip_low=low,
        clip_high=high,
        importance_cap=cap,
    )
    wanted = [slow_policy_loss(*token, low, high, cap) for token in tokens]
    assert result.loss.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_no_gradient_flows_where_the_clip_binds_or_through_the_importance_weight() -> None:
    logp = tensor([0.0, 0.5, -0.5, 0.5]).requires_grad_()
    result = policy_loss(
        logp,
        tensor([0.0, 0.0, 0.0, 0.0]),
        tensor([-1.0, 0.0, 0.0, 0.0]),
        tensor([1.0, 1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
        importance_cap=2.0,
    )
    result.loss.sum().backward()
    assert logp.grad is not None
    # ratio 1 with weight e cut to 2; two that the clip holds; one that it does not (A < 0, r > 1)
    assert logp.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, math.exp(0.5)])
    assert result.clipped.tolist() == [False, True, True, False]
    assert result.importance.tolist() == pytest.approx([math.e, 1.0, 1.0, 1.0])


def test_on_policy_the_gradient_is_that_of_reward_weighted_log_probabilities() -> None:
    logp = tensor([-1.0, -2.0]).requires_grad_()
    same = logp.detach()
    policy_loss(
        logp, same, same, tensor([0.7, -0.3]), clip_low=0.2, clip_high=0.28, importance_cap=2.0
    ).loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.7, 0.3])


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
def test_k3_is_deepseekmaths_estimate_and_never_negative(pairs: list[tuple[float, float]]) -> None:
    logp, reference = (list(column) for column in zip(*pairs, strict=True))
    wanted = [math.exp(r) / math.exp(p) - math.log(math.exp(r) / math.exp(p)) - 1 for p, r in pairs]
    got = kl_k3(tensor(logp), tensor(reference)).tolist()
    assert got == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert min(got) >= -1e-12


def slow_advantages(rewards: Sequence[float], divide: bool) -> list[float]:
    count = len(rewards)
    if count == 1:
        return [0.0]
    mean = math.fsum(rewards) / count
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (count - 1))
    return [(r - mean) / (deviation + 1e-6 if divide else 1.0) for r in rewards]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=10), st.booleans())
def test_advantages_are_normalised_in_the_group(rewards: list[float], divide: bool) -> None:
    group = [one(f"e{i}", reward) for i, reward in enumerate(rewards)]
    wanted = slow_advantages(rewards, divide)
    assert advantages(group, divide_by_std=divide) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_an_episode_counts_once_however_many_leaves_it_has() -> None:
    group = [one("a", 1.0), one("a", 1.0), one("a", 1.0), one("b", 0.0)]
    assert advantages(group, divide_by_std=False) == [0.5, 0.5, 0.5, -0.5]


def one(episode: str, reward: float) -> Sample:
    return sample_of([3, 4], [5], reward, 8, group_id="g", episode_id=episode)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_weights_give_the_mean_over_tokens_or_over_sequences(lengths: list[int]) -> None:
    values = [[random.Random(i * 31 + j).random() for j in range(n)] for i, n in enumerate(lengths)]
    if not any(lengths):
        assert token_weights(lengths, "token") == token_weights(lengths, "sequence") == [0.0] * len(lengths)
        return
    tokens = [v for row in values for v in row]
    sequences = [sum(row) / len(row) for row in values if row]
    wanted = {"token": sum(tokens) / len(tokens), "sequence": sum(sequences) / len(sequences)}
    for mean, value in wanted.items():
        weights = token_weights(lengths, mean)
        got = sum(w * v for w, row in zip(weights, values, strict=True) for v in row)
        assert got == pytest.approx(value)


def test_a_batch_of_the_test_kit_has_one_success_per_group() -> None:
    """The batches of the contract exercise both signs of the advantage."""
    for group in batch(0):
        values = advantages(group, divide_by_std=True)
        assert max(values) > 0 > min(values)
        assert np.isclose(sum(values), 0)


def test_arithmetic_is_in_the_callers_precision() -> None:
    kinds: list[Any] = [torch.float32, torch.float64]
    for kind in kinds:
        ones = torch.zeros(3, dtype=kind)
        result = policy_loss(ones, ones, ones, ones, clip_low=0.2, clip_high=0.2, importance_cap=None)
        assert result.loss.dtype == kind
