"""Groups that are made beside training: what a step takes, what is made anew, what ends early, the books."""

import asyncio
import dataclasses
import logging
from collections import Counter

import numpy as np
import pytest
from producing import BROKEN, FAIL, PASS, HeldRunner, ScriptedRunner, holding, ids, of, producer, settle

from rollhook.errors import RollhookError
from rollhook.records import Outcome
from rollhook.runtime.batch import batch_metrics
from rollhook.runtime.buffer import FILL_LIMIT
from rollhook.runtime.episode import EpisodeResult


@pytest.fixture
async def held():
    async with holding() as made:
        yield made


# -- unused groups


async def test_a_stale_group_is_made_anew_before_others_and_counts_once(held):
    runner, make = held
    made = make(9, max_staleness=1, batch_groups=1, refill_limit=0, max_concurrent=4)
    await runner.until(4)
    for version, group in ((1, "s00001"), (2, "s00002")):  # the first group stays behind
        await runner.end(version, *of(runner, group))
        assert ids((await made.batch()).accepted) == [f"{group}-g000"]
        if version == 1:
            made.published(2, 1)
            await settle()
    await settle()
    assert of(runner, "s00000") == ["a1-s00000-g000-e00-t1", "a1-s00000-g000-e01-t1"]
    made.published(3, 2)
    await settle()
    await runner.end(3, *of(runner, "s00000"))
    batch = await made.batch()
    assert ids(batch.accepted) == ["s00000-g000"]
    assert not batch.rejected
    assert Counter(made.delivered).most_common(1)[0][1] == 1
    assert made.books.rejected == {"stale": 2}
    assert batch_metrics(batch)["rollout/refills"] == 2


async def test_a_dropped_stale_group_is_rejected_and_counts(held):
    runner, make = held
    made = make(9, max_staleness=0, batch_groups=1, unused="drop")
    await runner.until(2)
    await runner.end(1)
    made.published(2, 1)
    batch = await made.batch()
    assert [reason for _, reason in batch.rejected] == ["stale"]
    assert not batch.accepted


async def test_a_group_that_the_machinery_failed_is_made_anew_once():
    runner = ScriptedRunner([BROKEN])
    made = producer(runner, refill_limit=1)
    made.start(0, {1: 0})
    batch = await made.batch()
    await made.aclose()
    assert [reason for _, reason in batch.rejected] == ["incomplete"]
    assert len(runner.requests) == 2 * (4 + 1)
    assert made.books.rejected == {"infra_error": 10}


async def test_what_is_made_anew_comes_before_what_waits(held):
    runner, make = held
    make(9, batch_groups=2, refill_limit=0, max_concurrent=2, submission="group")
    await runner.until(2)
    for name in sorted(runner.waiting):
        runner.waiting[name].set_result((1, None))
    await settle()
    assert sorted(runner.waiting) == ["a1-s00000-g000-e00-t1", "a1-s00000-g000-e01-t1"]


async def test_good_siblings_are_kept_when_a_group_is_made_anew(held):
    runner, make = held
    make(9, batch_groups=1, refill_limit=0)
    await runner.until(2)
    first, second = sorted(runner.waiting)
    runner.waiting[first].set_result((1, 1.0))
    await settle()
    runner.waiting[second].set_result((1, None))
    await settle()
    assert sorted(runner.waiting) == [second.replace("-t0", "-t1")]


# -- what ends early


async def test_a_group_that_cannot_be_filled_ends_its_siblings_at_once(held):
    runner, make = held
    made = make(9, group_size=4, batch_groups=1, refill_limit=0, unused="drop")
    await runner.until(4)
    runner.waiting[sorted(runner.waiting)[0]].set_result((1, None))
    await settle()
    assert not runner.waiting
    batch = await made.batch()
    assert [reason for _, reason in batch.rejected] == ["incomplete"]
    assert made.books.rejected == {"infra_error": 1, "incomplete": 3}


async def test_a_draining_run_starts_only_what_the_step_under_way_needs(held):
    runner, make = held
    draining = asyncio.Event()
    made = make(9, max_staleness=4, batch_groups=2, max_concurrent=2, more={"draining": draining.is_set})
    await runner.until(2)
    draining.set()
    await runner.end(1)
    await settle()
    assert not runner.waiting, "the trainer has not asked for groups"
    taking = asyncio.ensure_future(made.batch())
    await runner.until(2)
    await runner.end(1)
    await taking
    await settle()
    assert not runner.waiting
    assert len(made.delivered) == 4


async def test_no_step_can_take_it_any_more_so_it_ends_before_the_weights_are_there(held):
    runner, make = held
    made = make(9, max_staleness=1, batch_groups=1, refill_limit=9)
    await runner.until(4)
    await runner.end(1, *of(runner, "s00001"))
    await made.batch()
    made.published(2, 1)
    await settle()
    assert of(runner, "s00000") == ["a1-s00000-g000-e00-t0", "a1-s00000-g000-e01-t0"]
    await runner.end(2, *of(runner, "s00002"))
    await made.batch()  # the last that could have taken tokens of version 1
    await settle()
    assert of(runner, "s00000") == ["a1-s00000-g000-e00-t1", "a1-s00000-g000-e01-t1"]


@pytest.mark.parametrize("stop", ["pause", "drain"])
async def test_nothing_is_started_that_was_being_drawn_when_the_producer_was_held(held, stop):
    runner, make = held
    draining, drawn = asyncio.Event(), asyncio.Event()
    made = make(9, max_staleness=4, more={"draining": draining.is_set})
    draw = made._draw

    async def slowly(step):
        await drawn.wait()
        return await draw(step)

    made._draw = slowly
    await settle()
    made.pause() if stop == "pause" else draining.set()
    drawn.set()
    await settle()
    assert made.drawn == [0]
    assert not runner.waiting
    made.resume() if stop == "pause" else draining.clear()
    made.resume()
    await runner.until(4)


# -- submission


@pytest.mark.parametrize(("submission", "begun"), [("episode", "s00002-g000-e00"), ("group", "")])
async def test_a_free_slot_takes_an_episode_or_waits_for_those_of_a_whole_group(held, submission, begun):
    runner, make = held
    make(9, max_staleness=4, batch_groups=1, max_concurrent=4, submission=submission)
    await runner.until(4)
    await runner.end(1, of(runner, "s00000")[0])
    await settle()
    assert [name for name in runner.waiting if "s00002" in name] == ([f"a1-{begun}-t0"] if begun else [])
    await runner.end(1, of(runner, "s00001")[0])
    await settle()
    assert len(of(runner, "s00002")) == (2 if begun else 0), "two slots are free, of two groups"
    await runner.end(1, *of(runner, "s00000"))
    await settle()
    assert len(runner.waiting) == (4 if begun else 3)


# -- what a step takes


async def test_a_sample_without_a_version_is_of_no_age():
    class Silent(ScriptedRunner):
        async def run(self, request):
            result = await super().run(request)
            spans = np.zeros((0, 4), np.int32)
            return EpisodeResult(result.record, [dataclasses.replace(s, spans=spans) for s in result.samples])

    made = producer(Silent([PASS, FAIL]), steps=9, max_staleness=0)
    made.start(5, {3: 5}, next_step=5)
    batch = await made.batch()
    await made.aclose()
    assert (len(batch.accepted), batch.staleness) == (1, [0.0] * 4)


async def test_a_step_takes_the_oldest_groups_first(held):
    runner, make = held
    made = make(9, max_staleness=3, batch_groups=1, buffer_groups=9)
    await runner.until(8)
    made.published(2, 1)
    await runner.end(2, *of(runner, "s00003"))
    await runner.end(1, *of(runner, "s00001"))
    assert ids((await made.batch()).accepted) == ["s00001-g000"]
    assert ids((await made.batch()).accepted) == ["s00003-g000"]


async def test_a_group_at_its_last_chance_trains_without_its_stragglers(held):
    runner, make = held
    made = make(9, max_staleness=0, group_size=4, batch_groups=1, min_group=2)
    made.published(1, 0)
    await runner.until(4)
    *three, straggler = sorted(runner.waiting)
    await runner.end(1, *three)
    # one whole group must be there for a step to be taken: of the next prompt
    taking = asyncio.ensure_future(made.batch())
    await settle()
    assert not taking.done()
    taking.cancel()

    made = make(9, max_staleness=1, group_size=4, batch_groups=1, min_group=2)
    runner.waiting.pop(straggler).cancel()
    await runner.until(8)
    *three, straggler = of(runner, "s00000")
    await runner.end(1, *three)
    await runner.end(1, *of(runner, "s00001"))
    assert ids((await made.batch()).accepted) == ["s00001-g000"]
    made.published(2, 1)
    await runner.until(5)
    await runner.end(2, *of(runner, "s00002"))
    batch = await made.batch()
    assert ids(batch.accepted) == ["s00000-g000"]
    assert batch.staleness == [1.0, 1.0, 1.0]
    await settle()
    assert straggler not in runner.waiting
    made.published(3, 2)
    following = await made.batch()
    assert ids(following.accepted) == ["s00002-g000"]
    assert [record.episode_id for record in following.strays] == [straggler]
    assert batch_metrics(following)["outcome/cancelled"] == 1
    assert made.delivered.count(straggler) == 1


async def test_a_group_whose_stragglers_take_long_to_end_is_taken_once():
    leave = asyncio.Event()

    class Lingering(HeldRunner):
        async def run(self, request):
            result = await super().run(request)
            if result.record.outcome.kind == "cancelled":
                await leave.wait()
            return result

    slow = Lingering()
    made = producer(slow, steps=9, live=slow.live, group_size=4, batch_groups=1, max_staleness=0, min_group=2,
                    max_concurrent=100)  # fmt: skip
    made.start(0, {1: 0})
    await slow.until(4)
    *three, _ = sorted(slow.waiting)
    await slow.end(1, *three)
    made._buffer.enough = lambda count: True  # what a whole group beside it would do
    assert ids((await made.batch()).accepted) == ["s00000-g000"]
    assert ids((await made.batch()).groups) == []
    leave.set()
    await settle()
    assert len(made.delivered) == 4
    await made.aclose()


async def test_a_group_that_lost_places_for_good_trains_if_enough_are_left():
    runner = ScriptedRunner([BROKEN, BROKEN, PASS, FAIL])
    made = producer(runner, refill_limit=0, min_group=2)
    made.start(0, {1: 0})
    batch = await made.batch()
    await made.aclose()
    assert [len(group.rewards) for group in batch.accepted] == [2]


async def test_episodes_of_a_group_that_trains_are_booked_by_why_they_do_not():
    class Mute(ScriptedRunner):
        async def run(self, request):
            result = await super().run(request)
            return EpisodeResult(result.record) if "-e03-" in request.episode_id else result

    made = producer(Mute([PASS, FAIL, Outcome("timeout"), PASS]))
    made.start(0, {1: 0})
    batch = await made.batch()
    await made.aclose()
    assert batch.books["books/trained"] == 2
    rejected = {name for name in batch.books if name.startswith("books/rejected/")}
    assert rejected == {"books/rejected/timeout", "books/rejected/no_tokens"}


async def test_a_full_step_needs_groups_that_train_where_the_recipe_wants_it():
    seen = []

    def accept(group):
        seen.append(group.group_id)
        return "too easy" if len(seen) % 3 else None

    runner = ScriptedRunner([PASS, FAIL])
    made = producer(runner, steps=2, accept=accept, batch_groups=2, fill=True, group_size=2, max_staleness=1)
    runner.outcomes = [PASS, FAIL] * 100
    made.start(0, {1: 0})
    batch = await made.batch()
    assert len(batch.accepted) == 2
    assert len(batch.rejected) >= 4
    assert {reason for _, reason in batch.rejected} == {"too easy"}
    assert len(set(ids(batch.groups))) == len(batch.groups)
    made.published(2, 1)
    again = await made.batch()
    assert len(again.accepted) == 2
    assert not set(ids(again.groups)) & set(ids(batch.groups)), "a rejected group is told once"
    await made.aclose()


async def test_the_search_for_a_full_step_ends():
    made = producer(ScriptedRunner([PASS]), batch_groups=2, fill=True, group_size=2)
    made.start(0, {1: 0})
    batch = await made.batch()
    await made.aclose()
    assert not batch.accepted
    assert len(batch.rejected) == FILL_LIMIT * 2
    assert len(made.drawn) <= FILL_LIMIT + 1


async def test_the_search_for_a_full_step_is_held_back_while_the_trainer_trains(held):
    runner, make = held
    keys = {"max_staleness": None, "batch_groups": 1, "max_concurrent": 2, "buffer_groups": 1, "fill": True}
    made = make(99, accept=lambda group: "too easy", **keys)
    for _ in range(FILL_LIMIT + 1):  # the last was begun before the one before it was refused
        await runner.until(2)
        await runner.end(1)
    await settle()
    assert not runner.waiting, "as many groups as a step looks at were refused, and nobody took them"
    assert len((await made.batch()).rejected) == FILL_LIMIT + 1
    await runner.until(2)


async def test_without_a_limit_nothing_is_stale_and_the_buffer_holds_the_producer_back(held):
    runner, make = held
    made = make(99, max_staleness=None, batch_groups=1, max_concurrent=2)
    await runner.until(2)
    for _ in range(9):
        await runner.end(1)
        await settle()
    assert not runner.waiting
    made.published(2, 7)
    batch = await made.batch()
    assert batch.staleness == [7.0, 7.0]
    assert batch.waiting == 2, "twice a step's groups wait, and one more was begun before they did"
    await made.batch()
    await runner.until(2)


async def test_the_producers_fault_comes_before_its_backlog(held):
    runner, make = held
    made = make(9, max_staleness=4, batch_groups=1)
    await runner.until(4)
    await runner.end(1, *of(runner, "s00000"))
    runner.waiting[of(runner, "s00001")[0]].set_exception(RollhookError("the journal is full"))
    await settle()
    with pytest.raises(RollhookError, match="the journal is full"):
        await made.batch()


async def test_a_step_that_waits_long_for_nothing_says_so(held, caplog):
    runner, make = held
    beats = asyncio.Queue()

    async def sleep(seconds):
        await beats.get()

    made = make(9, batch_groups=1, more={"sleep": sleep})
    await runner.until(2)
    taking = asyncio.ensure_future(made.batch())
    await settle()
    with caplog.at_level(logging.WARNING):
        beats.put_nowait(None)
        await settle()
    assert "no episode has finished for 600 s; 2 are in flight" in caplog.text
    caplog.clear()
    await runner.end(1, sorted(runner.waiting)[0])
    beats.put_nowait(None)
    await settle()
    assert not caplog.records
    taking.cancel()
