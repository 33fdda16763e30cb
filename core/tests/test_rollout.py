"""Groups: slots, refills, rejections."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.environment import Task
from rollhook.errors import RollhookError
from rollhook.recipe.schema import Rollout
from rollhook.records import EpisodeRecord, Group, Outcome, Sample
from rollhook.runtime.episode import EpisodeResult
from rollhook.runtime.rollout import Batch, Collector, Prompt, VerdictWatch, batch_metrics, permute_rewards

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
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.running -= 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        return finished(request, outcome)


PASS, FAIL = Outcome("scored", 1.0), Outcome("scored", 0.0)
BROKEN = Outcome("infra_error", boundary="sandbox", cause="gone")


async def collect(outcomes, prompts=1, accept=lambda group: None, **rollout):
    runner = ScriptedRunner(outcomes)
    settings = Rollout(**{"group_size": 4, "batch_groups": prompts, **rollout})
    collector = Collector({"fake": runner}, settings, seed=0, attempt=1, accept=accept)
    return runner, await collector.collect([Prompt(TASK, "fake")] * prompts, 0)


async def test_a_failed_episode_is_refilled_within_its_group():
    runner, batch = await collect([BROKEN, PASS, FAIL, PASS])
    assert len(runner.requests) == 5
    assert batch.refills == 1
    (group,) = batch.accepted
    assert len(group.rewards) == 4
    assert len(group.samples) == 4
    assert len({r.episode_id for r in group.records}) == 5


async def test_a_group_that_cannot_be_filled_is_rejected_and_never_trains():
    runner, batch = await collect([BROKEN], refill_limit=3)
    assert [(reason, group.samples) for group, reason in batch.rejected] == [("incomplete", [])]
    assert len(runner.requests) == 4 + 3
    assert batch_metrics(batch)["outcome/infra_error"] == 7
    assert batch.why_rejected() == "1 incomplete; 7 of 7 episodes failed by sandbox: gone"


@pytest.mark.parametrize("outcome", [PASS, FAIL])
async def test_a_group_without_variance_is_dropped_unless_the_recipe_keeps_it(outcome):
    _, batch = await collect([outcome])
    assert [reason for _, reason in batch.rejected] == ["zero_variance"]
    assert batch.why_rejected() == "1 zero_variance"
    _, batch = await collect([outcome], drop_zero_variance=False)
    assert len(batch.accepted) == 1


async def test_dropped_outcomes_are_not_refilled_and_a_single_reward_is_no_group():
    runner, batch = await collect([Outcome("timeout"), Outcome("timeout"), Outcome("timeout"), PASS])
    assert len(runner.requests) == 4
    assert [reason for _, reason in batch.rejected] == ["too_few_rewards"]


@pytest.mark.parametrize("submission", ["episode", "group"])
async def test_at_most_max_concurrent_episodes_run_at_once(submission):
    runner, batch = await collect([PASS, FAIL], prompts=6, max_concurrent=8, submission=submission)
    assert len(runner.requests) == 24
    assert runner.most == 8
    assert len(batch.groups) == 6


async def test_a_filter_rejects_with_its_reason_and_a_failing_filter_rejects_too():
    _, batch = await collect([PASS, FAIL], accept=lambda group: "too easy")
    assert [reason for _, reason in batch.rejected] == ["too easy"]

    def broken(group):
        raise KeyError("score")

    _, batch = await collect([PASS, FAIL], accept=broken)
    assert [reason for _, reason in batch.rejected] == ["filter failed: KeyError: 'score'"]
    assert batch_metrics(batch)["groups/rejected/filter failed"] == 1


async def test_episode_ids_and_seeds_are_unique_and_reproducible():
    first, _ = await collect([PASS, FAIL], prompts=3)
    again, _ = await collect([PASS, FAIL], prompts=3)
    ids = [r.episode_id for r in first.requests]
    assert len(set(ids)) == 12
    assert len({r.seed for r in first.requests}) == 12
    assert [(r.episode_id, r.seed) for r in again.requests] == list(
        zip(ids, [r.seed for r in first.requests], strict=True)
    )


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(),
)
def test_permuting_keeps_the_rewards_of_a_batch_and_moves_them_with_their_samples(rewards, seed):
    groups = []
    for g, members in enumerate(rewards):
        group = Group(f"g{g}", "t1", "fake", "sort", len(members))
        for n, reward in enumerate(members):
            outcome = BROKEN if reward is None else Outcome("scored", reward)
            request = dataclasses.make_dataclass("R", ["episode_id", "group_id", "task", "seed"])(
                f"g{g}-{n}", f"g{g}", TASK, 0
            )
            result = finished(request, outcome)
            group.records.append(result.record)
            group.samples.extend(result.samples)
        groups.append(group)
    permute_rewards(groups, seed)
    flat = [r for group in groups for r in group.rewards]
    assert sorted(flat) == sorted(r for members in rewards for r in members if r is not None)
    for group in groups:
        by_id = {r.episode_id: r.outcome.reward for r in group.records}
        assert all(s.reward == by_id[s.episode_id] for s in group.samples)


def test_metrics_of_an_empty_batch():
    assert batch_metrics(Batch())["rollout/episodes"] == 0


async def test_steps_in_a_row_without_a_verdict_end_the_run_and_say_why():
    watch = VerdictWatch(limit=3)
    _, broken = await collect([BROKEN], refill_limit=0)
    _, sound = await collect([FAIL])
    for batch in (broken, broken, sound, broken, broken):
        watch.check(batch)
    with pytest.raises(RollhookError, match=r"last 3 steps came to a verdict .*sandbox: gone"):
        watch.check(broken)
