"""How much of the possible a run trains while episodes of very different lengths are made beside it.

The runtime's own producer makes groups of 8 with 128 episodes in flight; their times are lognormal (sigma
1.0), and a longer one has more tokens in proportion. Engines, episodes and trainer are simulated: they
sleep, on a clock that jumps to the next event, so an hour passes in seconds. Episodes are made as fast as
they are trained, within 10 %. The limit is the lesser of what 128 busy slots generate and what a trainer
that never waits trains.

The share is trained tokens per second over that limit, after ten steps; the budget is 0.95 with a staleness
limit of 4.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import measuring
import numpy as np

from rollhook.environment import Task
from rollhook.recipe.schema import Rollout
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.runtime.batch import Prompt
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult
from rollhook.runtime.live import Live
from rollhook.runtime.producer import Producer

SLOTS, GROUP = 128, 8
TOKENS_PER_SECOND = 50.0  # of one slot
MEDIAN_SECONDS = 60.0
WARM_UP = 10
TASK = Task("t", "d", "train")


class Jumping(selectors.DefaultSelector):
    """Waits for nothing: the time that it should wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def run_on_a_jumping_clock(work: asyncio.Future[object]) -> object:
    selector = Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class Slots:
    """Runs episodes that only take their time."""

    live: Live
    draw: random.Random
    version: int = 1
    cancelled: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        seconds = self.draw.lognormvariate(np.log(MEDIAN_SECONDS), 1.0)
        version = self.version
        with self.live.running(request, 1e9) as live:
            live.node, live.first_version = "agent", version
            try:
                await asyncio.sleep(seconds)
                outcome = Outcome("scored", float(self.draw.random() < 0.5))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not live.cancelled or task is None or task.uncancel() > 0:
                    raise
                self.cancelled += 1
                outcome = Outcome("cancelled", cause=live.cancelled)
        self.tokens[request.episode_id] = round(seconds * TOKENS_PER_SECOND)
        return EpisodeResult(_record(request, outcome), _samples(request, outcome, version))


def _record(request: EpisodeRequest, outcome: Outcome) -> EpisodeRecord:
    return EpisodeRecord(
        episode_id=request.episode_id, run_id="r", attempt=1, purpose="train", group_id=request.group_id,
        task_id=request.task.id, task_digest="d", environment="e", family="", seed=request.seed,
        ended="done", outcome=outcome, reward=outcome.reward,
    )  # fmt: skip


def _samples(request: EpisodeRequest, outcome: Outcome, version: int) -> Sequence[Sample]:
    if outcome.reward is None:
        return []
    one = np.ones(1, np.uint8)
    spans = np.array([[0, 1, version, version]], np.int32)
    ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    return [
        Sample(
            request.episode_id, request.group_id, "t", 0, ids, one, logprobs, spans, outcome.reward, "scored"
        )
    ]


async def simulate(seed: int, staleness: int, speed: float, steps: int, groups: int) -> dict[str, float]:
    """Train steps of `groups` groups; the trainer has `speed` times the tokens per second of the slots."""
    loop = asyncio.get_running_loop()
    live = Live()
    slots = Slots(live, random.Random(seed))
    rollout = Rollout(
        max_concurrent=SLOTS, group_size=GROUP, batch_groups=groups, max_staleness=staleness,
        drop_zero_variance=False,
    )  # fmt: skip

    async def draw(step: int) -> Sequence[Prompt]:
        return [Prompt(f"s{step:05d}-g{n:03d}", TASK, "e") for n in range(groups)]

    producer = Producer(
        {"e": slots}, rollout, steps=steps + 100, seed=seed, attempt=1, draw=draw, live=live, clock=loop.time
    )  # type: ignore[dict-item]
    producer.start(0, {1: 0})
    generated, trained, waited, began = SLOTS * TOKENS_PER_SECOND, 0, 0.0, 0.0
    rejected = 0
    for step in range(steps):
        if step == WARM_UP:
            began, trained, waited, rejected, slots.cancelled = loop.time(), 0, 0.0, 0, 0
        batch = await producer.batch()
        tokens = sum(slots.tokens[s.episode_id] for group in batch.accepted for s in group.samples)
        waited += batch.waited
        rejected += len(batch.rejected)
        await asyncio.sleep(tokens / (generated * speed))
        trained += tokens
        slots.version += 1
        producer.published(slots.version, step + 1)
    seconds = loop.time() - began
    await producer.aclose()
    taken = (steps - WARM_UP) * groups
    return {
        "share": trained / seconds / (generated * min(1.0, speed)),
        "waited": waited / seconds,
        "cancelled": slots.cancelled / taken / GROUP,
        "rejected": rejected / taken,
    }


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: 200)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[4, 1, 0], help="limits (default: 4 1 0)")
    parser.add_argument(
        "--batch-groups", type=int, nargs="+", default=[8, 32], help="groups of a step (default: 8 32)"
    )
    options = parser.parse_args()
    steps, seeds = (20, 1) if options.quick else (options.steps, 5)
    for groups, staleness in itertools.product(options.batch_groups, options.staleness):
        rows = []
        for seed in range(seeds):
            speed = 0.9 + 0.05 * seed
            found = run_on_a_jumping_clock(simulate(seed, staleness, speed, steps, groups))
            rows.append([f"seed {seed}, trainer at {speed:.2f} of the engines", *found.values()])
        if seeds > 1:
            rows.append(["median", *map(statistics.median, list(zip(*rows, strict=True))[1:])])
        heads = ["", "of the limit", "trainer waits", "cancelled", "rejected"]
        measuring.table(f"staleness limit {staleness}, {groups} groups in a step", heads, rows)


if __name__ == "__main__":
    main()
