"""How old tokens are: in optimizer steps, counted in the surviving lineage."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollhook.records import Group


class Staleness:
    """Ages of weight versions against a limit of steps (None: no limit).

    `step` is how many steps are in the newest weights, `next_step` the step that takes the next batch: the
    same until it has taken one, and one more until the weights with it are there.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = 1e9 if limit is None else limit
        self.step = self.next_step = 0
        self.versions: dict[int, int] = {}

    def begin(self, step: int, versions: Mapping[int, int]) -> None:
        """Start with `step` steps done; `versions` are those of the lineage with the steps in each."""
        self.step, self.next_step, self.versions = step, step, dict(versions)

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.versions)

    def before(self, version: int) -> int | None:
        """Return the newest version before another."""
        return max((known for known in self.versions if known < version), default=None)

    def published(self, version: int, step: int) -> None:
        """Note that all engines serve a version with `step` steps in it."""
        self.step = self.next_step = step
        self.versions[version] = step

    def age(self, version: int | None) -> float:
        """Return how many steps weights lag; infinite for a version that is not of this lineage."""
        if version is None:
            return 0.0
        return self.step - self.versions[version] if version in self.versions else math.inf

    def oldest(self, group: Group) -> float:
        """Return how many steps the oldest token of a group lags."""
        return max((self.age(sample.oldest_version) for sample in group.samples), default=0.0)

    def too_old(self, version: int | None) -> bool:
        """Whether the next step may not take tokens of a version."""
        return self.age(version) + self.next_step - self.step > self.limit
