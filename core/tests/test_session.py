"""Sessions over a fake engine: exact tokens, budgets before generation, races, clocks and failing workers."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.budgets import AgentClock
from rollhook.component import Config
from rollhook.engine.base import SamplingParams
from rollhook.engine.weights import WeightStore
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.router import RouterPolicy
from rollhook.session import (
    Limits,
    Renderer,
    SessionClosedError,
    SessionError,
    SessionExistsError,
    TurnConflictError,
)
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

USER = {"role": "user", "content": "go"}
NEXT = {"role": "user", "content": "exit code 0\n"}
FAST = Limits(backoff=0.001, no_worker=0.05, abort=0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def renderer(directory):
    return Renderer(directory)


def open_session(policy, name="s", **keys):
    return policy.open(name, **({"max_seq_len": 5000, "reply_tokens": 100, "turns": 20} | keys))


async def test_two_turns_give_one_leaf_with_the_ids_as_emitted(directory, renderer):
    engine = FakeEngine(says(renderer, "one", "two"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        first = await session.chat([USER])
        assert first.message == {"role": "assistant", "content": "one"}
        second = await session.chat([USER, first.message, NEXT])
        assert second.message["content"] == "two"
        (leaf,) = session.leaves()
    prompt = renderer.first([USER])
    reply = [*renderer.encode("one"), 2]
    more = renderer.increment([NEXT], last_token=2)
    assert engine.requests[1]["input_ids"] == prompt + reply + more
    assert leaf.token_ids.tolist() == prompt + reply + more + [*renderer.encode("two"), 2]
    assert leaf.mask.sum() == 8
    assert leaf.logprobs[len(prompt)] == pytest.approx(-1 / 128)
    assert leaf.spans[:, 2:].tolist() == [[1, 1], [1, 1]]
    assert session.stats.turns == 2
    assert session.stats.prompt_tokens + session.stats.completion_tokens == len(leaf.token_ids)


async def test_text_is_never_tokenised_again(tmp_path):
    renderer = Renderer(write_tokenizer(tmp_path, corpus=["ab ab ab"]))
    odd = [*renderer.encode("a"), *renderer.encode("b"), 2]
    assert renderer.encode("ab") != odd[:2]
    engine = FakeEngine(lambda ids, params: odd)
    async with serving(engine, directory=tmp_path) as policy:
        session = open_session(policy)
        first = await session.chat([USER])
        await session.chat([USER, first.message, NEXT])
    assert first.message["content"] == "ab"
    prompt = renderer.first([USER])
    assert engine.requests[1]["input_ids"][len(prompt) : len(prompt) + 3] == odd


async def test_what_the_engine_is_asked_is_what_sglang_takes(directory, renderer):
    engine = FakeEngine(says(renderer, "x"), dp_size=2)
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, sampling=SamplingParams(0.7, 0.9, 50), seed=5)
        await session.chat([USER])
    (body,) = engine.requests
    seed = body["sampling_params"].pop("sampling_seed")
    assert isinstance(seed, int)
    assert body.pop("rid").startswith("s-")
    assert body == {
        "input_ids": renderer.first([USER]),
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 50,
            "max_new_tokens": 100,
            "stop_token_ids": [2],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "stream": False,
        "data_parallel_rank": 0,
        "extra_key": "weight-version:1",
    }


async def test_turns_of_a_session_draw_from_different_seeds_and_a_rerun_from_the_same(directory, renderer):
    seeds = []
    for _ in range(2):
        engine = FakeEngine(says(renderer, "x"))
        async with serving(engine, directory=directory) as policy:
            session = open_session(policy, seed=5)
            await session.chat([USER])
            await session.chat([USER])
        seeds.append([body["sampling_params"]["sampling_seed"] for body in engine.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


# -- budgets


@pytest.mark.parametrize(("spare", "asked"), [(1, 1), (5, 5), (100, 100), (500, 100)])
async def test_a_reply_gets_what_the_budget_leaves(directory, renderer, spare, asked):
    prompt = len(renderer.first([USER]))
    engine = FakeEngine(lambda ids, params: [5] * 1000)
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, max_seq_len=prompt + spare)
        reply = await session.chat([USER])
        (leaf,) = session.leaves()
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == asked
    assert reply.finish_reason == "length"
    assert reply.completion_tokens == asked
    assert len(leaf.token_ids) <= prompt + spare
    assert reply.tokens_left == spare - asked


@pytest.mark.parametrize("short", [0, 1, 7])
async def test_without_room_nothing_is_generated(directory, renderer, short):
    engine = FakeEngine()
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, max_seq_len=len(renderer.first([USER])) - short)
        reply = await session.chat([USER])
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 0)
    assert not engine.requests
    assert not session.leaves()


async def test_more_messages_than_tokens_are_past_the_budget_before_they_are_looked_at(directory, renderer):
    async with serving(FakeEngine(), directory=directory) as policy:
        session = open_session(policy, max_seq_len=99)
        reply = await session.chat([USER] * 99 + [None])
        assert (reply.finish_reason, reply.completion_tokens, reply.tokens_left) == ("length", 0, 0)
        assert not session.leaves()


async def test_the_models_context_bounds_a_session(directory, renderer):
    prompt = len(renderer.first([USER]))
    engine = FakeEngine(lambda ids, params: [5] * 1000)
    async with serving(engine, directory=directory, context_length=prompt + 3) as policy:
        assert (await open_session(policy).chat([USER])).completion_tokens == 3


LONG = "x" * 40_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}


@pytest.mark.parametrize(
    ("messages", "tools", "elsewhere"),
    [
        ([USER], None, False),
        ([{**USER, "content": LONG}], None, True),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, USER], None, True),
        ([{**USER, "content": ""}] * 2000, None, True),
        ([USER], [{"type": "function", "function": {"name": "f", "description": LONG}}], True),
    ],
    ids=["short", "content", "arguments", "many messages", "tools"],
)
async def test_what_is_long_is_not_rendered_on_the_loop(
    directory, renderer, monkeypatch, messages, tools, elsewhere
):
    first, threads = Renderer.first, []
    async with serving(FakeEngine(says(renderer, "hi")), directory=directory) as policy:
        record = lambda self, *given: threads.append(threading.current_thread()) or first(self, *given)  # noqa: E731
        monkeypatch.setattr(Renderer, "first", record)
        session = policy.open("s", max_seq_len=100_000, reply_tokens=10, turns=1)
        await session.chat(messages, tools=tools)
    assert [thread is not threading.main_thread() for thread in threads] == [elsewhere]


async def test_no_turn_is_generated_beyond_the_limit(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, turns=1)
        first = await session.chat([USER])
        assert session.turns_left == 0
        reply = await session.chat([USER, first.message, NEXT])
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 0)
    assert len(engine.requests) == 1


async def test_concurrent_calls_share_the_limit_of_turns(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, turns=2)
        replies = await asyncio.gather(*(session.chat([USER]) for _ in range(4)))
    assert sorted(r.finish_reason for r in replies) == ["length", "length", "stop", "stop"]
    assert len(engine.requests) == 2


# -- the tree, through chat


async def test_a_retry_takes_the_place_of_the_reply_before_it(directory, renderer):
    engine = FakeEngine(says(renderer, "a", "b", "cc"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        first = await session.chat([USER])
        await session.chat([USER, first.message, NEXT])
        await session.chat([USER, first.message, NEXT])
        (leaf,) = session.leaves()
    assert leaf.messages[-1]["content"] == "cc"
    assert leaf.mask.sum() == 2 + 3


async def test_a_retry_that_fails_keeps_the_reply_before_it(directory, renderer):
    engine = FakeEngine(says(renderer, "a", "b"))
    async with serving(engine, directory=directory, limits=Limits(attempts=1)) as policy:
        session = open_session(policy)
        first = await session.chat([USER])
        await session.chat([USER, first.message, NEXT])
        engine.fail("/generate")
        with pytest.raises(EngineError):
            await session.chat([USER, first.message, NEXT])
        (leaf,) = session.leaves()
    assert leaf.messages[-1]["content"] == "b"


async def test_concurrent_calls_on_one_prefix_become_siblings(directory, renderer):
    engine = FakeEngine(says(renderer, "a", "b"))
    engine.hold()
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        calls = [asyncio.ensure_future(session.chat([USER])) for _ in range(2)]
        await engine.until(lambda: engine.running == 2)
        await engine.release()
        replies = await asyncio.gather(*calls)
        assert {r.message["content"] for r in replies} == {"a", "b"}
        assert len(session.leaves()) == 2


async def test_a_turn_cut_for_length_after_a_call_is_cut_for_length(directory, renderer):
    text = '<tool_call>{"name": "look"}</tool_call>'
    engine = FakeEngine(says(renderer, text, stop=False))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, reply_tokens=len(renderer.encode(text)))
        tools = [{"type": "function", "function": {"name": "look"}}]
        reply = await session.chat([USER], tools=tools)
    assert (reply.finish_reason, len(reply.message["tool_calls"])) == ("length", 1)


async def test_a_turn_cut_for_length_cannot_be_extended(directory, renderer):
    engine = FakeEngine(lambda ids, params: [5] * 1000)
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy, reply_tokens=3)
        first = await session.chat([USER])
        with pytest.raises(TurnConflictError, match="cut for length"):
            await session.chat([USER, first.message, NEXT])
        assert TurnConflictError.status == 409


async def test_an_altered_history_is_a_new_branch(directory, renderer):
    engine = FakeEngine(says(renderer, "a", "b"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        await session.chat([USER])
        await session.chat([{"role": "user", "content": "summary"}])
        assert len(session.leaves()) == 2


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "nothing was appended"),
        ([{"role": "assistant", "content": "a"}], "last message is the assistant's"),
        ([{"role": "boss", "content": "a"}], "role 'boss' is unknown"),
        ([{"content": "a"}], "role None is unknown"),
        ([{"role": "user", "content": 3}], "must be text"),
        ([{"role": "user", "content": "a", "tool_calls": "x"}], "tool_calls"),
        (["hello"], "an object with role and content"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_in_words(directory, messages, told):
    async with serving(FakeEngine(), directory=directory) as policy:
        with pytest.raises(SessionError, match=told):
            await open_session(policy).chat(messages)


async def test_what_is_no_text_commits_nothing(directory):
    engine = FakeEngine()
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        with pytest.raises(SessionError, match="must be JSON"):
            await session.chat([{"role": "user", "content": "\ud800"}])
        assert session.turns_left == 20
        assert not engine.requests


async def test_changing_a_message_afterwards_changes_nothing(directory, renderer):
    engine = FakeEngine(says(renderer, "a", "b"))
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        mine = dict(USER)
        first = await session.chat([mine])
        mine["content"] = "changed"
        first.message["content"] = "changed"
        await session.chat([USER, {"role": "assistant", "content": "a"}, NEXT])
        assert len(session.leaves()) == 1


# -- races


async def test_chat_after_close_is_refused(directory, renderer):
    async with serving(FakeEngine(says(renderer, "x")), directory=directory) as policy:
        session = open_session(policy)
        await session.close()
        await session.close()
        with pytest.raises(SessionClosedError):
            await session.chat([USER])
        assert not policy.sessions


async def test_closing_during_a_reply_aborts_it_and_commits_nothing(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    engine.hold()
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        await session.close()
        with pytest.raises(SessionClosedError, match="during the reply"):
            await call
        await engine.until(lambda: engine.running == 0)
        assert not session.leaves()
        assert [e.open_sessions for e in policy.table] == [0]
        assert [e.tokens_in_flight for e in policy.table] == [0]


async def test_a_policy_that_fails_when_a_session_ends_keeps_nothing_under_way(directory, renderer):
    class Broken(RouterPolicy):
        def closed(self, session_id):
            raise RuntimeError("the policy is broken")

    engine = FakeEngine(says(renderer, "hi"))
    policies = [Broken(Config(), build_context(directory))]
    async with serving(engine, directory=directory, policies=policies) as policy:
        session = open_session(policy)
        engine.hold()
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        with pytest.raises(RuntimeError, match="the policy is broken"):
            await session.close()
        with pytest.raises(SessionClosedError):
            await call
        await engine.until(lambda: engine.running == 0)
        assert [entry.open_sessions for entry in policy.table] == [0]


async def test_a_cancelled_call_is_aborted_at_the_engine(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    engine.hold()
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.until(lambda: engine.running == 0)
        assert ("abort_request", {"rid": engine.requests[0]["rid"]}) in engine.control
        assert session.turns_left == 20


async def test_an_id_is_open_once(directory):
    async with serving(FakeEngine(), directory=directory) as policy:
        session = open_session(policy)
        with pytest.raises(SessionExistsError):
            open_session(policy)
        await session.close()
        open_session(policy)


# -- the agent's clock


async def test_token_time_is_charged_without_the_engines_queue(directory, renderer):
    engine = FakeEngine(says(renderer, "x"), queue_seconds=1000.0)
    async with serving(engine, directory=directory) as policy:
        clock = AgentClock(60.0)
        session = open_session(policy, clock=clock)
        await session.chat([USER])
        assert clock.used["tokens"] == 0.0
        assert session.stats.wait_seconds > 0


async def test_a_clock_that_runs_out_aborts_the_request(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    engine.hold()
    async with serving(engine, directory=directory) as policy:
        clock = AgentClock(0.05)
        session = open_session(policy, clock=clock)
        with pytest.raises(BudgetExceeded) as caught:
            await session.chat([USER])
        assert caught.value.node == "agent"
        assert clock.fired == "agent"
        assert engine.running == 0
        assert not session.leaves()
        with pytest.raises(BudgetExceeded):
            await session.chat([USER])
        assert len(engine.requests) == 1


async def test_time_in_the_engines_queue_does_not_end_the_agent(directory, renderer):
    """The request is aborted while it may have queued; told that it did, the turn is asked again."""
    engine = FakeEngine(says(renderer, "x"), queue_seconds=1000.0)
    engine.hold()
    async with serving(engine, directory=directory) as policy:
        clock = AgentClock(0.05)
        session = open_session(policy, clock=clock)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: len(engine.requests) == 2)
        await engine.release()
        assert (await call).message["content"] == "x"
        assert clock.used["tokens"] == 0.0


async def test_an_engine_that_does_not_even_abort_is_at_fault(directory, renderer):
    engines = [FakeEngine(says(renderer, "x")), FakeEngine(says(renderer, "y"))]
    async with serving(*engines, directory=directory, limits=FAST) as policy:
        clock = AgentClock(0.05)
        session = open_session(policy, clock=clock)
        hung = next(engine for engine in engines if engine.worker == session.route.worker)
        hung.hold()
        hung.answers_aborts = hung.healthy = False
        reply = await session.chat([USER])
        assert reply.message["content"] == ("y" if hung is engines[0] else "x")
        assert clock.used["tokens"] < 0.05
        assert [e.worker for e in policy.table if not e.healthy] == [hung.worker]


async def test_waiting_for_a_weight_update_is_not_the_agents_time(directory, renderer):
    now = [0.0]
    engine = FakeEngine(says(renderer, "x"))
    engine.hold()
    async with serving(engine, directory=directory, now=lambda: now[0]) as policy:
        clock = AgentClock(60.0)
        session = open_session(policy, clock=clock)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        now[0] += 2
        policy.pause()
        now[0] += 1000
        policy.resume()
        now[0] += 3
        await engine.release()
        await call
        assert clock.used["tokens"] == pytest.approx(5.0)
        assert session.stats.wait_seconds == pytest.approx(1000.0)


async def test_requests_wait_while_the_policy_is_paused(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    async with serving(engine, directory=directory) as policy:
        policy.pause()
        session = open_session(policy, clock=AgentClock(60.0))
        call = asyncio.ensure_future(session.chat([USER]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not engine.requests
        policy.resume()
        await call
        assert len(engine.requests) == 1


async def test_a_pause_that_never_ends_is_an_engine_error(directory):
    async with serving(FakeEngine(), directory=directory, limits=Limits(pause=0.01)) as policy:
        policy.pause()
        with pytest.raises(EngineError, match="did not finish"):
            await open_session(policy).chat([USER])


# -- weight versions


@pytest.fixture
def weights(tmp_path):
    store = WeightStore(tmp_path / "weights")
    store.commit(path := store.new(2), 2)
    return path


async def test_an_update_in_the_middle_of_a_reply_is_seen_token_by_token(directory, renderer, weights):
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        assert await policy.update_weights(weights, 2) == {}
        await engine.release()
        await call
        (leaf,) = session.leaves()
    start = len(renderer.first([USER]))
    assert leaf.spans.tolist() == [[start, start + 2, 1, 1], [start + 2, start + 5, 2, 2]]
    assert session.versions == (1, 2)
    names = [name for name, _ in engine.control]
    assert names == ["pause_generation", "update_weights_from_disk", "continue_generation"]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_no_prompt_meets_the_cache_of_older_weights(directory, renderer, weights, mode):
    engine = FakeEngine(says(renderer, "ab"), prefix_cache=True)
    async with serving(engine, directory=directory, pause_mode=mode) as policy:
        session = open_session(policy)
        first = await session.chat([USER])
        second = await session.chat([USER, first.message, NEXT])
        assert second.cached_tokens > 0
        await policy.update_weights(weights, 2)
        third = await session.chat([USER, first.message, NEXT, second.message, NEXT])
        assert third.cached_tokens == 0
        fourth = await session.chat([USER, first.message, NEXT, second.message, NEXT, third.message, NEXT])
        assert fourth.cached_tokens > second.cached_tokens


async def test_a_version_that_does_not_follow_is_refused(directory, renderer, weights):
    engine = FakeEngine(says(renderer, "ab"), version=3)
    async with serving(engine, directory=directory) as policy:
        for version in (3, 2):
            with pytest.raises(EngineError, match=f"weight version {version} does not follow 3"):
                await policy.update_weights(weights, version)
        assert engine.control == []


async def test_an_engine_that_reports_no_versions_is_bracketed(directory, renderer, weights):
    engine = FakeEngine(says(renderer, "abcd"), exact_versions=False)
    engine.hold(after=2)
    async with serving(engine, directory=directory) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        await policy.update_weights(weights, 2)
        await engine.release()
        await call
        (leaf,) = session.leaves()
        assert leaf.spans[:, 2:].tolist() == [[1, 2]]


async def test_requests_that_an_update_aborts_are_asked_again(directory, renderer, weights):
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory, pause_mode="abort") as policy:
        session = open_session(policy, clock=AgentClock(60.0))
        call = asyncio.ensure_future(session.chat([USER]))
        await engine.until(lambda: engine.running == 1)
        await policy.update_weights(weights, 2)
        await engine.release()
        assert (await call).message["content"] == "abcd"
        (leaf,) = session.leaves()
        assert leaf.spans[:, 2:].tolist() == [[2, 2]]


async def test_an_engine_without_the_new_version_gets_no_requests(directory, renderer, weights):
    good, bad = FakeEngine(says(renderer, "good")), FakeEngine(says(renderer, "bad"))
    bad.fail("/update_weights_from_disk", 200, body={"success": False, "message": "disk full"})
    async with serving(good, bad, directory=directory, limits=FAST) as policy:
        sessions = [open_session(policy, f"s{n}") for n in range(3)]
        failed = await policy.update_weights(weights, 2)
        assert "disk full" in failed[bad.worker]
        replies = await asyncio.gather(*(s.chat([USER]) for s in sessions))
        assert {r.message["content"] for r in replies} == {"good"}
        assert not bad.requests
        assert bad.control[-1][0] == "continue_generation"


# -- failing workers


class Second(RouterPolicy):
    """Prefers the last worker on offer."""

    def pick(self, request, workers):
        return workers[-1].worker


@pytest.mark.parametrize("status", [0, 500, 503, 429], ids=["dropped", "500", "503", "429"])
async def test_a_failed_turn_is_asked_again_elsewhere(directory, renderer, status):
    one, two = FakeEngine(says(renderer, "x")), FakeEngine(says(renderer, "x"))
    async with serving(one, two, directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        first = one if session.route.worker == one.worker else two
        first.fail("/generate", status)
        reply = await session.chat([USER])
        assert reply.message["content"] == "x"
        assert session.route.worker != first.worker
        assert session.stats.retries == 1
        assert [e.tokens_in_flight for e in policy.table] == [0, 0]
        assert sum(e.open_sessions for e in policy.table) == 1
        assert all(e.healthy for e in policy.table)


async def test_a_worker_that_calls_itself_ill_leaves_and_comes_back(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    async with serving(engine, directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        engine.fail("/generate")
        engine.healthy = False
        with pytest.raises(EngineError, match="none of the 1 engine workers takes requests: 1 not healthy"):
            await session.chat([USER])
        engine.healthy = True
        assert (await session.chat([USER])).message["content"] == "x"


async def test_the_last_worker_is_started_anew_once_for_all_who_wait(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    revived = []

    async def revive(worker):
        revived.append(worker)
        engine.healthy = True
        return True

    async with serving(engine, directory=directory, limits=FAST, revive=revive) as policy:
        engine.fail("/generate", times=3)
        engine.healthy = False
        sessions = [open_session(policy, name) for name in "abc"]
        replies = await asyncio.gather(*(session.chat([USER]) for session in sessions))
        assert [reply.message["content"] for reply in replies] == ["x"] * 3
        assert revived == [engine.worker]


async def test_where_the_last_worker_cannot_be_started_a_turn_fails_at_once_and_says_why(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))

    async def revive(worker):
        raise EngineError("it does not start")

    limits = Limits(backoff=0.001, no_worker=3600.0)
    async with serving(engine, directory=directory, limits=limits, revive=revive) as policy:
        engine.fail("/generate", times=9)
        engine.healthy = False
        with pytest.raises(EngineError, match="it does not start"):
            await open_session(policy).chat([USER])


async def test_a_worker_that_comes_back_with_old_weights_stays_out(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    async with serving(engine, directory=directory, limits=FAST) as policy:
        policy.set_version(2, failed={engine.worker})
        await policy.check_health()
        assert not policy.table.offered()
        engine.version = 2
        await policy.check_health()
        await policy.check_health()
        assert policy.table.offered()


async def test_weight_updates_may_abort_a_request_more_often_than_an_engine_may_fail(
    directory, renderer, tmp_path
):
    store = WeightStore(tmp_path)
    engine = FakeEngine(says(renderer, "abcd"))
    engine.hold(after=2)
    async with serving(engine, directory=directory, pause_mode="abort", limits=Limits(attempts=2)) as policy:
        session = open_session(policy)
        call = asyncio.ensure_future(session.chat([USER]))
        for version in (2, 3, 4):
            await engine.until(lambda: engine.running == 1)
            await policy.update_weights(store.new(version), version)
        await engine.release()
        assert (await call).message["content"] == "abcd"


async def test_tries_are_bounded(directory, renderer):
    engine = FakeEngine(says(renderer, "x"))
    engine.fail("/generate", 500, times=99)
    async with serving(engine, directory=directory, limits=Limits(attempts=3, backoff=0.001)) as policy:
        session = open_session(policy, clock=AgentClock(60))
        with pytest.raises(EngineError, match=r"no answer after 3 tries.*scripted failure"):
            await session.chat([USER])
        assert len(engine.requests) == 3
        assert session.turns_left == 20


async def test_a_request_that_the_engine_calls_wrong_is_not_repeated(directory):
    engine = FakeEngine()
    engine.fail("/generate", 400, body={"error": {"message": "input too long"}})
    async with serving(engine, directory=directory, limits=FAST) as policy:
        with pytest.raises(EngineError, match="400: input too long"):
            await open_session(policy).chat([USER])
        assert len(engine.requests) == 1


async def test_a_session_stays_on_its_worker_until_that_leaves(directory, renderer):
    one, two = FakeEngine(says(renderer, "x")), FakeEngine(says(renderer, "x"))
    second = [Second(None, build_context(directory))]
    async with serving(one, two, directory=directory, policies=second) as policy:
        session = open_session(policy)
        chosen = session.route.worker
        history = [USER]
        for _ in range(3):
            reply = await session.chat(history)
            history += [reply.message, NEXT]
        assert session.route.worker == chosen
        policy.fleet.set_draining(chosen)
        await session.chat(history)
        assert session.route.worker != chosen
        assert {e.worker: e.open_sessions for e in policy.table}[chosen] == 0


async def test_without_workers_a_session_opens_and_its_first_turn_says_why_not(directory):
    async with serving(directory=directory, limits=FAST) as policy:
        session = open_session(policy)
        with pytest.raises(EngineError, match="none of the 0 engine workers takes requests: there is none"):
            await session.chat([USER])


# -- any conversation

reply_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.tuples(reply_text, reply_text, st.booleans(), st.booleans()), min_size=1, max_size=6),
)
def test_a_later_prompt_starts_with_the_ids_before_it_and_masks_count_what_was_generated(
    directory, renderer, turns
):
    async def converse():
        script = [[*renderer.encode(said), *([2] if stop else [])] for said, _, stop, _ in turns]
        replies = iter(script)
        engine = FakeEngine(lambda ids, params: next(replies))
        async with serving(engine, directory=directory) as policy:
            session = open_session(policy)
            history = [USER]
            snapshots = []
            for _, answer, _, retry in turns:
                reply = await session.chat(history)
                snapshots.append(engine.requests[-1]["input_ids"] + script[len(snapshots)])
                if not retry:
                    history = [*history, reply.message, {"role": "user", "content": answer}]
            leaves = session.leaves()
            retried = [turn[3] for turn in turns]
            replaced = [
                retry and number + 1 < len(turns) and not all(retried[:number])
                for number, retry in enumerate(retried)
            ]
            kept = sum(len(ids) for ids, gone in zip(script, replaced, strict=True) if not gone)
            assert sum(int(leaf.mask.sum()) for leaf in leaves) == kept
            assert session.stats.completion_tokens == sum(map(len, script))
            snapshots = [ids for ids, gone in zip(snapshots, replaced, strict=True) if not gone]
            whole = [leaf.token_ids.tolist() for leaf in leaves]
            for ids in snapshots:
                assert any(leaf[: len(ids)] == ids for leaf in whole)

    asyncio.run(converse())
