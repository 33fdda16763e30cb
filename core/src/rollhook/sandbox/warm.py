"""What is created ahead: which specs, how many of each, and for how long they may wait."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from rollhook.durable import to_json
from rollhook.sandbox.backend import SandboxSpec

#: how many of the last asked-for specs count when places are given to specs
_MEMORY = 64


def recipe_key(spec: SandboxSpec) -> str:
    """Return what two specs share exactly when a sandbox of one serves the other.

    That is all but the labels, which every sandbox has of its own, and the lifetime, which is compared when
    one is taken. Files in `context_dir` count by its path: they are taken not to change during a run.
    """
    said = {**vars(spec), "env": dict(spec.env), "labels": None, "lifetime_seconds": None}
    return hashlib.sha256(to_json(said)).hexdigest()[:32]


class Ahead(Protocol):
    """A sandbox that was created ahead, as far as it matters here."""

    @property
    def created(self) -> float:
        """When, on the clock of the warm pool."""

    @property
    def lifetime(self) -> float | None:
        """Seconds from then on, as its provider was told; None: no limit."""


T = TypeVar("T", bound=Ahead)


class Warm(Generic[T]):
    """Shares `places` among the specs that were asked for last, by how often they were.

    A sandbox waits `seconds` at most. Only books are kept here: the pool makes and deletes.
    """

    def __init__(self, places: int, seconds: float, clock: Callable[[], float]) -> None:
        self._places = places
        self._seconds = seconds
        self._clock = clock
        self._asked: deque[str] = deque(maxlen=max(_MEMORY, 4 * places))
        self._specs: dict[str, SandboxSpec] = {}
        self._ready: dict[str, deque[T]] = {}
        self._making: Counter[str] = Counter()

    def __iter__(self) -> Iterator[T]:
        """Iterate over all that wait."""
        return (one for queue in self._ready.values() for one in queue)

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def asked(self, spec: SandboxSpec) -> None:
        """Count that a spec is wanted; the longest lifetime of a kind is kept."""
        if not self._places:
            return
        key = recipe_key(spec)
        self._asked.append(key)
        known = self._specs.get(key)
        if known is None or (spec.lifetime_seconds or 0.0) >= (known.lifetime_seconds or 0.0):
            self._specs[key] = spec
        for gone in self._specs.keys() - set(self._asked):
            del self._specs[gone]

    def take(self, spec: SandboxSpec) -> T | None:
        """Take out and return one that serves this spec for its lifetime; None without any."""
        queue = self._ready.get(recipe_key(spec)) if self._ready else None
        found = next((one for one in queue or () if self._lasts(one, spec.lifetime_seconds)), None)
        if queue and found is not None:
            queue.remove(found)
        return found

    def add(self, spec: SandboxSpec, one: T) -> None:
        """Let one wait."""
        self._ready.setdefault(recipe_key(spec), deque()).append(one)

    def begin(self, spec: SandboxSpec) -> None:
        """Count one as being made."""
        self._making[recipe_key(spec)] += 1

    def end(self, spec: SandboxSpec) -> None:
        """Count one less as being made."""
        self._making[recipe_key(spec)] -= 1

    def expired(self) -> list[T]:
        """Take out and return those that have waited too long."""
        now = self._clock()
        gone = []
        for queue in self._ready.values():
            while queue and now - queue[0].created >= self._seconds:
                gone.append(queue.popleft())
        return gone

    def plan(self) -> tuple[list[SandboxSpec], list[T]]:
        """Return what to create now, and what to delete for it, which is taken out."""
        targets = self._targets()
        have = {key: len(queue) + self._making[key] for key, queue in self._ready.items()}
        have |= {key: count for key, count in self._making.items() if key not in have}
        missing = [
            self._specs[key] for key, target in targets.items() for _ in range(target - have.get(key, 0))
        ]
        spare: list[T] = []
        room = self._places - sum(have.values())
        for key, queue in self._ready.items():
            while queue and room + len(spare) < len(missing) and have[key] > targets.get(key, 0):
                spare.append(queue.popleft())
                have[key] -= 1
        return missing[: max(0, room + len(spare))], spare

    def clear(self) -> list[T]:
        """Take out and return all."""
        gone = list(self)
        self._ready.clear()
        return gone

    def _targets(self) -> dict[str, int]:
        """Share the places by largest remainder; of equals one that has some, then the later asked for."""
        counts = Counter(self._asked)
        total = counts.total()
        exact = {key: self._places * count / total for key, count in counts.items()}
        targets = {key: int(share) for key, share in exact.items()}
        order = {key: place for place, key in enumerate(self._asked)}

        def rank(key: str) -> tuple[float, bool, int]:
            return exact[key] - targets[key], bool(self._ready.get(key)), order[key]

        for key in sorted(exact, key=rank, reverse=True)[: self._places - sum(targets.values())]:
            targets[key] += 1
        return targets

    def _lasts(self, one: T, lifetime: float | None) -> bool:
        age = self._clock() - one.created
        return age < self._seconds and (
            one.lifetime is None or (lifetime is not None and one.lifetime - age >= lifetime)
        )
