"""A group of episodes in the making: which places are filled, tried, lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollhook.records import EpisodeRecord, Group
from rollhook.runtime.batch import Prompt, failed
from rollhook.runtime.books import Books
from rollhook.runtime.live import Live, LiveEpisode

#: rounds of a group that could not be filled, after which it is rejected
ROUNDS = 2

#: why a group is of no use, and why the producer ends episodes
USELESS = ("stale", "incomplete")


@dataclass(eq=False)
class Making:
    """A prompt's group on its way: queued, in the making, waiting for the trainer, or back in the queue.

    `missing` are the places that no episode fills yet; once there are none, `tasks` takes no more. `lost`
    counts those that none will fill. `refills` are those of this round, in which something became `stale`;
    `tries` counts by place, `live` are ids of episodes under way. `ended` says that the group is given up,
    `taken` that a step has it. `reason` is why it does not train, known once it is made.
    """

    prompt: Prompt
    group: Group
    tasks: asyncio.TaskGroup | None = None
    missing: list[int] = field(default_factory=list)
    lost: int = 0
    refills: int = 0
    rounds: int = 0
    began: int = 0
    tries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    live: set[str] = field(default_factory=set)
    stale: bool = False
    ended: bool = False
    taken: bool = False
    reason: str | None = None

    def begin(self, step: int) -> None:
        """Start a round that step `step` may take at the earliest: find the places to fill."""
        filled = {member(record.episode_id) for record in self.group.records}
        self.missing = [number for number in range(self.group.size) if number not in filled]
        self.tasks, self.lost, self.refills, self.stale, self.ended = None, 0, 0, False, False
        if self.rounds:
            self.group.refills += len(self.missing)
        self.rounds, self.began = self.rounds + 1, step

    def again(self) -> None:
        """Make ready for another round, with the good episodes that are there."""
        group = self.group
        group.discarded += [record for record in group.records if failed(record)]
        group.records = [record for record in group.records if not failed(record)]

    @property
    def good(self) -> int:
        """How many places are filled."""
        return sum(not failed(record) for record in self.group.records)

    def discard(self, too_old: Callable[[int | None], bool]) -> list[EpisodeRecord]:
        """Take the finished episodes with a token that is too old out of the group; return them."""
        group = self.group
        stale = {sample.episode_id for sample in group.samples if too_old(sample.oldest_version)}
        if not stale:
            return []
        group.samples = [sample for sample in group.samples if sample.episode_id not in stale]
        gone = [record for record in group.records if record.episode_id in stale]
        group.records = [record for record in group.records if record.episode_id not in stale]
        group.discarded += gone
        self.stale = True
        return gone

    def cancel(self, live: Live, why: str) -> None:
        """End the episodes under way."""
        for episode in self._under_way(live):
            episode.cancel(why)

    def cancel_stale(self, live: Live, too_old: Callable[[int | None], bool], newest: int | None) -> None:
        """End those under way with a token that is too old; without a reply, it will be of `newest`."""
        for episode in self._under_way(live):
            if episode.node == "agent" and episode.oldest_version is None:
                episode.first_version = newest
            if too_old(episode.oldest_version):
                episode.cancel("stale")

    def _under_way(self, live: Live) -> list[LiveEpisode]:
        return [live.episodes[name] for name in self.live if name in live.episodes]


def close(making: Making, record: EpisodeRecord, books: Books) -> None:
    """Enter the end of an episode into the books."""
    outcome = record.outcome
    if failed(record):
        books.reject([record.episode_id], outcome.cause if outcome.cause in USELESS else outcome.kind)
    elif making.taken:
        books.reject([record.episode_id], "stale")
    else:
        books.buffer(record.episode_id)


def settle(making: Making, books: Books) -> None:
    """Enter into the books what a step makes of a group's good episodes."""
    group, reason = making.group, making.reason
    trained = {sample.episode_id for sample in group.samples} if reason is None else set()
    books.train(trained)
    for record in group.records:
        if not failed(record) and record.episode_id not in trained:
            alone = "no_tokens" if record.outcome.trains else record.outcome.kind
            books.reject([record.episode_id], alone if reason is None else reason.split(":")[0])


def member(episode_id: str) -> int:
    """Return the place of an episode in its group."""
    return int(episode_id.rpartition("-e")[2].partition("-")[0])
