"""Drawing tokens: one batch, every row with its own temperature, nucleus and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How one row is drawn; `uniform` is a number in [0, 1), unused when `temperature` is 0."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return ids int64[B] and log-probabilities float32[B] of one token per row of `logits` [B, V].

    The log-probability is that of the distribution that was sampled from: at temperature 1 without
    top-p and top-k the model's own. A greedy row reports the model's own. Inverse transform sampling, so
    that a row's token depends on its own number alone.
    """
    temperatures = logits.new_tensor([d.temperature or 1.0 for d in draws], dtype=torch.float32)
    scaled = logits.float() / temperatures[:, None]
    if any(d.temperature and (d.top_p < 1 or d.top_k > 0) for d in draws):
        scaled = _filter(scaled, draws)
    logprobs = scaled.log_softmax(-1)
    greedy = [d.temperature == 0 for d in draws]
    if all(greedy):
        ids = logits.argmax(-1)
    else:
        ids = _invert(logprobs, [d.uniform for d in draws])
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=ids.device), logits.argmax(-1), ids)
    return ids, logprobs.gather(1, ids[:, None]).squeeze(1)


def _invert(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return where the cumulative distribution of each row passes its number."""
    cumulative = logprobs.double().exp().cumsum(-1)
    points = cumulative.new_tensor(uniforms) * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, points[:, None], right=True)
    return ids.squeeze(1).clamp_(max=logprobs.shape[1] - 1)


def _filter(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits with what top-k and top-p exclude at minus infinity; the most likely token stays."""
    size = scaled.shape[1]
    top_k = scaled.new_tensor([d.top_k if d.temperature and d.top_k > 0 else size for d in draws])
    top_p = scaled.new_tensor([d.top_p if d.temperature else 1.0 for d in draws])
    values, order = scaled.sort(-1, descending=True)
    before = values.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    rank = torch.arange(size, device=scaled.device)
    drop = (rank >= top_k[:, None]) | (before >= top_p[:, None]) & (top_p[:, None] < 1)
    drop[:, 0] = False
    return scaled.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))
