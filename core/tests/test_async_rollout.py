"""Groups that are made beside training: what a step takes, what is made anew, what ends early, the books."""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producing import BROKEN, FAIL, PASS, TASK, HeldRunner, ScriptedRunner, holding, producer

from rollhook.errors import RollhookError
from rollhook.records import Group
from rollhook.runtime.batch import Prompt, batch_metrics
from rollhook.runtime.books import Books, BooksError
from rollhook.runtime.buffer import FILL_LIMIT
from rollhook.runtime.concurrency import CROWDED, ROOMY, AdaptiveLimit
from rollhook.runtime.episode import EpisodeResult
from rollhook.runtime.making import member
from rollhook.runtime.slots import Slots


@pytest.fixture
async def held():
    async with holding() as made:
        yield made


async def settle():
    for _ in range(40):
        await asyncio.sleep(0)


def of(runner, group):
    return sorted(episode for episode in runner.waiting if group in episode)


def ids(groups):
    return [group.group_id for group in groups]


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


async def test_a_group_that_lost_places_for_good_trains_if_enough_are_left():
    runner = ScriptedRunner([BROKEN, BROKEN, PASS, FAIL])
    made = producer(runner, refill_limit=0, min_group=2)
    made.start(0, {1: 0})
    batch = await made.batch()
    await made.aclose()
    assert [len(group.rewards) for group in batch.accepted] == [2]


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


# -- slots


@pytest.mark.parametrize("submission", ["episode", "group"])
async def test_an_evaluation_shares_the_slots_of_training(held, submission):
    runner, make = held
    made = make(9, max_staleness=4, max_concurrent=5, submission=submission)
    await runner.until(4)
    await settle()
    async with contextlib.AsyncExitStack() as stack:
        if submission == "group":
            await stack.enter_async_context(made.slots)
        assert made.slots.free == 0
        made.pause()
        entering = asyncio.ensure_future(made.slots.__aenter__())
        await settle()
        assert not entering.done()
        await runner.end(1, *sorted(runner.waiting)[:2])
        await entering
        assert made.slots.used <= 5
        await made.slots.__aexit__()


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["ask", "cancel", "release", "limit"])), max_size=40
    )
)
def test_slots_are_given_in_order_and_never_too_many(events):
    async def play():
        slots, limit = Slots(4), 4
        asked, given = [], []

        async def hold(number, count, release):
            async with slots.holding(slots.ask(count), count):
                given.append(number)
                await release.wait()

        tasks = []
        for number, (count, event) in enumerate(events):
            if event == "ask":
                release = asyncio.Event()
                task = asyncio.ensure_future(hold(number, count, release))
                await asyncio.sleep(0)
                asked.append(number)
                tasks.append((task, release))
            elif event == "limit":
                limit = slots.limit = max(count, slots.used)
            elif tasks:
                task, release = tasks.pop(count % len(tasks))
                release.set() if event == "release" else task.cancel()
            await settle()
            assert 0 <= slots.used <= max(limit, 4)
        for _, release in tasks:
            release.set()
        await settle()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        await settle()
        assert slots.used == 0
        assert given == sorted(given), "who asked first is served first"

    asyncio.run(play())


def test_the_limit_shrinks_while_requests_queue_and_grows_back():
    adaptive = AdaptiveLimit(8, 128)
    assert adaptive.look(CROWDED + 1) == 96
    assert adaptive.look(CROWDED + 1) == 72
    assert adaptive.look((CROWDED + ROOMY) / 2) == 72
    assert [adaptive.look(0.0), adaptive.look(None)] == [80, 88]
    for _ in range(50):
        adaptive.look(CROWDED + 1)
    assert adaptive.limit == 8
    for _ in range(50):
        adaptive.look(0.0)
    assert adaptive.limit == 128
    assert AdaptiveLimit(8, 4).look(CROWDED + 1) == 4


async def test_a_producer_follows_the_pressure_of_the_engines(held):
    runner, make = held
    beats, waits = asyncio.Queue(), [9.0]

    async def sleep(seconds):
        if seconds > 100:  # the watch over stalls
            await asyncio.Event().wait()
        await beats.get()

    more = {"sleep": sleep, "pressure": lambda: waits[0]}
    made = make(99, max_staleness=9, max_concurrent=8, adaptive_concurrency=True, more=more)
    await runner.until(8)
    beats.put_nowait(None)
    await settle()
    assert made.slots.limit == 6
    await runner.end(1, *sorted(runner.waiting)[:4])
    await settle()
    assert len(runner.waiting) == 6
    waits[0] = 0.0
    beats.put_nowait(None)
    await runner.until(8)
    assert (await made.batch()).limit == 8


# -- the books


def test_books_tell_a_movement_that_cannot_be():
    books = Books(strict=True)
    books.submit("a")
    with pytest.raises(BooksError, match="episode a cannot be trained or rejected: it is in flight"):
        books.train(["a"])
    books.buffer("a")
    books.train(["a"])
    for movement in (books.submit, books.buffer, lambda episode: books.reject([episode], "stale")):
        with pytest.raises(BooksError, match="it is over"):
            movement("a")
    books.check()
    books.trained += 1
    with pytest.raises(BooksError, match="do not balance"):
        books.check()


def test_books_that_are_not_strict_keep_the_sum(caplog):
    books = Books()
    books.submit("a")
    books.submit("a")
    books.train(["b"])
    books.check()
    assert books.wrong == 2
    assert "this is a fault of rollhook" in caplog.text


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 99), st.sampled_from([0.0, 1.0, 1.0, None])),
        st.tuples(st.just("train")),
        st.tuples(st.sampled_from(["pause", "resume", "drain"])),
        st.tuples(st.just("restart")),
    ),
    max_size=60,
)
KEYS = st.fixed_dictionaries(
    {
        "max_staleness": st.sampled_from([0, 1, 2, None]),
        "batch_groups": st.integers(1, 2),
        "group_size": st.integers(2, 3),
        "max_concurrent": st.integers(3, 8),
        "refill_limit": st.integers(0, 2),
        "min_group": st.sampled_from([None, 2]),
        "unused": st.sampled_from(["recycle", "drop"]),
        "fill": st.booleans(),
        "submission": st.sampled_from(["episode", "group"]),
        "drop_zero_variance": st.booleans(),
    }
)


class Scripted:
    """A run of the producer by a script of what happens, with a trainer, and attempts that follow another."""

    def __init__(self, keys):
        self.keys, self.runner = keys, HeldRunner()
        self.step, self.versions, self.attempt = 0, {1: 0}, 1
        self.results, self.trained, self.taken, self.drawn = {}, [], Counter(), {}
        self.draining = self.live = False

    def begin(self):
        self.begun_with = set(self.results)
        self.trained_before = len(self.trained)
        self.draining = False
        self.made = producer(
            self.runner, steps=6, live=self.runner.live, attempt=self.attempt,
            more={"draining": lambda: self.draining}, **self.keys,
        )  # fmt: skip
        self.made._finished = self.finish
        self.made._draw = self.draw
        owned = self.owned()
        self.taken_over = sum(len(group.records) for _, group in owned)
        self.made.start(self.step, self.versions, next_step=len(self.drawn), owned=owned)

    async def draw(self, step):
        self.drawn[step] = [
            Prompt(f"s{step:05d}-g{n:03d}", TASK, "fake") for n in range(self.keys["batch_groups"])
        ]
        return self.drawn[step]

    def finish(self, result):
        assert result.record.episode_id not in self.results, "an episode reached its sink twice"
        self.results[result.record.episode_id] = result

    def owned(self):
        """Return what a new attempt takes over: as `owned_prompts` does."""
        found = []
        for prompt in (each for prompts in self.drawn.values() for each in prompts):
            if prompt.group_id in self.taken:
                continue
            group = Group(prompt.group_id, "t1", "fake", "sort", self.keys["group_size"])
            places = set()
            for result in self.results.values():
                record = result.record
                if record.group_id != prompt.group_id or not result.samples:
                    continue
                limit = self.keys["max_staleness"]
                age = self.step - self.versions[result.samples[0].oldest_version]
                if member(record.episode_id) in places or (limit is not None and age > limit):
                    continue
                places.add(member(record.episode_id))
                group.records.append(record)
                group.samples.extend(result.samples)
            found.append((prompt, group))
        return found

    async def play(self, actions):
        self.begin()
        for action, *arguments in actions:
            await getattr(self, action)(*arguments)
            await settle()
            self.look()
        await self.finale()
        await self.made.aclose()

    def look(self):
        books = self.made.books
        books.check()
        assert books.in_flight == len(self.runner.waiting)
        assert books.trained == len(self.trained) - self.trained_before
        ended = len(self.results.keys() - self.begun_with)
        assert books.submitted == self.taken_over + ended + books.in_flight

    async def end(self, number, reward):
        if self.runner.waiting:
            names = sorted(self.runner.waiting)
            self.runner.waiting[names[number % len(names)]].set_result((max(self.versions), reward))

    async def train(self):
        """Take a batch if one is there, and publish new weights."""
        taking = asyncio.ensure_future(self.made.batch())
        await settle()
        if not taking.done():
            taking.cancel()
            return
        batch = taking.result()
        for group in batch.groups:
            self.taken[group.group_id] += 1
            assert self.taken[group.group_id] == 1, "a group was taken twice"
        limit = self.keys["max_staleness"]
        assert limit is None or all(0 <= age <= limit for age in batch.staleness)
        self.trained += [sample.episode_id for group in batch.accepted for sample in group.samples]
        assert len(set(self.trained)) == len(self.trained), "an episode trains twice"
        self.look()
        counted = len(batch.accepted) if self.keys["fill"] else len(batch.groups)
        assert counted == self.keys["batch_groups"] or len(batch.rejected) >= FILL_LIMIT
        self.step += 1
        version = max(self.versions) + 1
        self.made.publishing(version, self.step)
        self.made.published(version, self.step)
        self.versions[version] = self.step

    async def pause(self):
        self.made.pause()

    async def resume(self):
        self.made.resume()

    async def drain(self):
        self.draining = True

    async def restart(self):
        await self.made.aclose()
        self.attempt += 1
        self.begin()

    async def finale(self):
        """Whatever happened, the run goes on to its last step."""
        self.draining = False
        self.made.resume()
        for number in range(2000):
            if self.step == 6:
                return
            for place, name in enumerate(sorted(self.runner.waiting)):
                self.runner.waiting[name].set_result((max(self.versions), float((place + number) % 2)))
            await settle()
            self.look()
            await self.train()
        raise AssertionError("the run does not come to its end")


@given(KEYS, ACTIONS)
@settings(max_examples=60, deadline=None)
def test_the_books_balance_whatever_happens(keys, actions):
    asyncio.run(Scripted(keys).play(actions))
