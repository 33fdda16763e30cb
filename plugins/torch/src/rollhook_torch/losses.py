"""What is minimised, on flat tensors of trained tokens [N]; every formula names its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollhook.records import Sample

STD_EPSILON = 1e-6


def advantages(group: Sequence[Sample], *, divide_by_std: bool) -> list[float]:
    """Return one advantage per sample of a group: its episode's reward less the mean over episodes.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), A = (r - mean) / std; without the division as in
    Dr. GRPO (arXiv 2503.20783). An episode counts once however many leaves it has. The standard deviation
    is the sample's (n - 1); a lone episode has advantage 0.
    """
    rewards = {sample.episode_id: sample.reward for sample in group}
    count = len(rewards)
    if count < 2:
        return [0.0] * len(group)
    mean = sum(rewards.values()) / count
    scale = 1.0
    if divide_by_std:
        scale = (sum((r - mean) ** 2 for r in rewards.values()) / (count - 1)) ** 0.5 + STD_EPSILON
    return [(sample.reward - mean) / scale for sample in group]


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token losses [N], and what to report about them."""

    loss: Tensor
    clipped: Tensor
    importance: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float | None,
) -> PolicyLoss:
    """Return the clipped surrogate of PPO with an upper bound of its own, per token.

    With r = p/p_old: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); clip-higher is DAPO's
    (arXiv 2503.14476, section 3.1). w = min(p_old/p_engine, cap) corrects for an engine whose probabilities
    differ from the trainer's or whose weights are older (truncated importance sampling; no gradient flows
    through it).
    """
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    importance = (old_logprobs - engine_logprobs).detach().exp()
    weight = torch.ones_like(importance) if importance_cap is None else importance.clamp(max=importance_cap)
    clipped = (ratio * advantages > bounded * advantages).detach()
    return PolicyLoss(-weight * surrogate, clipped, importance)


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(p || reference) per token: exp(d) - d - 1 with d = log ref - log p.

    DeepSeekMath, arXiv 2402.03300, equation 4; never negative.
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1


def token_weights(lengths: Sequence[int], loss_mean: str) -> list[float]:
    """Return, for sequences with `lengths` trained tokens, the weight of each sequence's tokens in the mean.

    `token`: 1 / all tokens. `sequence`: 1 / (sequences x its tokens). A sequence without tokens has none.
    """
    total = sum(lengths)
    sequences = sum(1 for length in lengths if length)
    if loss_mean == "token":
        return [1.0 / total if length else 0.0 for length in lengths]
    return [1.0 / (sequences * length) if length else 0.0 for length in lengths]
