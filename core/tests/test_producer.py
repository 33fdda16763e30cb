"""Groups in the making: slots, refills, rejections, staleness, what a new attempt takes over."""

import asyncio
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producing import BROKEN, FAIL, PASS, TASK, ScriptedRunner, finished, holding, producer

from rollhook.errors import RollhookError
from rollhook.records import Group, Outcome
from rollhook.runtime.batch import Batch, Prompt, VerdictWatch, batch_metrics, permute_rewards


async def collect(outcomes, prompts=1, accept=lambda group: None, **rollout):
    runner = ScriptedRunner(outcomes)
    made = producer(runner, accept=accept, batch_groups=prompts, **rollout)
    made.start(0, {1: 0})
    try:
        return runner, await made.batch()
    finally:
        await made.aclose()


async def test_a_failed_episode_is_refilled_within_its_group():
    runner, batch = await collect([BROKEN, PASS, FAIL, PASS])
    assert len(runner.requests) == 5
    assert batch_metrics(batch)["rollout/refills"] == 1
    (group,) = batch.accepted
    assert len(group.rewards) == 4
    assert len(group.samples) == 4
    assert len({r.episode_id for r in group.records}) == 5


async def test_a_group_that_cannot_be_filled_is_rejected_and_never_trains():
    runner, batch = await collect([BROKEN], refill_limit=3, unused="drop")
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
@settings(deadline=None)
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
    _, broken = await collect([BROKEN], refill_limit=0, unused="drop")
    _, sound = await collect([FAIL])
    for batch in (broken, broken, sound, broken, broken):
        watch.check(batch)
    with pytest.raises(RollhookError, match=r"last 3 steps came to a verdict .*sandbox: gone"):
        watch.check(broken)


@pytest.fixture
async def held():
    async with holding() as made:
        yield made


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_prompts_are_taken_up_within_the_bound_of_staleness(held, limit):
    runner, make = held
    made = make(10, max_staleness=limit)
    await runner.until(4 * (limit + 1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(runner.waiting) == 4 * (limit + 1)
    await runner.end(1, *sorted(runner.waiting)[:4])
    await made.batch()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(runner.waiting) == 4 * limit  # the next only once the weights are there
    made.published(2, 1)
    await runner.until(4 * (limit + 1))


async def test_no_more_prompts_are_taken_up_than_the_run_has_steps_for(held):
    runner, make = held
    made = make(2, max_staleness=5)
    await runner.until(8)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(runner.waiting) == 8
    assert made.drawn == [0, 1]


async def test_a_step_takes_the_groups_that_finish_first_and_counts_their_staleness(held):
    runner, make = held
    made = make(4, max_staleness=1)
    await runner.until(8)
    late = [episode_id for episode_id in runner.waiting if "s00000-g000" in episode_id]
    await runner.end(1, *(e for e in sorted(runner.waiting) if e not in late and "s00001-g001" not in e))
    batch = await made.batch()
    assert [group.group_id for group in batch.accepted] == ["s00000-g001", "s00001-g000"]
    assert (batch.staleness, batch.waiting) == ([0.0] * 4, 0)
    made.published(2, 1)
    await runner.until(8)
    await runner.end(2, *(e for e in sorted(runner.waiting) if "s00001-g001" in e))
    await runner.end(2, *(e for e in sorted(runner.waiting) if "s00002-g000" in e))
    assert (await made.batch()).staleness == [0.0] * 4


async def test_a_finished_sibling_that_becomes_stale_is_run_again(held):
    runner, make = held
    made = make(9, max_staleness=1, batch_groups=1, refill_limit=4)
    await runner.until(4)
    first, second = sorted(e for e in runner.waiting if "s00000" in e)
    await runner.end(1, first)
    await runner.end(1, *(e for e in sorted(runner.waiting) if "s00001" in e))
    await made.batch()
    made.published(2, 1)
    await runner.until(3)
    assert second in runner.waiting  # one version behind is allowed
    await runner.end(2, *(e for e in sorted(runner.waiting) if "s00002" in e))
    await made.batch()
    # the last step that could take version 1 has gone without them: both are made again at once
    for _ in range(20):
        await asyncio.sleep(0)
    assert sorted(runner.waiting) == ["a1-s00000-g000-e00-t1", "a1-s00000-g000-e01-t1"]
    made.published(3, 2)
    await runner.until(4)
    assert {e for e in runner.waiting if "s00000" in e} == {
        "a1-s00000-g000-e00-t1",
        "a1-s00000-g000-e01-t1",
    }
    await runner.end(3, "a1-s00000-g000-e00-t1", "a1-s00000-g000-e01-t1")
    batch = await made.batch()
    (group,) = batch.accepted
    assert [record.episode_id for record in group.discarded] == [first]
    assert batch_metrics(batch)["rollout/refills"] == 2
    assert batch_metrics(batch)["rollout/cancelled_stale"] == 1
    assert batch.staleness == [0.0, 0.0]


async def test_a_group_whose_refills_are_used_up_is_given_up_as_stale(held):
    runner, make = held
    made = make(9, max_staleness=0, batch_groups=1, refill_limit=0, unused="drop")
    await runner.until(2)
    await runner.end(1, sorted(runner.waiting)[0])
    made.published(2, 1)  # weights that this group never waited for
    for _ in range(20):
        await asyncio.sleep(0)
    batch = await made.batch()
    assert [(group.group_id, reason) for group, reason in batch.rejected] == [("s00000-g000", "stale")]
    assert not batch.accepted


async def test_a_group_that_became_stale_while_it_waited_does_not_train(held):
    runner, make = held
    made = make(9, max_staleness=0, batch_groups=1, unused="drop")
    await runner.until(2)
    await runner.end(1)
    made.published(2, 1)
    assert [reason for _, reason in (await made.batch()).rejected] == ["stale"]


@pytest.mark.parametrize("moments", range(8))
async def test_weights_may_come_at_any_moment_of_a_groups_end(held, moments):
    runner, make = held
    made = make(9, max_staleness=0, batch_groups=1)
    await runner.until(2)
    for number, done in enumerate(runner.waiting.values()):
        done.set_result((1, float(number)))
    for _ in range(moments):
        await asyncio.sleep(0)
    made.published(2, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    await runner.end(2)
    async with asyncio.timeout(5):
        batch = await made.batch()
    assert [reason for _, reason in batch.rejected] in ([], ["stale"])
    assert set(batch.staleness) <= {0.0}


async def test_tokens_of_weights_that_some_engines_have_already_are_not_stale(held):
    runner, make = held
    made = make(9, max_staleness=1, batch_groups=1)
    await runner.until(4)
    await runner.end(1, *sorted(e for e in runner.waiting if "s00000" in e))
    await made.batch()
    made.publishing(2, 1)
    await runner.end(2)  # an engine serves version 2 while another is still being started anew
    made.published(2, 1)
    batch = await made.batch()
    assert ([group.group_id for group in batch.accepted], batch.staleness) == (["s00001-g000"], [0.0, 0.0])
    assert not batch.accepted[0].discarded


async def test_tokens_of_a_version_that_is_not_of_the_lineage_do_not_train(held):
    runner, make = held
    made = make(9, max_staleness=9, batch_groups=1)
    await runner.until(2)
    await runner.end(7, *sorted(e for e in runner.waiting if "s00000" in e))
    for _ in range(20):
        await asyncio.sleep(0)
    assert {e for e in runner.waiting if "s00000" in e} == {
        "a1-s00000-g000-e00-t1",
        "a1-s00000-g000-e01-t1",
    }
    assert made.drawn[0] == 0


async def test_a_paused_producer_starts_no_group_and_finishes_those_under_way(held):
    runner, make = held
    made = make(9, max_staleness=1, batch_groups=1)
    await runner.until(4)
    made.pause()
    await runner.end(1, *sorted(e for e in runner.waiting if "s00000" in e))
    await made.batch()
    made.published(2, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(runner.waiting) == 2
    made.resume()
    await runner.until(4)


async def test_no_group_is_started_while_enough_wait(held):
    runner, make = held
    made = make(9, max_staleness=8, batch_groups=1, buffer_groups=2, max_concurrent=2)
    for _ in range(20):
        await runner.end(1)
    assert not runner.waiting
    batch = await made.batch()
    assert batch.waiting in (1, 2)  # a third may be begun before the second is ready
    for _ in range(batch.waiting - 1):
        assert not runner.waiting
        await made.batch()
    await runner.until(2)


async def test_prompts_of_earlier_attempts_come_first_and_keep_their_finished_episodes(held):
    runner, make = held
    group = Group("s00000-g001", "t1", "fake", "sort", 2)
    kept = finished(dataclasses.make_dataclass("R", ["episode_id", "group_id", "task", "seed"])(
        "a0-s00000-g001-e01-t0", "s00000-g001", TASK, 0), FAIL)  # fmt: skip
    kept = dataclasses.replace(kept, record=dataclasses.replace(kept.record, attempt=0, completion_tokens=7))
    group.records.append(kept.record)
    group.samples.extend(kept.samples)
    ids = ["a0-s00000-g000-e00-t0", "a0-s00000-g000-e01-t0"]
    whole = Group("s00000-g000", "t1", "fake", "sort", 2)
    whole.records = [dataclasses.replace(kept.record, episode_id=each) for each in ids]
    whole.samples = [dataclasses.replace(kept.samples[0], episode_id=each) for each in ids]
    owned = [(Prompt(each.group_id, TASK, "fake"), each) for each in (whole, group)]
    made = make(9, owned=owned, next_step=1, drop_zero_variance=False)
    await runner.until(1)
    assert sorted(runner.waiting) == ["a1-s00000-g001-e00-t0"]
    await runner.end(1)
    batch = await made.batch()
    assert [len(each.rewards) for each in batch.accepted] == [2, 2]
    metrics = batch_metrics(batch)
    assert metrics["rollout/tokens"] == 3 * 7
    assert metrics["rollout/tokens_per_second"] == 0.0, "those that an earlier attempt generated do not count"
    made.published(2, 1)
    await runner.until(4)
    assert made.drawn == [1]


async def test_a_kept_episode_that_became_stale_while_its_group_waited_is_run_again(held):
    runner, make = held
    request = dataclasses.make_dataclass("R", ["episode_id", "group_id", "task", "seed"])
    kept = finished(request("a0-s00000-g001-e01-t0", "s00000-g001", TASK, 0), FAIL)
    group = Group("s00000-g001", "t1", "fake", "sort", 2, [kept.record], [*kept.samples])
    first = Group("s00000-g000", "t1", "fake", "sort", 2)
    owned = [(Prompt(each.group_id, TASK, "fake"), each) for each in (first, group)]
    made = make(9, owned=owned, next_step=1, batch_groups=1)
    await runner.until(2)
    await runner.end(1)
    await made.batch()
    made.published(2, 1)
    await runner.until(2)
    assert sorted(runner.waiting) == ["a1-s00000-g001-e00-t0", "a1-s00000-g001-e01-t0"]


async def test_what_stops_the_producer_is_raised_to_the_trainer():
    class Broken:
        async def run(self, request):
            raise RollhookError("the journal is full")

    made = producer(Broken())
    made.start(0, {1: 0})
    with pytest.raises(RollhookError, match="the journal is full"):
        await made.batch()
    await made.aclose()
