"""Doubles of episodes for tests of the producer, whose books are checked at every entry."""

import asyncio
import contextlib
import dataclasses

import numpy as np

from rollhook.environment import Task
from rollhook.recipe.schema import Rollout
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.runtime.batch import Prompt
from rollhook.runtime.books import Books
from rollhook.runtime.episode import EpisodeResult
from rollhook.runtime.live import Live
from rollhook.runtime.producer import Producer

TASK = Task("t1", "d1", "train", "sort")


def finished(request, outcome):
    record = EpisodeRecord(
        episode_id=request.episode_id, run_id="r", attempt=1, purpose="train", group_id=request.group_id,
        task_id=request.task.id, task_digest="d", environment="fake", family=request.task.family,
        seed=request.seed, ended="infra" if outcome.kind == "infra_error" else "done", outcome=outcome,
        reward=outcome.reward,
    )  # fmt: skip
    samples = [sample(request.episode_id, outcome.reward)] if outcome.trains else []
    return EpisodeResult(record, samples)


def sample(episode_id, reward):
    ones = np.ones(2, np.uint8)
    return Sample(
        episode_id, episode_id[:-7], "t1", 0, np.array([1, 2], np.int32), ones, np.zeros(2, np.float32),
        np.array([[0, 2, 1, 1]], np.int32), reward, "scored",
    )  # fmt: skip


class CheckedBooks(Books):
    """Books that are checked after every entry."""

    def __init__(self):
        super().__init__(strict=True)

    def _open(self, episode_id, where):
        super()._open(episode_id, where)
        self.check()

    def reject(self, episode_ids, reason):
        super().reject(episode_ids, reason)
        self.check()

    def train(self, episode_ids):
        super().train(episode_ids)
        self.check()


class ScriptedRunner:
    """Gives the outcomes of a script in order, the last one for ever; counts what runs at once."""

    def __init__(self, outcomes):
        self.outcomes = list(outcomes)
        self.requests = []
        self.running = self.most = 0

    async def run(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        return finished(request, outcome)


PASS, FAIL = Outcome("scored", 1.0), Outcome("scored", 0.0)
BROKEN = Outcome("infra_error", boundary="sandbox", cause="gone")


def producer(runner, steps=1, accept=lambda group: None, live=None, attempt=1, more=None, **rollout):
    settings = Rollout(**{"group_size": 4, "batch_groups": 1, **rollout})
    drawn, delivered, more = [], [], more or {}

    async def draw(step):
        drawn.append(step)
        return [Prompt(f"s{step:05d}-g{n:03d}", TASK, "fake") for n in range(settings.batch_groups)]

    made = Producer(
        {"fake": runner}, settings, steps=steps, seed=0, attempt=attempt, draw=draw, accept=accept, live=live,
        books=CheckedBooks(), finished=lambda result: delivered.append(result.record.episode_id), **more,
    )  # fmt: skip
    made.drawn, made.delivered = drawn, delivered
    return made


class HeldRunner:
    """Episodes that are in the agent's node until they are let go with the version of their tokens.

    They are let go with (version, reward); without a reward they have failed.
    """

    def __init__(self):
        self.live = Live()
        self.waiting = {}

    async def run(self, request):
        with self.live.running(request, 1000.0) as live:
            self.live.enter(live, "agent", None)
            self.waiting[request.episode_id] = done = asyncio.get_running_loop().create_future()
            try:
                version, reward = await done
            except asyncio.CancelledError:
                if not live.cancelled or asyncio.current_task().uncancel() > 0:
                    raise
                return finished(request, Outcome("cancelled", cause=live.cancelled))
            finally:
                del self.waiting[request.episode_id]
            if reward is None:
                return finished(request, BROKEN)
            result = finished(request, Outcome("scored", reward))
            spans = np.array([[0, 2, version, version]], np.int32)
            return EpisodeResult(result.record, [dataclasses.replace(result.samples[0], spans=spans)])

    async def until(self, count):
        """Wait until so many episodes run."""
        async with asyncio.timeout(5):
            while len(self.waiting) < count:
                await asyncio.sleep(0)

    async def end(self, version, *episode_ids):
        """End these episodes, rewarded in turn; without any, all that run."""
        for number, episode_id in enumerate(episode_ids or sorted(self.waiting)):
            self.waiting[episode_id].set_result((version, float(number % 2)))
        for _ in range(20):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def holding():
    """A runner of held episodes and a maker of producers over it that are closed afterwards."""
    runner, made = HeldRunner(), []

    def make(steps, step=0, versions=None, owned=(), next_step=0, **rollout):
        keys = {"group_size": 2, "batch_groups": 2, "max_concurrent": 100, **rollout}
        made.append(producer(runner, steps=steps, live=runner.live, **keys))
        made[-1].start(step, versions or {1: 0}, owned=owned, next_step=next_step)
        return made[-1]

    yield runner, make
    for each in made:
        await each.aclose()


async def settle():
    for _ in range(40):
        await asyncio.sleep(0)


def of(runner, group):
    return sorted(episode for episode in runner.waiting if group in episode)


def ids(groups):
    return [group.group_id for group in groups]
