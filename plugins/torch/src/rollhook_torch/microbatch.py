"""Sequences into micro-batches of similar length, and the log-probabilities of their trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    """One sequence to train on: ids int32[T], mask uint8[T]; per-token data of the engine; its advantage."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    engine_logprobs: NDArray[np.float32] | None = None
    advantage: float = 0.0

    @property
    def trained(self) -> int:
        """How many of its tokens are trained."""
        return int(self.mask.sum())

    @property
    def trained_logprobs(self) -> NDArray[np.float32]:
        """The engine's log-probabilities of its trained tokens."""
        assert self.engine_logprobs is not None
        trained: NDArray[np.float32] = self.engine_logprobs[self.mask.astype(bool)]
        return trained


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices in portions whose padded size (rows x longest) is at most `max_tokens`.

    Longest first, so that memory peaks at the start; a sequence longer than `max_tokens` goes alone. Empty
    sequences are left out.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    portions: list[list[int]] = []
    for index in order:
        if portions and lengths[portions[-1][0]] * (len(portions[-1]) + 1) <= max_tokens:
            portions[-1].append(index)
        else:
            portions.append([index])
    return portions


@dataclass(frozen=True)
class Scored:
    """Per trained token, row by row: log-probability [N] (with gradient) and entropy [N] (without)."""

    logprobs: Tensor
    entropy: Tensor


def score(model: Any, sequences: Sequence[TokenRow], temperature: float = 1.0) -> Scored:
    """Return log-probabilities of the trained tokens of one micro-batch at a temperature.

    Rows are padded on the right; a causal model never sees what is to its right, so no mask is needed and
    the result does not depend on the neighbours. Logits are computed only where some row is trained.
    """
    device = model.device
    width = max(len(s.token_ids) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids.astype(np.int64))
        mask[row, : len(sequence.mask)] = torch.from_numpy(sequence.mask.astype(bool))
    ids, mask = ids.to(device), mask.to(device)
    predicts = mask[:, 1:]
    columns = predicts.any(0).nonzero().squeeze(1)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=columns).logits
    chosen = predicts[:, columns]
    targets = ids[:, 1:][:, columns][chosen]
    full = (logits[chosen].float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(full.exp() * full).sum(-1)
    return Scored(full.gather(1, targets[:, None]).squeeze(1), entropy)
