"""Replies that stream out of a session: nothing half, nothing taken back, the record exact whatever fails."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.budgets import AgentClock
from rollhook.engine.weights import WeightStore
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.session import Limits, Renderer
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

USER = {"role": "user", "content": "go"}
FAST = Limits(backoff=0.001, no_worker=0.05, abort=0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def renderer(directory):
    return Renderer(directory)


def open_session(policy, **keys):
    return policy.open("s", **({"max_seq_len": 5000, "reply_tokens": 100, "turns": 20} | keys))


def going_on(renderer, ids):
    """Return a reply function that says what of these ids the prompt does not hold yet."""
    start = len(renderer.first([USER]))
    return lambda prompt, params: ids[len(prompt) - start :]


class Heard(list):
    """The pieces that a sink was given."""

    @property
    def text(self):
        return "".join(delta.text for delta in self)

    def reached(self, text):
        return asyncio.ensure_future(self._until(text))

    async def _until(self, text):
        while self.text != text:
            await asyncio.sleep(0)


async def test_text_comes_as_it_is_generated(directory, renderer):
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory) as policy:
        session, heard = open_session(policy), Heard()
        call = asyncio.ensure_future(session.chat([USER], on_delta=heard.append))
        await asyncio.wait_for(heard.reached("ab"), 5)
        assert not call.done()
        await engine.release()
        reply = await call
        assert session.leaves()[0].mask.sum() == 5
    assert heard.text == reply.message["content"] == "abcd"
    assert engine.requests[0]["stream"] is True


async def test_without_a_sink_nothing_is_streamed(directory, renderer):
    engine = FakeEngine(says(renderer, "abcd"))
    async with serving(engine, directory=directory) as policy:
        await open_session(policy).chat([USER])
    assert engine.requests[0]["stream"] is False


async def test_past_the_budget_nothing_is_streamed(directory, renderer):
    engine = FakeEngine(says(renderer, "abcd"))
    async with serving(engine, directory=directory) as policy:
        heard = Heard()
        reply = await open_session(policy, turns=0).chat([USER], on_delta=heard.append)
    assert (reply.finish_reason, list(heard), engine.requests) == ("length", [], [])


@settings(max_examples=30, deadline=None)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.lists(st.integers(0, 40), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_wherever_streams_are_cut_text_and_tokens_are_those_of_one_reply(
    directory, renderer, text, cuts, stop, incremental
):
    """Invariant 2: tokens are exact."""

    async def converse():
        ids = [*renderer.encode(text), *([2] if stop else [])]
        engine = FakeEngine(going_on(renderer, ids))
        engine.incremental = incremental
        engine.cut(*cuts)
        async with serving(engine, directory=directory, limits=FAST) as policy:
            session, heard = open_session(policy), Heard()
            reply = await session.chat([USER], on_delta=heard.append)
            (leaf,) = session.leaves()
        start = len(renderer.first([USER]))
        assert leaf.token_ids[start:].tolist() == ids
        assert leaf.mask.sum() == len(ids)
        assert (leaf.logprobs[start:] < 0).all()
        assert heard.text == reply.message["content"] == renderer.parse(ids)["content"]
        assert [row[1] for row in leaf.spans.tolist()][-1:] == [start + len(ids)][: len(ids)]
        for before, after in zip(engine.requests, engine.requests[1:], strict=False):
            assert after["input_ids"][: len(before["input_ids"])] == before["input_ids"]

    asyncio.run(converse())


async def test_a_stream_that_breaks_the_protocol_after_its_first_token_goes_on(directory, renderer):
    ids = [*renderer.encode("abcd"), 2]
    rest = going_on(renderer, ids)
    engine = FakeEngine(lambda prompt, params: rest(prompt, params)[: 5 if len(engine.requests) > 1 else 2])
    engine.mangle = lambda answer: answer if len(engine.requests) > 1 else {"meta_info": None}
    async with serving(engine, directory=directory, limits=FAST) as policy:
        session, heard = open_session(policy), Heard()
        reply = await session.chat([USER], on_delta=heard.append)
        (leaf,) = session.leaves()
    assert (heard.text, reply.finish_reason, session.stats.retries) == ("abcd", "stop", 1)
    assert leaf.token_ids[len(renderer.first([USER])) :].tolist() == ids


async def test_half_a_character_comes_only_when_nothing_completes_it(directory, renderer):
    ids = renderer.encode("a \U0001f980")[:-1]
    engine = FakeEngine(lambda prompt, params: ids)
    async with serving(engine, directory=directory) as policy:
        heard = Heard()
        reply = await open_session(policy).chat([USER], on_delta=heard.append)
    assert heard.text == reply.message["content"] == renderer.parse(ids)["content"]
    assert "\ufffd" not in "".join(delta.text for delta in heard[:-1])
    assert heard[-1].text.endswith("\ufffd")


@pytest.mark.parametrize("stop", [True, False])
async def test_a_stream_cut_behind_its_last_token_is_whole(directory, renderer, stop):
    ids = [*renderer.encode("ab"), *([2] if stop else [5])]
    engine = FakeEngine(lambda prompt, params: ids)
    engine.cut(3)
    async with serving(engine, directory=directory, limits=FAST) as policy:
        reply = await open_session(policy, reply_tokens=3).chat([USER], on_delta=lambda delta: None)
    assert reply.finish_reason == ("stop" if stop else "length")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_weight_update_in_a_stream_is_seen_token_by_token(directory, renderer, tmp_path, mode):
    store = WeightStore(tmp_path / "weights")
    store.commit(path := store.new(2), 2)
    ids = [*renderer.encode("abcd"), 2]
    engine = FakeEngine(going_on(renderer, ids))
    engine.hold(after=2)
    async with serving(engine, directory=directory, pause_mode=mode) as policy:
        session, heard = open_session(policy, clock=AgentClock(60.0)), Heard()
        call = asyncio.ensure_future(session.chat([USER], on_delta=heard.append))
        await asyncio.wait_for(heard.reached("ab"), 5)
        assert await policy.update_weights(path, 2) == {}
        await engine.release()
        await call
        (leaf,) = session.leaves()
    start = len(renderer.first([USER]))
    assert heard.text == "abcd"
    assert leaf.token_ids[start:].tolist() == ids
    assert leaf.spans.tolist() == [[start, start + 2, 1, 1], [start + 2, start + 5, 2, 2]]


async def test_a_clock_that_runs_out_in_a_stream_ends_it_and_commits_nothing(directory, renderer):
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory) as policy:
        session, heard = open_session(policy, clock=AgentClock(0.05)), Heard()
        with pytest.raises(BudgetExceeded):
            await session.chat([USER], on_delta=heard.append)
        assert engine.running == 0
        assert not session.leaves()
    assert heard.text == "ab"


async def test_the_clock_runs_on_through_the_tries_of_a_stream(directory, renderer):
    now = [0.0]
    ids = [*renderer.encode("abcd"), 2]
    rest = going_on(renderer, ids)

    def reply(prompt, params):
        engine.hold(after=2)
        return rest(prompt, params)

    engine = FakeEngine(reply)
    engine.cut(2)
    async with serving(engine, directory=directory, limits=FAST, now=lambda: now[0]) as policy:
        clock, heard = AgentClock(60.0), Heard()
        session = open_session(policy, clock=clock)
        call = asyncio.ensure_future(session.chat([USER], on_delta=heard.append))
        await asyncio.wait_for(heard.reached("ab"), 5)
        now[0] += 3
        await engine.release()
        await asyncio.wait_for(heard.reached("abcd"), 5)
        assert clock.remaining == 57
        now[0] += 4
        await engine.release()
        await call
    assert clock.used["tokens"] == session.stats.token_seconds == 7


async def test_tokens_whose_probabilities_are_lost_are_not_generated_anew(directory, renderer):
    """The engine streams two tokens and answers neither the abort nor anything else."""
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    engine.answers_aborts = False
    async with serving(engine, directory=directory, limits=FAST) as policy:
        session = open_session(policy, clock=AgentClock(0.05))
        with pytest.raises(EngineError, match="did not end an aborted request"):
            await session.chat([USER], on_delta=lambda delta: None)
        assert len(engine.requests) == 1
        assert not session.leaves()


async def test_a_cancelled_stream_is_aborted_at_the_engine(directory, renderer):
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory) as policy:
        session, heard = open_session(policy), Heard()
        call = asyncio.ensure_future(session.chat([USER], on_delta=heard.append))
        await asyncio.wait_for(heard.reached("ab"), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.until(lambda: engine.running == 0)
        assert not session.leaves()
        assert session.turns_left == 20
