"""The groups that are made and wait for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rollhook.records import Sample
from rollhook.runtime.making import Making

#: with `rollout.fill` a step ends its search once it has seen so many times its groups
FILL_LIMIT = 10


@dataclass
class Buffer:
    """`waiting` take a place in a step; `refused` take none (`rollout.fill`), and go with the next step.

    What is put is never held up: no group is started while `capacity` wait, or `FILL_LIMIT` times as many
    with those that were refused.
    """

    capacity: int
    fill: bool
    waiting: list[Making] = field(default_factory=list)
    refused: list[Making] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Making]:
        return iter([*self.waiting, *self.refused])

    @property
    def samples(self) -> list[Sample]:
        """The samples of the groups that wait."""
        return [sample for making in self.waiting for sample in making.group.samples]

    @property
    def full(self) -> bool:
        """Whether no group is to be started."""
        return self.enough(self.capacity)

    def put(self, making: Making) -> None:
        """Take in a group whose `reason` is known."""
        (self.refused if self.fill and making.reason is not None else self.waiting).append(making)

    def enough(self, count: int) -> bool:
        """Whether a step of `count` groups can be taken."""
        return len(self.waiting) >= count or len(self) + len(self.refused) >= FILL_LIMIT * count

    def take(
        self, count: int, age: Callable[[Making], float], late: Iterable[Making]
    ) -> tuple[list[Making], list[Making]]:
        """Return the `count` oldest groups, those of `late` among them, and what was refused since."""
        chosen = sorted([*late, *self.waiting], key=age, reverse=True)[:count]
        refused, self.refused = self.refused, []
        self.waiting = [making for making in self.waiting if making not in chosen]
        return chosen, refused

    def remove(self, making: Making) -> None:
        """Take a group out again."""
        (self.waiting if making in self.waiting else self.refused).remove(making)
