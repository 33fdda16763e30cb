"""What the driver sees of the episodes and engines in other processes: states that travel.

Times travel as seconds from now, for the clocks of two machines have nothing in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollhook.router import Worker
from rollhook.runtime.live import Live, LiveEpisode, Wait
from rollhook.session.breaker import Breaker
from rollhook.session.common import SessionStats
from rollhook.session.workers import Entry


@dataclass(frozen=True)
class SeenSession:
    """An episode's session, as it was when it was looked at."""

    stats: SessionStats
    versions: tuple[int, int] | None
    waits_for: str


@dataclass(frozen=True)
class SeenClock:
    """An agent's clock, as it was."""

    remaining: float


@dataclass(frozen=True)
class SeenBox:
    """A sandbox, by its id."""

    id: str


@dataclass(frozen=True)
class EpisodeState:
    """A live episode: `waits` are (what, seconds so far, seconds left or None)."""

    node: str
    node_seconds: float
    seconds_left: float | None
    session: SeenSession | None
    clock: SeenClock | None
    boxes: Mapping[str, SeenBox]
    waits: Sequence[tuple[str, float, float | None]]


def states(live: Live) -> dict[str, EpisodeState]:
    """Return the states of the live episodes by id."""
    now = live.now()
    return {name: _state(each, now) for name, each in live.episodes.items()}


def _state(live: LiveEpisode, now: float) -> EpisodeState:
    session, clock = live.session, live.clock
    return EpisodeState(
        node=live.node,
        node_seconds=now - live.node_since,
        seconds_left=None if live.deadline is None else live.deadline - now,
        session=None
        if session is None
        else SeenSession(dataclasses.replace(session.stats), session.versions, session.waits_for),
        clock=None if clock is None else SeenClock(clock.remaining),
        boxes={name: SeenBox(box.id) for name, box in live.boxes.items()},
        waits=[
            (wait.what(), now - wait.since, None if wait.deadline is None else wait.deadline - now)
            for wait in live.waits
        ],
    )


def reflect(live: LiveEpisode, state: EpisodeState, now: float) -> None:
    """Let a live episode here show what one elsewhere does."""
    live.node, live.node_since = state.node, now - state.node_seconds
    live.deadline = None if state.seconds_left is None else now + state.seconds_left
    live.session, live.clock, live.boxes = state.session, state.clock, state.boxes
    live.waits = [
        Wait(lambda what=what: what, now - seconds, None if left is None else now + left)  # type: ignore[misc]
        for what, seconds, left in state.waits
    ]


def begin_anew(live: LiveEpisode, now: float) -> None:
    """Let a live episode show that it has not begun."""
    live.node, live.node_since, live.deadline, live.first_version = "", now, None, None
    live.session = live.clock = None
    live.boxes, live.waits = {}, []


def entries(table: Iterable[Entry]) -> list[Entry]:
    """Return the entries of a worker table as they can travel."""
    return [dataclasses.replace(entry, breaker=Breaker()) for entry in table]


def merged(tables: Iterable[Sequence[Entry]]) -> list[Entry]:
    """Return what several processes know of the same workers: loads summed, the rest at its worst."""
    found: dict[Worker, Entry] = {}
    for entry in (entry for table in tables for entry in table):
        if (known := found.get(entry.worker)) is None:
            found[entry.worker] = dataclasses.replace(entry)
            continue
        known.open_sessions += entry.open_sessions
        known.requests += entry.requests
        known.tokens_in_flight += entry.tokens_in_flight
        known.healthy = known.healthy and entry.healthy
        known.draining = known.draining or entry.draining
        known.version = min(known.version, entry.version)
        known.queue_seconds = max(known.queue_seconds, entry.queue_seconds)
    return list(found.values())


def total_loads(each: Iterable[Mapping[Worker, tuple[int, int]]]) -> dict[Worker, tuple[int, int]]:
    """Return the loads, (open sessions, tokens in flight) of each engine worker, of several processes."""
    total: dict[Worker, tuple[int, int]] = {}
    for loads in each:
        for worker, (sessions, tokens) in loads.items():
            before = total.get(worker, (0, 0))
            total[worker] = (before[0] + sessions, before[1] + tokens)
    return total


def total_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the stats of several sandbox pools as those of one: counts summed, means weighted.

    A cost is left out where one of them does not know it.
    """
    weights = {
        "sandbox/create_seconds_mean": "sandbox/creates", "sandbox/wait_seconds_mean": "sandbox/acquired",
    }  # fmt: skip
    names = dict.fromkeys(name for each in stats for name in each)
    found = {name: sum(each.get(name, 0.0) for each in stats) for name in names}
    for name, count in weights.items():
        if name in found:
            total = sum(each.get(name, 0.0) * each.get(count, 0.0) for each in stats)
            found[name] = total / max(1.0, found[count])
    if found.get("sandbox/unpriced"):
        found.pop("sandbox/cost", None)
    return found
