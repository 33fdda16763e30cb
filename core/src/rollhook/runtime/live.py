"""The episodes that run now: what each does and waits for, since when, until when; and ending one early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rollhook.runtime.episode import EpisodeRequest
    from rollhook.session.common import SessionStats


class LiveSession(Protocol):
    """What is seen of an episode's session from outside."""

    @property
    def stats(self) -> SessionStats:
        """Counts of its turns."""

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of any generated token; None where none is known."""

    @property
    def waits_for(self) -> str:
        """What its turns under way wait for, in words; empty when there are none."""


class LiveClock(Protocol):
    """What is seen of an agent's clock."""

    @property
    def remaining(self) -> float:
        """Seconds left."""


class LiveBox(Protocol):
    """What is seen of a sandbox."""

    @property
    def id(self) -> str:
        """Its id at the provider."""


@dataclass(eq=False)
class Wait:
    """One thing that an episode waits for: `what` says it now; `deadline` of its own, if it has one."""

    what: Callable[[], str]
    since: float
    deadline: float | None


@dataclass
class LiveEpisode:
    """One episode under way; times are `time.monotonic`.

    `node` is the budget node it is in, since `node_since`, at most until `deadline`; empty between nodes.
    `episode_deadline` ends the whole. `first_version` bounds the oldest weight version of its tokens where a
    reply was seen under way before any was committed. `waits` are what it waits for within its node, oldest
    first; `clock` is its agent's, `boxes` its live sandboxes.
    """

    request: EpisodeRequest
    task: asyncio.Task[object]
    started: float
    session: LiveSession | None = None
    node: str = ""
    node_since: float = 0.0
    deadline: float | None = None
    episode_deadline: float | None = None
    first_version: int | None = None
    cancelled: str = ""
    clock: LiveClock | None = None
    boxes: Mapping[str, LiveBox] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that any of its tokens may have; None before the first."""
        committed = self.session.versions[0] if self.session is not None and self.session.versions else None
        known = [version for version in (committed, self.first_version) if version is not None]
        return min(known, default=None)

    def cancel(self, reason: str) -> None:
        """End the episode as `cancelled`, unless it is being taken down already."""
        if self.node != "teardown" and not self.cancelled:
            self.cancelled = reason
            self.task.cancel()


@dataclass
class Live:
    """The registry of live episodes, by id."""

    episodes: dict[str, LiveEpisode] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic

    @contextmanager
    def running(self, request: EpisodeRequest, limit: float) -> Iterator[LiveEpisode]:
        """Register the current task's episode, which may take `limit` seconds, while the block runs."""
        task = asyncio.current_task()
        assert task is not None
        now = self.now()
        live = LiveEpisode(request, task, now, node_since=now, episode_deadline=now + limit)
        self.episodes[request.episode_id] = live
        try:
            yield live
        finally:
            del self.episodes[request.episode_id]

    def enter(self, live: LiveEpisode, node: str, limit: float | None) -> None:
        """Note that an episode is in a node now, for at most `limit` seconds; an empty node: in none."""
        live.node, live.node_since = node, self.now()
        live.deadline = None if limit is None else live.node_since + limit

    @contextmanager
    def waiting(
        self, live: LiveEpisode, what: Callable[[], str], limit: float | None = None
    ) -> Iterator[None]:
        """Note that an episode waits for something while the block runs, for at most `limit` seconds."""
        now = self.now()
        wait = Wait(what, now, None if limit is None else now + limit)
        live.waits.append(wait)
        try:
            yield
        finally:
            live.waits.remove(wait)
