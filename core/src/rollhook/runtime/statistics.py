"""The statistics of evaluations: pass@k with intervals, and the paired test of two of them.

Tasks are clusters: samples of one task are alike, so what is drawn independently is the task, and every
interval here speaks of tasks like these. Pure functions, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance, variance

import numpy as np

CONFIDENCE = 0.95
#: per-task differences are rounded to this fraction where the sample counts have no smaller common multiple
_FINEST = 2520


@dataclass(frozen=True)
class Rate:
    """A pass rate over `count` episodes; `errors` more gave no verdict and are not counted."""

    passed: int
    count: int
    errors: int = 0

    @property
    def value(self) -> float:
        """The share that passed; 0 when nothing was counted."""
        return self.passed / self.count if self.count else 0.0

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}" if self.count else "no verdict"

    @property
    def stderr(self) -> float:
        """The binomial standard error of `value`."""
        return math.sqrt(self.value * (1 - self.value) / self.count) if self.count else 0.0


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval at `CONFIDENCE`; `tasks` is the number it rests on."""

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """B minus A over the tasks of both, and the two-sided p-value that there is none."""

    value: float
    low: float
    high: float
    p: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that at least one of `k` samples passes, from `c` passes of `n`.

    1 - C(n-c, k) / C(n, k), as in Chen et al. 2021 (arXiv:2107.03374). Raises ValueError when n < k.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {c} passes of {n} samples")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Interval | None:
    """Return pass@k over tasks, each (n, c), with its interval; None when no task has `k` samples.

    Tasks with fewer than `k` samples are left out. The interval is Wilson's at the effective sample size
    (Korn and Graubard's, recommended with Wilson's by Franco et al. 2019, J. Surv. Stat. Methodol. 7:334):
    the number of independent episodes that would give the variance between the tasks, less for few tasks as
    Student's t asks. It lies between the number of tasks (what it is with one sample per task: the plain
    Wilson interval) and samples / k.
    """
    able = [(n, c) for n, c in counts if n >= k]
    if not able:
        return None
    values = [pass_at_k(n, c, k) for n, c in able]
    # a mean of floats may leave [0, 1] by a rounding error
    mean = min(1.0, max(0.0, fmean(values)))
    low, high = wilson(mean, _effective_size(values, mean, sum(n for n, _ in able) / k))
    return Interval(mean, low, high, len(able))


def stderr_over_tasks(counts: Sequence[tuple[int, int]]) -> float:
    """Return the standard error of the mean pass rate of tasks, each (n, c); 0 for fewer than two."""
    rates = [c / n for n, c in counts if n]
    return math.sqrt(variance(rates) / len(rates)) if len(rates) > 1 else 0.0


def wilson(share: float, size: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share that `size` independent trials gave."""
    z = _quantile()
    centre = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def paired(counts: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> Difference | None:
    """Compare two evaluations over the tasks of both, each ((n, c) of A, (n, c) of B); None without any.

    The test flips the signs of the tasks' differences in pass rate, exactly, over all 2^tasks ways
    (Fisher's randomisation test); with one sample per task this is McNemar's exact test. The interval is
    Bonett and Price's (2012, J. Educ. Behav. Stat. 37:479): Wald's with two more tasks, one for each side,
    that differ by 1; with m samples per task these differ by 1/sqrt(m).
    """
    usable = [(a, b) for a, b in counts if a[0] and b[0]]
    if not usable:
        return None
    differences = [cb / nb - ca / na for (na, ca), (nb, cb) in usable]
    extra = 1 / math.sqrt(min(min(na, nb) for (na, _), (nb, _) in usable))
    padded = [*differences, extra, -extra]
    centre, half = fmean(padded), _quantile() * math.sqrt(pvariance(padded) / len(padded))
    value = fmean(differences)
    low, high = min(value, max(-1.0, centre - half)), max(value, min(1.0, centre + half))
    grain = min(_FINEST, math.lcm(*{n for pair in usable for n, _ in pair}))
    whole = [round(difference * grain) for difference in differences]
    return Difference(value, low, high, sign_flip_p(whole), len(usable))


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the share of all sign flips whose sum is at least as far from 0 as that of these numbers."""
    sizes = [abs(each) for each in differences if each]
    if not sizes:
        return 1.0
    unit = math.gcd(*sizes)
    steps = [size // unit for size in sizes]
    total, observed = sum(steps), abs(sum(differences)) // unit
    shares = np.zeros(total + 1)  # by the sum of those that are negative
    shares[0], reached = 1.0, 0
    for step in steps:
        moved = shares[: reached + 1] / 2
        shares[: reached + 1] = moved
        shares[step : reached + step + 1] += moved
        reached += step
    sums = np.abs(total - 2 * np.arange(total + 1))
    return min(1.0, float(shares[sums >= observed].sum()))


def one_sided_p(before: Rate, after: Rate) -> float:
    """Return the p-value of a one-sided two-proportion z-test that `after` is not better than `before`."""
    pooled = (before.passed + after.passed) / (before.count + after.count)
    scale = math.sqrt(pooled * (1 - pooled) * (1 / before.count + 1 / after.count))
    if scale == 0:
        return 1.0 if after.value <= before.value else 0.0
    return 0.5 * math.erfc((after.value - before.value) / scale / math.sqrt(2))


def _effective_size(values: Sequence[float], mean: float, most: float) -> float:
    tasks = len(values)
    if tasks == 1 or mean in (0.0, 1.0):
        return float(tasks)  # nothing is known of the spread: a task counts once
    spread = variance(values) / tasks
    # the first term of the expansion of Student's quantile in that of the normal distribution
    student = 1 + (_quantile() ** 2 + 1) / (4 * (tasks - 1))
    return min(most, max(float(tasks), mean * (1 - mean) / spread / student**2 if spread else most))


def _quantile() -> float:
    return NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
