"""Groups of episodes: slots, refills, rejections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollhook.engine import SamplingParams
from rollhook.environment import Task
from rollhook.errors import RollhookError
from rollhook.records import EpisodeRecord, Group, Outcome, Sample
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, EpisodeRunner
from rollhook.runtime.seeds import derive

if TYPE_CHECKING:
    from rollhook.recipe.schema import Rollout

logger = logging.getLogger(__name__)

AcceptGroup = Callable[[Group], str | None]
EpisodeDone = Callable[[EpisodeResult], None]


@dataclass(frozen=True)
class Prompt:
    """A task to be made into a group, with the environment that runs it."""

    task: Task
    environment: str


@dataclass
class Batch:
    """What a step's rollouts gave: the groups that train, and what was rejected and why."""

    accepted: list[Group] = field(default_factory=list)
    rejected: list[tuple[Group, str]] = field(default_factory=list)
    refills: int = 0
    seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """All groups, in no particular order."""
        return [*self.accepted, *(group for group, _ in self.rejected)]

    @property
    def records(self) -> list[EpisodeRecord]:
        """The records of all episodes, refilled ones included."""
        return [record for group in self.groups for record in group.records]

    def samples(self) -> list[list[Sample]]:
        """The samples that train, by group."""
        return [list(group.samples) for group in self.accepted]

    def why_rejected(self) -> str:
        """Say how many groups were rejected for which reason, and what most often made episodes fail."""
        reasons = Counter(reason for _, reason in self.rejected).most_common()
        outcomes = [record.outcome for record in self.records if record.outcome.kind == "infra_error"]
        said = ", ".join(f"{count} {reason}" for reason, count in reasons)
        for cause, count in Counter(f"{o.boundary}: {o.cause}" for o in outcomes).most_common(1):
            said += f"; {count} of {len(self.records)} episodes failed by {cause}"
        return said


class VerdictWatch:
    """Notices that something is broken, not just hard: steps in a row without one verdict."""

    def __init__(self, limit: int = 3) -> None:
        self._limit = limit
        self._steps = 0

    def check(self, batch: Batch) -> None:
        """Take a step's batch; raises RollhookError when it is the last of `limit` without a verdict."""
        judged = any(record.outcome.kind not in ("infra_error", "cancelled") for record in batch.records)
        self._steps = 0 if judged else self._steps + 1
        if self._steps >= self._limit:
            why = batch.why_rejected()
            raise RollhookError(f"no episode of the last {self._limit} steps came to a verdict ({why})")


class Collector:
    """Runs the episodes of a step's groups within `max_concurrent` slots."""

    def __init__(
        self,
        runners: Mapping[str, EpisodeRunner],
        rollout: Rollout,
        *,
        seed: int,
        attempt: int,
        accept: AcceptGroup = lambda group: None,
        started: Callable[[EpisodeRequest], None] = lambda request: None,
        finished: EpisodeDone = lambda result: None,
    ) -> None:
        self._runners = runners
        self._rollout = rollout
        self._seed = seed
        self._attempt = attempt
        self._accept = accept
        self._started = started
        self._finished = finished
        self._episodes = asyncio.Semaphore(rollout.max_concurrent)
        self._groups = asyncio.Semaphore(max(1, rollout.max_concurrent // rollout.group_size))

    async def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """Run a group per prompt to its end and sort the groups into accepted and rejected."""
        began = time.monotonic()
        batch = Batch()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._group(prompt, f"a{self._attempt}-s{step:05d}-g{n:03d}", batch))
                for n, prompt in enumerate(prompts)
            ]
        groups = [task.result() for task in running]
        if self._rollout.permute_rewards:
            permute_rewards(groups, derive(self._seed, "permute", step))
        for group in groups:
            reason = self._reason(group)
            if reason is None:
                batch.accepted.append(group)
            else:
                batch.rejected.append((group, reason))
        batch.seconds = time.monotonic() - began
        return batch

    async def _group(self, prompt: Prompt, group_id: str, batch: Batch) -> Group:
        size = self._rollout.group_size
        group = Group(group_id, prompt.task.id, prompt.environment, prompt.task.family, size)
        async with self._group_slot(), asyncio.TaskGroup() as members:
            for number in range(size):
                members.create_task(self._member(prompt, group, number, batch))
        return group

    async def _member(self, prompt: Prompt, group: Group, number: int, batch: Batch) -> None:
        """Run one place of a group until an episode fills it or the group's refills are used up."""
        tries = 0
        while True:
            result = await self._episode(prompt, group, f"{group.group_id}-e{number:02d}-t{tries}")
            group.records.append(result.record)
            group.samples.extend(result.samples)
            failed = result.record.outcome.kind in ("infra_error", "cancelled")
            refills = sum(r.outcome.kind in ("infra_error", "cancelled") for r in group.records)
            if not failed or refills > self._rollout.refill_limit:
                return
            batch.refills += 1
            tries += 1

    async def _episode(self, prompt: Prompt, group: Group, episode_id: str) -> EpisodeResult:
        sampling = self._rollout.sampling
        request = EpisodeRequest(
            episode_id=episode_id,
            group_id=group.group_id,
            task=prompt.task,
            seed=derive(self._seed, episode_id),
            sampling=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k),
        )
        async with self._episode_slot():
            self._started(request)
            result = await self._runners[prompt.environment].run(request)
        self._finished(result)
        return result

    def _reason(self, group: Group) -> str | None:
        """Return why a group does not train, or None."""
        unfilled = group.size - sum(r.outcome.kind not in ("infra_error", "cancelled") for r in group.records)
        if unfilled > 0:
            return "incomplete"
        if len(group.rewards) < 2:
            return "too_few_rewards"
        if self._rollout.drop_zero_variance and max(group.rewards) == min(group.rewards):
            return "zero_variance"
        try:
            return self._accept(group)
        except Exception as error:  # noqa: BLE001 - an exception of a filter is its rejection
            logger.warning("a group filter failed on group %s, which is rejected: %s", group.group_id, error)
            return f"filter failed: {type(error).__name__}: {error}"

    @contextlib.asynccontextmanager
    async def _group_slot(self) -> AsyncIterator[None]:
        if self._rollout.submission == "group":
            async with self._groups:
                yield
        else:
            yield

    @contextlib.asynccontextmanager
    async def _episode_slot(self) -> AsyncIterator[None]:
        if self._rollout.submission == "episode":
            async with self._episodes:
                yield
        else:
            yield


def permute_rewards(groups: Sequence[Group], seed: int) -> None:
    """Permute the rewards of a batch among its episodes: the control experiment that must not learn."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    places = [(g, i) for g in groups for i, r in enumerate(g.records) if r.outcome.reward is not None]
    rewards = [g.records[i].outcome.reward for g, i in places]
    rng.shuffle(rewards)
    for (group, index), reward in zip(places, rewards, strict=True):
        record = group.records[index]
        outcome = Outcome(record.outcome.kind, reward, record.outcome.boundary, record.outcome.cause)
        group.records[index] = dataclasses.replace(record, outcome=outcome)
        group.samples = [
            dataclasses.replace(s, reward=reward)
            if s.episode_id == record.episode_id and reward is not None
            else s
            for s in group.samples
        ]


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step's rollouts."""
    records = batch.records
    rewards = [r.outcome.reward for r in records if r.outcome.reward is not None]
    tokens = sum(r.completion_tokens for r in records)
    metrics = {
        "rollout/episodes": float(len(records)),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / batch.seconds if batch.seconds else 0.0,
        "rollout/turns_mean": _mean([float(r.turns) for r in records]),
        "rollout/refills": float(batch.refills),
        "groups/accepted": float(len(batch.accepted)),
        "groups/rejected": float(len(batch.rejected)),
        "time/rollout": batch.seconds,
    }
    if rewards:
        metrics["rollout/reward_mean"] = _mean(rewards)
        metrics["rollout/pass_rate"] = _mean([float(r >= 1.0) for r in rewards])
    for kind, count in Counter(r.outcome.kind for r in records).items():
        metrics[f"outcome/{kind}"] = float(count)
    for reason, count in Counter(reason.split(":")[0] for _, reason in batch.rejected).items():
        metrics[f"groups/rejected/{reason}"] = float(count)
    for node in ("create", "setup", "agent", "agent/command", "verify", "teardown", "wait/engine", "total"):
        metrics[f"episode/{node}_seconds"] = _mean([r.timings.get(node, 0.0) for r in records])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
