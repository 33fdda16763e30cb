"""The policies under real sessions over fake engines: who serves whom, and what follows when workers fail."""

from collections import Counter

import pytest

from rollhook.session import Renderer
from rollhook.session.turn import Limits
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer
from rollhook_routing import ConsistentHashConfig, MinLoadConfig, PrefixCacheConfig, StickyConfig
from rollhook_routing.policies import MinLoad, Sticky
from rollhook_routing.prefix import PrefixCache
from rollhook_routing.ring import ConsistentHash

FAST = Limits(backoff=0.001, no_worker=0.05, abort=0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engines(directory):
    renderer = Renderer(directory)
    return [FakeEngine(says(renderer, "x")) for _ in range(3)]


def make(*kinds):
    """Return policies of these (class, config) pairs."""
    return [kind(config, build_context(seed=3)) for kind, config in kinds]


def sticky_min_load():
    return make((Sticky, StickyConfig()), (MinLoad, MinLoadConfig()))


class Talk:
    """One session and what was said in it so far."""

    def __init__(self, policy, name, text="go", task=""):
        limits = {"max_seq_len": 5000, "reply_tokens": 100, "turns": 20}
        self.session = policy.open(name, task_id=task, **limits)
        self.history = [{"role": "user", "content": text}]

    @property
    def worker(self):
        return self.session.route.worker

    async def turn(self):
        reply = await self.session.chat(self.history)
        self.history += [reply.message, {"role": "user", "content": "on"}]
        return self.worker


async def test_one_session_has_one_worker_and_another_when_that_is_ill(directory, engines):
    async with serving(*engines, directory=directory, policies=sticky_min_load(), limits=FAST) as policy:
        talk = Talk(policy, "s")
        first = talk.worker
        assert [await talk.turn() for _ in range(3)] == [first] * 3
        ill = next(engine for engine in engines if engine.worker == first)
        ill.fail("/generate")
        ill.healthy = False
        second = await talk.turn()
        assert second != first
        ill.healthy = True
        await policy.check_health()
        await policy.check_health()
        assert first in [entry.worker for entry in policy.table.offered()]
        assert await talk.turn() == second, "it does not go back"


async def test_a_session_goes_to_the_worker_with_the_fewest_open_ones_also_when_those_are_idle(
    directory, engines
):
    async with serving(*engines, directory=directory, policies=sticky_min_load()) as policy:
        talks = [Talk(policy, f"s{n}") for n in range(9)]
        assert set(Counter(talk.worker for talk in talks).values()) == {3}
        left = talks[0].worker
        await talks[0].session.close()
        assert Talk(policy, "next").worker == left


async def test_a_worker_that_joins_takes_its_share_of_open_sessions(directory, engines):
    async with (
        engines[2] as new,
        serving(*engines[:2], directory=directory, policies=sticky_min_load()) as policy,
    ):
        talks = [Talk(policy, f"s{n}") for n in range(12)]
        for talk in talks:
            await talk.turn()
        policy.fleet.add([new.worker], version=1)
        moved = 0
        for talk in talks:
            before = talk.worker
            moved += await talk.turn() != before
        counts = Counter(talk.worker for talk in talks)
        assert moved == counts[new.worker]
        assert 2 <= counts[new.worker] <= 4
        assert policy.table.local_loads() == {worker: (counts[worker], 0) for worker in policy.table.workers}
        before = [talk.worker for talk in talks]
        assert [await talk.turn() for talk in talks] == before


async def test_siblings_of_a_group_meet_where_their_prompt_is_known(directory, engines):
    policies = make((Sticky, StickyConfig()), (PrefixCache, PrefixCacheConfig(chunk=8, load_factor=3.0)))
    async with serving(*engines, directory=directory, policies=policies) as policy:
        tasks = {"ant": "count the ants in the yard", "bee": "what a bee can and cannot carry"}
        found = {}
        for task, text in tasks.items():
            talks = [Talk(policy, f"{task}{n}", text * 4, task) for n in range(4)]
            assert {talk.worker for talk in talks} == {None}, "chosen at the first turn"
            found[task] = {await talk.turn() for talk in talks}
        assert all(len(workers) == 1 for workers in found.values())


async def test_a_hash_finds_the_same_worker_for_a_session_that_is_opened_again(directory, engines):
    policies = make((ConsistentHash, ConsistentHashConfig()))
    async with serving(*engines, directory=directory, policies=policies) as policy:
        first = {}
        for number in range(10):
            talk = Talk(policy, f"s{number}")
            first[number] = talk.worker
            await talk.session.close()
        assert len(set(first.values())) > 1
        assert {number: Talk(policy, f"s{number}").worker for number in range(10)} == first
