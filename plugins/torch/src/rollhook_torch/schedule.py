"""The learning rate as a function of the step alone, so that a resumed run needs no state for it."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    shape: str,
    warmup_steps: int,
    decay_fraction: float,
    final_fraction: float,
) -> float:
    """Return the rate of step `step` (0-based): linear warm-up, hold, decay over the last share of steps.

    The first step has `peak / warmup_steps`; the last step of a `linear` or `cosine` shape has
    `peak * final_fraction`. `constant` never decays.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if shape == "constant":
        return peak * warm
    start = max(warmup_steps, total_steps - math.ceil(decay_fraction * total_steps))
    span = max(1, total_steps - 1 - start)
    progress = min(1.0, max(0.0, (step - start) / span))
    left = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * warm * (final_fraction + (1 - final_fraction) * left)
