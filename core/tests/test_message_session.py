"""Sessions over messages: budgets by the endpoint's count, retries off the agent's clock, cancellation."""

import asyncio
import logging

import pytest

from rollhook.budgets import AgentClock
from rollhook.component import Config
from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import (
    BusyError,
    Completion,
    ContextFullError,
    MessageEngine,
    RequestLimits,
    Usage,
)
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.messages import message
from rollhook.session import (
    MessagePolicy,
    SessionClosedError,
    SessionError,
    SessionExistsError,
    TurnConflictError,
)
from rollhook.testing.contract import failing_cases
from rollhook.testing.message_engine import MessageEngineContract

USER = message("user", "go")
NEXT = message("user", "exit code 0")


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Scripted(MessageEngine):
    """Gives its answers in turn: a completion, an exception, or seconds that pass before the next."""

    def __init__(self, *answers, time=None, limits=None, held=False):
        super().__init__(Config(), None)
        self.answers, self.time, self.requests = list(answers), time, []
        self.running = self.peak = self.ended = 0
        self._limits = limits or RequestLimits()
        self.go = asyncio.Event()
        if not held:
            self.go.set()

    @property
    def limits(self):
        return self._limits

    async def start(self):
        pass

    async def stop(self):
        pass

    async def complete(self, request):
        self.requests.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self.go.wait()
            answer = self.answers.pop(0) if self.answers else said("hello")
            if isinstance(answer, float):
                self.time.now += answer
                answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running -= 1
            self.ended += 1


def said(text, prompt=10, completion=5, reason="stop", **more):
    usage = None if prompt is None else Usage(prompt, completion)
    return Completion({"role": "assistant", "content": text, **more}, reason, usage)


def opened(engine, *, time=None, **keys):
    time = time or Time()
    policy = MessagePolicy(engine, now=time, sleep=time.sleep)
    keys = {"max_seq_len": 1000, "reply_tokens": 100, "turns": 5} | keys
    return policy, policy.open("s", **keys)


async def test_turns_are_counted_as_the_endpoint_counts_them():
    engine = Scripted(said("ls", 20, 3), said("done", 40, 4))
    _, session = opened(engine)
    assert (session.turns_left, session.tokens_left) == (5, 1000)
    first = await session.chat([USER])
    assert first.message == {"role": "assistant", "content": "ls"}
    assert (first.prompt_tokens, first.completion_tokens, first.tokens_left) == (20, 3, 977)
    second = await session.chat([USER, first.message, NEXT])
    assert second.tokens_left == session.tokens_left == 956
    assert session.turns_left == 3
    assert [each["content"] for each in session.messages] == ["go", "ls", "exit code 0", "done"]
    stats = session.stats
    assert (stats.turns, stats.prompt_tokens, stats.completion_tokens) == (2, 20 + 17, 7)
    assert session.leaves() == []
    assert session.versions is None


async def test_no_more_of_a_prompt_was_cached_than_it_has():
    engine = Scripted(Completion({"role": "assistant", "content": "a"}, "stop", Usage(10, 5, 99)))
    _, session = opened(engine)
    assert (await session.chat([USER])).cached_tokens == session.stats.cached_tokens == 10


async def test_the_request_has_what_the_session_was_opened_with():
    engine = Scripted()
    _, session = opened(engine, sampling=SamplingParams(0.5, 0.9), seed=7)
    tools = [{"type": "function", "function": {"name": "look"}}]
    reply = await session.chat([USER], tools=tools)
    await session.chat([USER, reply.message, NEXT], max_tokens=9)
    one, two = engine.requests
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.max_new_tokens) == (0.5, 0.9, 100)
    assert list(one.tools) == tools
    assert two.sampling.max_new_tokens == 9
    assert one.sampling.seed != two.sampling.seed
    again = Scripted()
    await opened(again, seed=7)[1].chat([USER])
    assert again.requests[0].sampling.seed == one.sampling.seed


async def test_the_last_turn_and_the_last_token_end_in_a_clean_length():
    engine = Scripted(said("a", 900, 100))
    _, session = opened(engine, turns=2)
    first = await session.chat([USER])
    assert first.tokens_left == 0
    full = await session.chat([USER, first.message, NEXT])
    assert (full.finish_reason, full.completion_tokens, full.message["content"]) == ("length", 0, "")
    _, short = opened(Scripted(said("a")), turns=1)
    first = await short.chat([USER])
    assert (await short.chat([USER, first.message, NEXT])).finish_reason == "length"
    assert len(engine.requests) == 1


async def test_a_reply_is_asked_to_fit_into_what_is_left():
    engine = Scripted(said("a", 930, 10))
    _, session = opened(engine)
    first = await session.chat([USER])
    await session.chat([USER, first.message, message("user", "x" * 100)])
    assert 1 < engine.requests[1].sampling.max_new_tokens < 60 - 100 // 4


async def test_the_model_s_context_bounds_the_session():
    engine = Scripted(said("a", 50, 10))
    engine.context_length = 60
    _, session = opened(engine)
    assert (await session.chat([USER])).tokens_left == 0


async def test_a_conversation_that_outgrew_the_context_ends_in_length_and_one_that_never_fitted_is_an_error():
    full = ContextFullError("context length exceeded")
    _, session = opened(Scripted(said("a"), full))
    first = await session.chat([USER])
    reply = await session.chat([USER, first.message, NEXT])
    assert (reply.finish_reason, reply.completion_tokens, reply.tokens_left) == ("length", 0, 0)
    assert session.stats.turns == 1
    _, other = opened(Scripted(full))
    with pytest.raises(ContextFullError):
        await other.chat([USER])


async def test_without_usage_tokens_are_estimated_and_the_reader_is_told(caplog):
    _, session = opened(Scripted(said("word " * 40, None), said("b", None)))
    assert not session.stats.estimated
    with caplog.at_level(logging.WARNING):
        first = await session.chat([message("user", "x" * 400)])
        await session.chat([message("user", "x" * 400), first.message, NEXT])
    assert 100 <= first.prompt_tokens < 130
    assert 50 <= first.completion_tokens < 75
    assert session.tokens_left < 1000 - 150
    assert caplog.text.count("reports no usage") == 1
    assert session.stats.estimated


async def test_a_cut_reply_is_length_and_is_not_extended():
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]
    _, session = opened(Scripted(said("", reason="length", tool_calls=calls)))
    reply = await session.chat([USER])
    assert reply.finish_reason == "length"
    with pytest.raises(TurnConflictError):
        await session.chat([USER, reply.message, NEXT])


async def test_tool_calls_are_told_and_their_results_extend_the_turn():
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    engine = Scripted(said("", 10, 5, tool_calls=calls), said("fine", 20, 2))
    _, session = opened(engine)
    reply = await session.chat([USER], tools=[{"type": "function", "function": {"name": "f"}}])
    assert reply.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    await session.chat([USER, reply.message, result])
    assert session.stats.prompt_tokens == 15
    assert engine.requests[1].messages[1]["tool_calls"] == calls


async def test_branches_start_from_what_they_extend():
    engine = Scripted(said("a", 10, 5), said("b", 30, 5), said("c", 40, 5))
    _, session = opened(engine)
    first = await session.chat([USER])
    await session.chat([USER, first.message, NEXT])
    await session.chat([USER, first.message, USER])
    assert session.stats.prompt_tokens == 10 + 15 + 25


async def test_what_makes_no_sense_is_refused_and_an_id_is_open_once():
    policy, session = opened(Scripted(said("a")))
    for wrong in ([], [{"role": "boss", "content": "go"}], [USER, message("assistant", "a")]):
        with pytest.raises(SessionError):
            await session.chat(wrong)
    with pytest.raises(SessionExistsError):
        policy.open("s", max_seq_len=1, reply_tokens=1, turns=1)
    await policy.close()
    await policy.close()
    assert not policy.sessions
    with pytest.raises(SessionClosedError):
        await session.chat([USER])


async def test_only_the_answered_request_runs_on_the_agents_clock():
    time = Time()
    engine = Scripted(
        7.0, BusyError("no", retry_after=20.0), 3.0, EngineError("bad"), 2.0, said("a"), time=time
    )
    clock = AgentClock(10.0)
    _, session = opened(engine, time=time, clock=clock)
    await session.chat([USER])
    assert clock.used["tokens"] == 2.0
    assert time.slept[0] >= 20.0
    assert len(engine.requests) == 3
    stats = session.stats
    assert (stats.retries, stats.token_seconds) == (2, 2.0)
    assert stats.wait_seconds == pytest.approx(time.now - 2.0)


async def test_pauses_grow_and_are_jittered():
    time = Time()
    engine = Scripted(*[BusyError("no")] * 5, said("a"), time=time)
    _, session = opened(engine, time=time)
    await session.chat([USER])
    for number, pause in enumerate(time.slept):
        assert 2**number / 2 <= pause <= 1.5 * 2**number
    assert len(set(time.slept)) == 5


async def test_tries_and_waiting_end():
    time = Time()
    engine = Scripted(*[BusyError("busy now")] * 3, limits=RequestLimits(max_retries=2))
    _, session = opened(engine, time=time)
    with pytest.raises(EngineError, match=r"after 3 tries.*busy now") as caught:
        await session.chat([USER])
    assert caught.value.kind == "infrastructure"
    assert session.turns_left == 5
    engine = Scripted(BusyError("later", retry_after=3600.0))
    _, session = opened(engine)
    with pytest.raises(EngineError, match="asks to wait 3600 s: later"):
        await session.chat([USER])


async def test_what_is_refused_is_not_asked_again():
    engine = Scripted(EngineError("no such model", kind="user"))
    _, session = opened(engine)
    with pytest.raises(EngineError, match="no such model"):
        await session.chat([USER])
    assert len(engine.requests) == 1


async def test_a_clock_that_runs_out_during_a_reply_gives_it_up():
    engine = Scripted(held=True)
    policy = MessagePolicy(engine)
    clock = AgentClock(0.02)
    session = policy.open("s", max_seq_len=1000, reply_tokens=10, turns=3, clock=clock)
    with pytest.raises(BudgetExceeded) as caught:
        await session.chat([USER])
    assert caught.value.node == "agent"
    assert (engine.running, engine.ended) == (0, 1)
    assert clock.remaining == 0
    with pytest.raises(BudgetExceeded):
        await session.chat([USER])
    assert len(engine.requests) == 1


async def test_requests_at_once_are_bounded_and_a_place_is_free_again_after_any_end():
    engine = Scripted(held=True, limits=RequestLimits(max_concurrent=2))
    policy = MessagePolicy(engine)
    sessions = [policy.open(f"s{n}", max_seq_len=100, reply_tokens=10, turns=3) for n in range(6)]
    chats = [asyncio.ensure_future(session.chat([USER])) for session in sessions]
    while engine.running < 2:
        await asyncio.sleep(0)
    chats[0].cancel()
    chats[5].cancel()
    engine.go.set()
    done = await asyncio.gather(*chats, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in done] == [True, *[False] * 4, True]
    assert engine.peak == 2
    assert sessions[0].stats.turns == 0


async def test_closing_ends_what_is_under_way():
    engine = Scripted(held=True)
    policy, session = opened(engine)
    chat = asyncio.ensure_future(session.chat([USER]))
    while not engine.running:
        await asyncio.sleep(0)
    await session.close()
    with pytest.raises(SessionClosedError):
        await chat
    assert engine.running == 0
    assert not policy.sessions


class Absent(Scripted):
    async def start(self):
        raise EngineError("there is no server")


class TestScripted(MessageEngineContract):
    @pytest.fixture
    def engine(self):
        return Scripted()

    @pytest.fixture
    def absent(self):
        return Absent()


class Talkative(Scripted):
    async def complete(self, request):
        return said("word", 10, 10_000)


class Deaf(Scripted):
    async def complete(self, request):
        while True:
            try:
                await asyncio.sleep(0.01)
                return said("late")
            except asyncio.CancelledError:
                pass


@pytest.mark.parametrize(
    ("engine", "absent", "cases"),
    [
        (Scripted, Absent, set()),
        (Talkative, Absent, {"test_a_conversation_is_answered"}),
        (Deaf, Absent, {"test_a_cancelled_request_ends_and_the_engine_answers_on"}),
        (Scripted, Scripted, {"test_a_start_without_a_server_fails_in_words"}),
    ],
)
def test_the_contract_finds_what_is_broken(engine, absent, cases):
    fixtures = {"engine": engine, "absent": absent}
    assert failing_cases(MessageEngineContract, fixtures) == cases


async def test_the_tokens_of_a_prompt_are_estimated_beyond_what_was_counted():
    _, session = opened(Scripted(said("ls", 20, 3)))
    fresh = await session.count_tokens([USER])
    reply = await session.chat([USER])
    assert fresh > 0
    assert await session.count_tokens([USER, reply.message, NEXT]) > 23
    assert session.stats.turns == 1
    await session.close()
    with pytest.raises(SessionError):
        await session.count_tokens([USER])
