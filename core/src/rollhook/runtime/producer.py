"""The producer: keeps groups of episodes in the making while the trainer trains.

A step takes `batch_groups` groups, those with the oldest tokens first. At most
`(steps done + max_staleness + 1) x batch_groups` prompts are taken up, counted from the start of the run
(AReaL's bound, arXiv:2505.24298), so that what is made can be trained in time. What gets older all the same
ends as soon as no step can take it any more: when the last step that could have has taken its groups. With
`max_staleness` 0 every step waits for episodes of its own weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollhook.engine import SamplingParams
from rollhook.errors import first_of
from rollhook.records import EpisodeRecord, Group
from rollhook.runtime.batch import Batch, Prompt, failed, permute_rewards, rejection
from rollhook.runtime.books import Books
from rollhook.runtime.buffer import Buffer
from rollhook.runtime.concurrency import follow_pressure
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
from rollhook.runtime.live import Live
from rollhook.runtime.making import ROUNDS, USELESS, Making, close, member, settle
from rollhook.runtime.seeds import derive
from rollhook.runtime.slots import Slots
from rollhook.runtime.staleness import Staleness

if TYPE_CHECKING:
    from rollhook.recipe.schema import Rollout

logger = logging.getLogger(__name__)
#: seconds without a finished episode, while the trainer waits, after which a warning says so
STALLED = 600.0


class Producer:
    """Makes groups until closed. `draw` gives the prompts of a nominal step, on disk before they are run.

    `draining` says that the run ends after the step under way: nothing is started beyond it. `pressure` is
    the mean time that requests queue at the engines, for `rollout.adaptive_concurrency`.
    """

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draining: Callable[[], bool] = lambda: False,
        pressure: Callable[[], float | None] = lambda: None,
        books: Books | None = None,
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
        self._sleep = sleep
        self._draining = draining
        self._pressure = pressure
        #: where each training episode of this attempt is
        self.books = books or Books()
        self._changed = asyncio.Event()
        #: of training episodes and of others that run beside them
        self.slots = Slots(rollout.max_concurrent, self._changed.set)
        self._by_group = rollout.submission == "group"
        self._ages = Staleness(rollout.max_staleness)
        self._waiting: deque[Making] = deque()
        self._making: dict[str, Making] = {}
        self._buffer = Buffer(rollout.buffer_groups or 2 * rollout.batch_groups, rollout.fill)
        self._strays: list[EpisodeRecord] = []
        self._next_draw = self._taken = self._ends = 0
        self._paused = self._awaited = False
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
        self._ages.begin(step, versions)
        self._next_draw = next_step
        self._taken = step * self._rollout.batch_groups
        for prompt, group in owned:
            self._waiting.append(Making(prompt, group))
            for record in group.records:
                self.books.take_over(record.episode_id)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self._changed.set())

    async def batch(self) -> Batch:
        """Return the groups of the next step once they are there; raises what stopped the producer."""
        count, began = self._rollout.batch_groups, self._clock()
        self._awaited = True
        self._changed.set()
        try:
            await self._until(lambda: self._buffer.enough(count) or self._ended())
        finally:
            self._awaited = False
        if self._ended():
            assert self._task is not None
            error = self._task.exception()
            raise first_of(error) if error is not None else RuntimeError("the producer was closed")
        now = self._clock()
        batch = Batch(seconds=now - self._asked, waited=now - began, attempt=self._attempt)
        self._asked = now
        self._fill_batch(batch, count)
        self._taken += count
        self._ages.next_step = self._ages.step + 1
        self._end_stale(self._ages.newest)
        batch.strays, self._strays = self._strays, []
        batch.waiting, batch.in_flight = len(self._buffer), self.books.in_flight
        batch.limit, batch.books = self.slots.limit, self.books.metrics()
        batch.waiting_staleness = [self._ages.age(sample.oldest_version) for sample in self._buffer.samples]
        self._changed.set()
        return batch

    def publishing(self, version: int, step: int) -> None:
        """Say that from now on engines may serve weights with `step` steps in them, one before the other."""
        self._ages.versions[version] = step

    def published(self, version: int, step: int) -> None:
        """Say that all engines serve weights with `step` steps in them; what is too old for them now ends."""
        self._ages.published(version, step)
        self._end_stale(self._ages.before(version))
        self._changed.set()

    def pause(self) -> None:
        """Start no further group; episodes of those under way go on."""
        self._paused = True

    def resume(self) -> None:
        """Start groups again."""
        self._paused = False
        self._changed.set()

    async def aclose(self) -> None:
        """Cancel what is under way and wait for its end; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task.cancelled() or self._task.exception()  # `batch` raised it, if anybody still asked

    # -- making groups

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._watch())
            if self._rollout.adaptive_concurrency:
                least = self._rollout.group_size
                groups.create_task(follow_pressure(self.slots, least, self._pressure, self._sleep))
            while True:
                await self._until(self._may_start)
                if not self._waiting:  # drawn as late as can be, with the newest pass rates
                    size = self._rollout.group_size
                    prompts = await self._draw(self._next_draw)
                    self._next_draw += 1
                    self._waiting.extend(Making(prompt, prompt.group(size)) for prompt in prompts)
                    continue
                making = self._waiting.popleft()
                self._discard_stale(making)
                making.begin(self._ages.next_step)
                self._making[making.group.group_id] = making
                groups.create_task(self._make(making))

    def _may_start(self) -> bool:
        """Whether another prompt may be taken up now: a slot is free, and nothing that has begun wants it."""
        rollout = self._rollout
        making = [each for each in self._making.values() if not each.taken]
        taken_up = self._taken + len(self._buffer) + len(making)
        limit = min(self._ages.step + self._ages.limit + 1, self._steps) * rollout.batch_groups
        if self._draining():
            limit = min(limit, self._taken + (rollout.batch_groups if self._awaited else 0))
        unbegun = any(each.tasks is None for each in making)
        need = min(rollout.group_size, self.slots.limit) if self._by_group else 1
        room = self.slots.free >= need and not unbegun and not self._buffer.full
        return room and taken_up < limit and not self._paused

    async def _make(self, making: Making) -> None:
        """Make a group to its end."""
        count = min(self._rollout.group_size, self.slots.limit)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._by_group:
                    await stack.enter_async_context(self.slots.holding(self.slots.ask(count), count))
                async with asyncio.TaskGroup() as making.tasks:
                    for number in making.missing:
                        making.tasks.create_task(self._fill(making, number, self._ask()))
                    self._changed.set()
        finally:
            del self._making[making.group.group_id]
        if not making.taken:
            self._put(making)
        self._changed.set()

    def _put(self, making: Making) -> None:
        """Let a group that is made wait for the trainer, or make it anew if it became of no use."""
        reason = rejection(making.group, self._rollout, self._accept)
        overtaken = making.stale and self._ages.next_step > making.began
        if reason in USELESS and self._rollout.unused == "recycle" and (overtaken or making.rounds < ROUNDS):
            making.again()
            self._waiting.appendleft(making)
            return
        making.reason = reason
        self._buffer.put(making)

    async def _fill(self, making: Making, number: int, asked: asyncio.Future[None] | None) -> None:
        """Run one place of a group until an episode fills it or none can any more."""
        while True:
            async with self.slots.holding(asked) if asked is not None else contextlib.nullcontext():
                if making.ended or making.taken:
                    break
                result = await self._episode(making, number)
            if making.taken:
                self._strays.append(result.record)
                break
            if self._keep(making, result):
                break
            if not self._may_refill(making):
                self._lose(making)
                break
            asked = self._ask()
        making.missing.remove(number)

    def _ask(self) -> asyncio.Future[None] | None:
        return None if self._by_group else self.slots.ask()

    def _keep(self, making: Making, result: EpisodeResult) -> bool:
        """Put a finished episode into its group; False if its place stays open."""
        group, record = making.group, result.record
        if any(self._ages.too_old(sample.oldest_version) for sample in result.samples):
            group.discarded.append(record)
            making.stale = True
            self.books.reject([record.episode_id], "stale")
            return False
        making.stale |= record.outcome.cause == "stale"
        group.records.append(record)
        group.samples.extend(result.samples)
        return not failed(record)

    def _lose(self, making: Making) -> None:
        """Give up a place, and the whole group if too few are left."""
        making.lost += 1
        if making.group.size - making.lost < (self._rollout.min_group or making.group.size):
            making.ended = True
            making.cancel(self._live, "incomplete")

    async def _episode(self, making: Making, number: int) -> EpisodeResult:
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
        self.books.submit(episode_id)
        making.live.add(episode_id)
        try:
            result = await self._runners[making.prompt.environment].run(request)
        finally:
            making.live.discard(episode_id)
        self._ends += 1
        self._finished(result)
        close(making, result.record, self.books)
        return result

    def _may_refill(self, making: Making) -> bool:
        """Take one of the group's refills, if there is one left and it is of use."""
        if making.ended or making.refills >= self._rollout.refill_limit:
            return False
        making.refills += 1
        making.group.refills += 1
        return True

    # -- what a step takes

    def _fill_batch(self, batch: Batch, count: int) -> None:
        """Choose the groups of a step and say which of them train."""
        chosen, refused = self._buffer.take(count, self._age_of, self._last_chances())
        chosen.sort(key=lambda making: making.group.group_id)
        for making in chosen:
            making.taken = True
            making.cancel(self._live, "stale")
        if self._rollout.permute_rewards:
            permute_rewards([each.group for each in chosen], derive(self._seed, "permute", self._ages.step))
            for making in chosen:
                making.reason = rejection(making.group, self._rollout, self._accept)
        for making in (*chosen, *refused):
            settle(making, self.books)
            group, reason = making.group, making.reason
            if reason is None:
                batch.accepted.append(group)
                batch.staleness += [self._ages.age(sample.oldest_version) for sample in group.samples]
            else:
                batch.rejected.append((group, reason))

    def _last_chances(self) -> list[Making]:
        """Return the unfinished groups that this step is the last to take, if they may train as they are."""
        if self._rollout.min_group is None or self._rollout.permute_rewards:
            return []
        return [
            making
            for making in self._making.values()
            if not making.taken
            and making.good >= self._rollout.min_group
            and self._age_of(making) >= self._ages.limit
            and rejection(making.group, self._rollout, self._accept) is None
        ]

    # -- staleness

    def _age_of(self, making: Making) -> float:
        return self._ages.oldest(making.group)

    def _end_stale(self, newest: int | None) -> None:
        """End what no step can take any more. An agent without a reply began under `newest`, or later."""
        for making in list(self._making.values()):
            self._end_stale_episodes(making, newest)
        for making in self._buffer:
            if self._discard_stale(making):
                self._buffer.remove(making)
                self._put(making)

    def _end_stale_episodes(self, making: Making, newest: int | None) -> None:
        """Cancel a group's live episodes that are too old, and run finished ones that are again."""
        if making.taken:
            return
        making.cancel_stale(self._live, self._ages.too_old, newest)
        for number in self._discard_stale(making):
            if making.tasks is None:
                making.missing.append(number)
            elif making.missing and self._may_refill(making):
                making.missing.append(number)
                making.tasks.create_task(self._fill(making, number, self._ask()))
            else:
                self._lose(making)

    def _discard_stale(self, making: Making) -> list[int]:
        """Take the finished episodes that are too old out of a group; return their places."""
        gone = making.discard(self._ages.too_old)
        self.books.reject([record.episode_id for record in gone], "stale")
        return [member(record.episode_id) for record in gone]

    # -- waiting

    def _ended(self) -> bool:
        return self._task is None or self._task.done()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self) -> None:
        """Say when the trainer waits and nothing finishes."""
        while True:
            ends = self._ends
            await self._sleep(STALLED)
            if self._awaited and self._ends == ends:
                logger.warning(
                    "the trainer waits and no episode has finished for %g s; %d are in flight: "
                    "`rollhook doctor` says what they wait for",
                    STALLED, self.books.in_flight,
                )  # fmt: skip
