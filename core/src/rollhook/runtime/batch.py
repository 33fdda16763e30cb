"""What a training step takes: groups of episodes, those that train and those that are rejected, and why."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollhook.environment import Task
from rollhook.errors import RollhookError
from rollhook.records import EpisodeRecord, Group, Outcome, Sample
from rollhook.runtime.session_metrics import session_metrics

if TYPE_CHECKING:
    from rollhook.recipe.schema import Rollout

logger = logging.getLogger(__name__)

AcceptGroup = Callable[[Group], str | None]


@dataclass(frozen=True)
class Prompt:
    """A task to be made into the group `group_id`, with the environment that runs it."""

    group_id: str
    task: Task
    environment: str

    def group(self, size: int) -> Group:
        """Return its group, empty."""
        return Group(self.group_id, self.task.id, self.environment, self.task.family, size)


@dataclass
class Batch:
    """What a step takes: the groups that train, in order, and what was rejected and why.

    `seconds` since the batch before was taken, of which the trainer `waited` so many; `staleness` in steps of
    each sample that trains; `waiting` groups were ready beyond this batch, `in_flight` episodes ran, at most
    `limit`. `strays` have ended whose groups an earlier step took without them. `waiting_staleness` is of the
    samples that wait, `books` are the counts of the attempt. It was taken by `attempt`, of which an episode
    need not be.
    """

    accepted: list[Group] = field(default_factory=list)
    rejected: list[tuple[Group, str]] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0
    staleness: list[float] = field(default_factory=list)
    waiting: int = 0
    in_flight: int = 0
    limit: int = 0
    strays: list[EpisodeRecord] = field(default_factory=list)
    waiting_staleness: list[float] = field(default_factory=list)
    books: dict[str, float] = field(default_factory=dict)
    attempt: int = 1

    @property
    def groups(self) -> list[Group]:
        """All groups, in no particular order."""
        return [*self.accepted, *(group for group, _ in self.rejected)]

    @property
    def records(self) -> list[EpisodeRecord]:
        """The records of all episodes, refilled and stale ones included."""
        of_groups = [record for group in self.groups for record in (*group.records, *group.discarded)]
        return of_groups + self.strays

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


def failed(record: EpisodeRecord) -> bool:
    """Return whether an episode leaves its place in a group open."""
    return record.outcome.kind in ("infra_error", "cancelled")


def rejection(group: Group, rollout: Rollout, accept: AcceptGroup) -> str | None:
    """Return why a group does not train, or None."""
    if sum(not failed(record) for record in group.records) < (rollout.min_group or group.size):
        stale = any(record.outcome.cause == "stale" or not failed(record) for record in group.discarded)
        stale = stale or any(record.outcome.cause == "stale" for record in group.records)
        return "stale" if stale else "incomplete"
    if len(group.rewards) < 2:
        return "too_few_rewards"
    if rollout.drop_zero_variance and max(group.rewards) == min(group.rewards):
        return "zero_variance"
    try:
        return accept(group)
    except Exception as error:  # noqa: BLE001 - an exception of a filter is its rejection
        logger.warning("a group filter failed on group %s, which is rejected: %s", group.group_id, error)
        return f"filter failed: {type(error).__name__}: {error}"


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


def batch_metrics(batch: Batch, *, several: bool = False) -> dict[str, float]:
    """Return the metrics of a step's rollouts; of each environment too, where there are several."""
    records = batch.records
    rewards = [r.outcome.reward for r in records if r.outcome.reward is not None]
    tokens = sum(r.completion_tokens for r in records)
    made = sum(r.completion_tokens for r in records if r.attempt == batch.attempt)
    metrics = {
        "rollout/episodes": float(len(records)),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": made / batch.seconds if batch.seconds else 0.0,
        "rollout/turns_mean": _mean([float(r.turns) for r in records]),
        "rollout/refills": float(sum(group.refills for group in batch.groups)),
        "rollout/cancelled_stale": float(sum(record.outcome.cause == "stale" for record in records)),
        "rollout/discarded_stale": float(
            sum(not failed(r) for group in batch.groups for r in group.discarded)
        ),
        "rollout/in_flight": float(batch.in_flight),
        "rollout/concurrency_limit": float(batch.limit),
        "rollout/truncated_ratio": _mean([float(r.ended in ("length", "max_turns")) for r in records]),
        "buffer/groups": float(batch.waiting),
        "groups/accepted": float(len(batch.accepted)),
        "groups/rejected": float(len(batch.rejected)),
        "time/wait_groups": batch.waited,
        **batch.books,
    }
    if batch.staleness:
        metrics["staleness/mean"] = _mean(batch.staleness)
        metrics["staleness/max"] = max(batch.staleness)
        samples = [sample for group in batch.accepted for sample in group.samples]
        metrics["staleness/mixed_versions"] = _mean([float(sample.mixed_versions) for sample in samples])
    if batch.waiting_staleness:
        metrics["buffer/staleness_mean"] = _mean(batch.waiting_staleness)
        metrics["buffer/staleness_max"] = max(batch.waiting_staleness)
    metrics |= session_metrics(records)
    if rewards:
        metrics["rollout/reward_mean"] = _mean(rewards)
        metrics["rollout/pass_rate"] = _mean([float(r >= 1.0) for r in rewards])
    if several:
        metrics |= _by_environment(records)
    for kind, count in Counter(r.outcome.kind for r in records).items():
        metrics[f"outcome/{kind}"] = float(count)
    for reason, count in Counter(reason.split(":")[0] for _, reason in batch.rejected).items():
        metrics[f"groups/rejected/{reason}"] = float(count)
    for node in ("create", "setup", "agent", "agent/command", "verify", "teardown", "wait/engine", "total"):
        metrics[f"episode/{node}_seconds"] = _mean([r.timings.get(node, 0.0) for r in records])
    return metrics


def _by_environment(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    metrics = {}
    for name in {record.environment for record in records}:
        members = [record for record in records if record.environment == name]
        metrics[f"rollout/{name}/episodes"] = float(len(members))
        metrics[f"rollout/{name}/infra_errors"] = float(sum(r.outcome.kind == "infra_error" for r in members))
        if rewards := [r.outcome.reward for r in members if r.outcome.reward is not None]:
            metrics[f"rollout/{name}/reward_mean"] = _mean(rewards)
            metrics[f"rollout/{name}/pass_rate"] = _mean([float(r >= 1.0) for r in rewards])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
