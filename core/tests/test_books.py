"""The books of episodes: alone, and of the producer whatever happens to it."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producing import TASK, HeldRunner, producer, settle

from rollhook.records import Group
from rollhook.runtime.batch import Prompt
from rollhook.runtime.books import Books, BooksError
from rollhook.runtime.buffer import FILL_LIMIT
from rollhook.runtime.making import member


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
