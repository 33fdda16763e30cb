"""How much of the possible a run trains while episodes of very different lengths are made beside it.

The runtime's own producer makes groups of 8 with 128 episodes in flight; their times are lognormal (sigma
1.0), and a longer one has more tokens in proportion. Engines, episodes and trainer are simulated: they
sleep, on a clock that jumps to the next event, so an hour passes in seconds. Episodes are made as fast as
they are trained, within 10 %. The limit is the lesser of what 128 busy slots generate and what a trainer
that never waits trains. The share is trained tokens per second over that limit, after ten steps; the budget
is 0.95 with a staleness limit of 4.

Ways: synchronous (nothing is made in training), whole groups submitted, single episodes submitted, and the
latter with `rollout.min_group` 4: groups train without their stragglers.

What is possible at all depends on the groups of a step: no token of an episode that takes longer than the
limit's steps may train. `possible` is a bound for every scheduler that does not know how long an episode
will take: it starts all of them at the best moment, throws away those alone that are too late, and ends
these at the last moment at which they could have been in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import selectors
import statistics
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

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
#: what the recipe says, by the way of making episodes; the first has a staleness limit of 0
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "by group": {"submission": "group"},
    "by episode": {},
    "min_group 4": {"min_group": 4},
}
Found = dict[str, float]
TASK = Task("t", "d", "train")


class Jumping(selectors.DefaultSelector):
    """Waits for nothing: the time that it should wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def run_on_a_jumping_clock(work: Coroutine[Any, Any, Found]) -> Found:
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


async def simulate(
    seed: int, staleness: int | None, speed: float, steps: int, groups: int, **way: Any
) -> Found:
    """Train steps of `groups` groups; the trainer has `speed` times the tokens per second of the slots."""
    loop = asyncio.get_running_loop()
    live = Live()
    slots = Slots(live, random.Random(seed))
    rollout = Rollout(
        max_concurrent=SLOTS, group_size=GROUP, batch_groups=groups, max_staleness=staleness,
        drop_zero_variance=False, **way,
    )  # fmt: skip

    async def draw(step: int) -> Sequence[Prompt]:
        return [Prompt(f"s{step:05d}-g{n:03d}", TASK, "e") for n in range(groups)]

    producer = Producer(
        {"e": slots}, rollout, steps=steps + 100, seed=seed, attempt=1, draw=draw, live=live, clock=loop.time
    )  # type: ignore[dict-item]
    producer.start(0, {1: 0})
    generated, trained, waited, began = SLOTS * TOKENS_PER_SECOND, 0, 0.0, 0.0
    for step in range(steps):
        if step == WARM_UP:
            began, trained, waited = loop.time(), 0, 0.0
        batch = await producer.batch()
        tokens = sum(slots.tokens[s.episode_id] for group in batch.accepted for s in group.samples)
        waited += batch.waited
        await asyncio.sleep(tokens / (generated * speed))
        trained += tokens
        slots.version += 1
        producer.published(slots.version, step + 1)
    seconds = loop.time() - began
    await producer.aclose()
    return {
        "share": trained / seconds / (generated * min(1.0, speed)),
        "waited": waited / seconds,
        "stale": producer.books.rejected["stale"] / producer.books.submitted,
    }


def possible(staleness: int | None, speed: float, groups: int) -> float:
    """Return the share that no scheduler exceeds that does not know the lengths of episodes.

    An episode that begins when a version is published has until the step `staleness` versions later takes
    its groups: that many steps, and the time that the trainer waits then. Of what begins, the tokens of those
    that end by then may train, and the slots are busy until each ends or is too late (renewal reward). The
    length of a step and what may train depend on each other: iterated to their fixed point.
    """
    if staleness is None:
        return 1.0
    mean = MEDIAN_SECONDS * math.exp(0.5)
    step, rate = groups * GROUP * mean / SLOTS, 1.0
    for _ in range(1000):
        until = (staleness + 1 - rate / speed) * step
        ends = _normal(math.log(until / MEDIAN_SECONDS))
        useful = mean * _normal(math.log(until / MEDIAN_SECONDS) - 1)
        rate += 0.1 * (min(useful / (useful + until * (1 - ends)), speed) - rate)
        step += 0.1 * (groups * GROUP * useful / ends / SLOTS / rate - step)
    return rate / min(1.0, speed)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def measure(staleness: int | None, groups: int, seeds: int, steps: int) -> list[list[object]]:
    """Return the rows of one table: what each way trains of the limit, by seed, and the medians."""
    rows: list[list[object]] = []
    for seed in range(seeds):
        speed = 0.9 + 0.05 * seed
        found = []
        for way, keys in WAYS.items():
            limit = 0 if way == "synchronous" else staleness
            found.append(run_on_a_jumping_clock(simulate(seed, limit, speed, steps, groups, **keys)))
        shares = [each["share"] for each in found]
        name = f"seed {seed}, trainer at {speed:.2f} of the engines"
        stale = found[2]["stale"], found[3]["stale"]
        rows.append([name, *shares, possible(staleness, speed, groups), found[2]["waited"], *stale])
    if seeds > 1:
        rows.append(["median", *map(statistics.median, list(zip(*rows, strict=True))[1:])])
    return rows


def limit_of(text: str) -> int | None:
    """Return the staleness limit that a word of the command line means."""
    return None if text == "off" else int(text)


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default: 40)")
    parser.add_argument(
        "--staleness", nargs="+", default=["off", "4", "1"], help="limits, or off (default: off 4 1)"
    )
    parser.add_argument(
        "--batch-groups", type=int, nargs="+", default=[8, 32, 64], help="groups of a step (default: 8 32 64)"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # simulated hours pass without an episode's end
    steps, seeds, sizes = (20, 1, [8]) if options.quick else (options.steps, 5, options.batch_groups)
    heads = ["", *WAYS, "possible", "waits", "stale", "stale, min_group 4"]
    for groups in sizes:
        for limit in options.staleness:
            rows = measure(limit_of(limit), groups, seeds, steps)
            measuring.table(f"staleness limit {limit}, {groups} groups in a step", heads, rows)


if __name__ == "__main__":
    main()
