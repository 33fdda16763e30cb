"""The producer: keeps groups of episodes in the making while the trainer trains.

A step takes the next `batch_groups` groups to finish; those that are rejected count and do not train. At most
`(steps done + max_staleness + 1) x batch_groups` prompts are taken up, counted from the start of the run, so
that tokens are rarely older than `max_staleness` weight versions (AReaL's bound, arXiv:2505.24298); what
gets older all the same is ended as soon as that is certain. With `max_staleness` 0 every step waits for
episodes of its own weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollhook.engine import SamplingParams
from rollhook.errors import first_of
from rollhook.records import Group
from rollhook.runtime.batch import Batch, Prompt, failed, permute_rewards, rejection
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
from rollhook.runtime.live import Live
from rollhook.runtime.seeds import derive

if TYPE_CHECKING:
    from rollhook.recipe.schema import Rollout


@dataclass(eq=False)
class _Making:
    """A group in the making, or one that is given up (`doomed`); `tries` by place, `live` episode ids.

    `missing` are the places that no episode fills yet; once there are none, `tasks` takes no more.
    """

    prompt: Prompt
    group: Group
    tasks: asyncio.TaskGroup | None = None
    tries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    doomed: bool = False
    live: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        filled = {member(record.episode_id) for record in self.group.records}
        self.missing = [number for number in range(self.group.size) if number not in filled]


class Producer:
    """Makes groups until closed. `draw` gives the prompts of a nominal step, on disk before they are run."""

    def __init__(  # noqa: PLR0913 - what the making of groups needs
        self,
        runners: Mapping[str, Runner],
        rollout: Rollout,
        *,
        steps: int,
        seed: int,
        attempt: int,
        draw: Callable[[int], Awaitable[Sequence[Prompt]]],
        accept: Callable[[Group], str | None] = lambda group: None,
        started: Callable[[EpisodeRequest], None] = lambda request: None,
        finished: Callable[[EpisodeResult], None] = lambda result: None,
        live: Live | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = runners
        self._rollout = rollout
        self._steps = steps
        self._seed = seed
        self._attempt = attempt
        self._draw = draw
        self._accept = accept
        self._started = started
        self._finished = finished
        self._live = live or Live()
        self._clock = clock
        #: a slot is an episode's, or a whole group's where groups are submitted
        self._by_group = rollout.submission == "group"
        self._slots = asyncio.Semaphore(
            max(1, rollout.max_concurrent // rollout.group_size) if self._by_group else rollout.max_concurrent
        )
        self._waiting: deque[tuple[Prompt, Group]] = deque()
        self._making: dict[str, _Making] = {}
        self._ready: list[Group] = []
        self._step = self._next_step = 0
        self._versions: dict[int, int] = {}
        self._taken = self._wanted = 0
        self._paused = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asked = clock()

    # -- what the driver calls

    def start(
        self,
        step: int,
        versions: Mapping[int, int],
        *,
        next_step: int = 0,
        owned: Sequence[tuple[Prompt, Group]] = (),
    ) -> None:
        """Begin, with `step` steps done; `versions` are the lineage's weight versions with the steps in each.

        `owned` are prompts drawn before that no surviving step has taken, each with what is there of its
        group; `next_step` is the first nominal step that was not drawn.
        """
        self._step, self._versions, self._next_step = step, dict(versions), next_step
        self._taken = step * self._rollout.batch_groups
        self._waiting.extend(owned)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self._changed.set())

    async def batch(self) -> Batch:
        """Return the groups of the next step once they are there; raises what stopped the producer."""
        count, began = self._rollout.batch_groups, self._clock()
        await self._until(lambda: len(self._ready) >= count or self._ended())
        if self._ended():
            assert self._task is not None
            error = self._task.exception()
            raise first_of(error) if error is not None else RuntimeError("the producer was closed")
        now = self._clock()
        batch = Batch(
            seconds=now - self._asked,
            waited=now - began,
            waiting=len(self._ready) - count,
            attempt=self._attempt,
        )
        self._asked = now
        groups = sorted(self._ready[:count], key=lambda group: group.group_id)
        del self._ready[:count]
        self._taken += len(groups)
        self._changed.set()
        if self._rollout.permute_rewards:
            permute_rewards(groups, derive(self._seed, "permute", self._step))
        for group in groups:
            reason = "stale" if self._stale(group) else rejection(group, self._rollout, self._accept)
            if reason is None:
                batch.accepted.append(group)
                batch.staleness += [self._age(sample.oldest_version) for sample in group.samples]
            else:
                batch.rejected.append((group, reason))
        batch.in_flight = len(self._live.episodes)
        return batch

    def publishing(self, version: int, step: int) -> None:
        """Say that from now on engines may serve weights with `step` steps in them, one before the other."""
        self._versions[version] = step

    def published(self, version: int, step: int) -> None:
        """Say that all engines serve weights with `step` steps in them; what is too old for them now ends."""
        before = max((known for known in self._versions if known < version), default=None)
        self._step = step
        self._versions[version] = step
        for making in list(self._making.values()):
            self._end_stale(making, before)
        self._changed.set()

    def pause(self) -> None:
        """Start no further group; episodes of those under way go on."""
        self._paused = True

    def resume(self) -> None:
        """Start groups again."""
        self._paused = False
        self._changed.set()

    @property
    def slots(self) -> asyncio.Semaphore | None:
        """The slots of episodes, for others that run some beside; None where groups are submitted."""
        return None if self._by_group else self._slots

    async def aclose(self) -> None:
        """Cancel what is under way and wait for its end; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task.cancelled() or self._task.exception()  # `batch` raised it, if anybody still asked

    # -- making groups

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._until(self._may_start)
                if not self._waiting:  # drawn as late as can be, with the newest pass rates
                    size = self._rollout.group_size
                    prompts = await self._draw(self._next_step)
                    self._next_step += 1
                    self._waiting.extend((prompt, prompt.group(size)) for prompt in prompts)
                prompt, group = self._waiting.popleft()
                self._discard_stale(group)
                making = _Making(prompt, group)
                self._making[making.group.group_id] = making
                self._wanted += 1 if self._by_group else len(making.missing)
                groups.create_task(self._make(making))

    def _may_start(self) -> bool:
        """Whether another prompt may be taken up now: a slot is free, and nothing that has begun wants it."""
        rollout = self._rollout
        taken_up = self._taken + len(self._ready) + len(self._making)
        limit = min(self._step + rollout.max_staleness + 1, self._steps) * rollout.batch_groups
        full = rollout.buffer_groups is not None and len(self._ready) >= rollout.buffer_groups
        free = not self._wanted and not self._slots.locked()
        return free and taken_up < limit and not full and not self._paused

    async def _make(self, making: _Making) -> None:
        """Make a group to its end."""
        group = making.group
        try:
            async with self._slot(self._by_group), asyncio.TaskGroup() as making.tasks:
                for number in making.missing:
                    making.tasks.create_task(self._fill(making, number))
        finally:
            del self._making[group.group_id]
        self._ready.append(group)
        self._changed.set()

    async def _fill(self, making: _Making, number: int) -> None:
        """Run one place of a group until an episode fills it or the group's refills are used up."""
        group = making.group
        while True:
            async with self._slot(not self._by_group):
                if making.doomed:
                    break
                result = await self._episode(making, number)
            stale = any(self._too_old(sample.oldest_version) for sample in result.samples)
            if stale:
                group.discarded.append(result.record)
            else:
                group.records.append(result.record)
                group.samples.extend(result.samples)
            if not (stale or failed(result.record)) or not self._may_refill(group):
                break
        making.missing.remove(number)

    @contextlib.asynccontextmanager
    async def _slot(self, needed: bool) -> AsyncIterator[None]:
        """Hold a slot, counted as wanted before, if one is needed here."""
        if not needed:
            yield
            return
        try:
            await self._slots.acquire()
        finally:
            self._wanted -= 1
            self._changed.set()
        try:
            yield
        finally:
            self._slots.release()
            self._changed.set()

    async def _episode(self, making: _Making, number: int) -> EpisodeResult:
        group, sampling = making.group, self._rollout.sampling
        episode_id = f"a{self._attempt}-{group.group_id}-e{number:02d}-t{making.tries[number]}"
        making.tries[number] += 1
        request = EpisodeRequest(
            episode_id=episode_id,
            group_id=group.group_id,
            task=making.prompt.task,
            seed=derive(self._seed, episode_id),
            sampling=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k),
        )
        self._started(request)
        making.live.add(episode_id)
        try:
            result = await self._runners[making.prompt.environment].run(request)
        finally:
            making.live.discard(episode_id)
        self._finished(result)
        return result

    def _may_refill(self, group: Group) -> bool:
        """Take one of the group's refills, if there is one left."""
        if group.refills >= self._rollout.refill_limit:
            return False
        group.refills += 1
        self._wanted += not self._by_group
        return True

    # -- staleness

    def _age(self, version: int | None) -> float:
        """Return how many steps weights lag; infinite for a version that is not of this lineage."""
        if version is None:
            return 0.0
        return self._step - self._versions[version] if version in self._versions else math.inf

    def _too_old(self, version: int | None) -> bool:
        return self._age(version) > self._rollout.max_staleness

    def _stale(self, group: Group) -> bool:
        return any(self._too_old(sample.oldest_version) for sample in group.samples)

    def _end_stale(self, making: _Making, before: int | None) -> None:
        """Cancel a group's live episodes that are too old, and run finished ones that are again."""
        for episode_id in making.live:
            live = self._live.episodes.get(episode_id)
            if live is None:
                continue
            if live.node == "agent" and live.oldest_version is None:
                live.first_version = before  # its first reply began under the weights before
            if self._too_old(live.oldest_version):
                live.cancel("stale")
        group, tasks = making.group, making.tasks
        for number in self._discard_stale(group):
            if tasks is not None and making.missing and not making.doomed and self._may_refill(group):
                making.missing.append(number)
                tasks.create_task(self._fill(making, number))
            else:
                self._give_up(making)

    def _discard_stale(self, group: Group) -> list[int]:
        """Take the finished episodes that are too old out of a group; return their places."""
        stale = {s.episode_id for s in group.samples if self._too_old(s.oldest_version)}
        group.samples = [sample for sample in group.samples if sample.episode_id not in stale]
        group.discarded += [record for record in group.records if record.episode_id in stale]
        group.records = [record for record in group.records if record.episode_id not in stale]
        return [member(episode_id) for episode_id in sorted(stale)]

    def _give_up(self, making: _Making) -> None:
        making.doomed = True
        for episode_id in making.live:
            if (live := self._live.episodes.get(episode_id)) is not None:
                live.cancel("stale")

    # -- waiting

    def _ended(self) -> bool:
        return self._task is None or self._task.done()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()


def member(episode_id: str) -> int:
    """Return the place of an episode in its group."""
    return int(episode_id.rpartition("-e")[2].partition("-")[0])
