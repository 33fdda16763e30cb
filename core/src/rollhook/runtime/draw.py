"""Which task comes next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from rollhook.environment import Task
from rollhook.runtime.seeds import derive

#: share of a new group's pass rate in a family's moving average
_EMA = 0.2


class Draw:
    """Draws tasks of one environment, reproducibly: the seed, the step and the pass rates so far decide.

    `uniform` goes through a fresh permutation of all tasks per epoch. `learnable` draws a family with
    weight p(1-p) + floor, p its moving pass rate, then one of its tasks.
    """

    def __init__(
        self, tasks: Sequence[Task], *, how: Literal["uniform", "learnable"], floor: float, seed: int
    ) -> None:
        self._tasks = list(tasks)
        self._how = how
        self._floor = floor
        self._seed = seed
        #: how many tasks were drawn so far
        self.drawn = 0
        self._pass: dict[str, float] = {}
        self._families: dict[str, list[Task]] = {}
        for task in self._tasks:
            self._families.setdefault(task.family, []).append(task)

    def take(self, count: int, step: int) -> list[Task]:
        """Return the tasks of the next `count` groups."""
        if self._how == "uniform":
            return [self._uniform() for _ in range(count)]
        rng = random.Random(derive(self._seed, "draw", step, self.drawn))  # noqa: S311 - not for secrets
        self.drawn += count
        names = sorted(self._families)
        weights = [self._weight(name) for name in names]
        families = rng.choices(names, weights, k=count)
        return [rng.choice(self._families[name]) for name in families]

    def observe(self, family: str, pass_rate: float) -> None:
        """Learn how a group of a family did."""
        before = self._pass.get(family, 0.5)
        self._pass[family] = before + _EMA * (pass_rate - before)

    def state(self) -> dict[str, object]:
        """Return what a checkpoint must hold for the next draws to be the same."""
        return {"drawn": self.drawn, "pass": dict(self._pass)}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        drawn, rates = state["drawn"], state["pass"]
        if not isinstance(drawn, int) or not isinstance(rates, Mapping):
            raise ValueError(f"not a state of a draw: {state!r}")
        self.drawn, self._pass = drawn, dict(rates)

    def _weight(self, family: str) -> float:
        p = self._pass.get(family, 0.5)
        return p * (1 - p) + self._floor

    def _uniform(self) -> Task:
        epoch, position = divmod(self.drawn, len(self._tasks))
        self.drawn += 1
        order = list(range(len(self._tasks)))
        random.Random(derive(self._seed, "epoch", epoch)).shuffle(order)  # noqa: S311 - not for secrets
        return self._tasks[order[position]]


def share_out(count: int, weights: Sequence[float], before: Sequence[int]) -> list[int]:
    """Return how many of the next `count` draws each environment gets, after `before` each.

    The next is always that of the one which lags its weight most, so small batches keep to the weights too.
    """
    drawn = list(before)
    for total in range(sum(before) + 1, sum(before) + count + 1):
        lag = [weight / sum(weights) * total - n for weight, n in zip(weights, drawn, strict=True)]
        drawn[lag.index(max(lag))] += 1
    return [after - n for after, n in zip(drawn, before, strict=True)]
