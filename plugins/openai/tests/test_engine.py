"""The engine against a double of an endpoint in a process of its own, over real sockets."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import pytest

from rollhook.budgets import AgentClock
from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import BusyError, ContextFullError, MessageRequest
from rollhook.errors import AgentError, BudgetExceeded, EngineError, UsageError
from rollhook.messages import message
from rollhook.session import MessagePolicy
from rollhook.testing.environment import build_context
from rollhook.testing.message_engine import MessageEngineContract
from rollhook_openai import OpenAIConfig
from rollhook_openai import engine as module
from rollhook_openai.engine import OpenAIEngine

KEY = "sk-sentinel-0123456789abcdef"
USER = message("user", "please go on")
REQUEST = MessageRequest([USER], [], SamplingParams(max_new_tokens=9))


def make(url, directory, **keys):
    given = {
        "base_url": url,
        "model": "double-1",
        "api_key": "env:DOUBLE_KEY",
        "timeout_seconds": 20.0,
    } | keys
    return OpenAIEngine(OpenAIConfig(**given), build_context(directory))


@asynccontextmanager
async def connected(double, directory, **keys):
    engine = make(double.url, directory, **keys)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def serving(double, directory, *, sleep=None, **keys):
    async with connected(double, directory, **keys) as engine:
        policy = MessagePolicy(engine, sleep=sleep or (lambda seconds: asyncio.sleep(0)))
        yield policy
        await policy.close()


def opened(policy, name="s", **keys):
    return policy.open(name, **({"max_seq_len": 2000, "reply_tokens": 50, "turns": 9} | keys))


@pytest.fixture
def nowhere():
    """A URL where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{probe.getsockname()[1]}"


class TestOpenAIEngine(MessageEngineContract):
    @pytest.fixture
    def engine(self, double, tmp_path):
        return make(double.url, tmp_path)

    @pytest.fixture
    def absent(self, nowhere, tmp_path, double):
        return make(nowhere, tmp_path)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
async def test_a_reply_from_any_form_of_the_url(double, tmp_path, tail):
    engine = make(double.url + tail, tmp_path, organization="org-1", project="p-1")
    await engine.start()
    completion = await engine.complete(REQUEST)
    await engine.stop()
    assert completion.message == {"role": "assistant", "content": "hello"}
    assert (completion.usage.prompt, completion.usage.completion) == (3, 1)
    assert engine.context_length == 4096
    (request,) = double.log()["requests"]
    assert request["body"]["max_tokens"] == 9
    headers = request["headers"]
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert (headers["OpenAI-Organization"], headers["OpenAI-Project"]) == ("org-1", "p-1")


async def test_no_key_is_sent_where_none_is_named(double, tmp_path):
    engine = make(double.url, tmp_path, api_key=None)
    with pytest.raises(EngineError, match=r"answered 401: .*no key; set engine\.api_key"):
        await engine.start()
    await engine.stop()


async def test_an_unreachable_endpoint_is_one_sentence(nowhere, tmp_path, double):
    engine = make(nowhere, tmp_path)
    with pytest.raises(EngineError, match=r"cannot be reached .*; is it up") as caught:
        await engine.start()
    assert "\n" not in str(caught.value)
    await engine.stop()


async def test_a_model_that_is_absent_is_answered_with_those_that_are_there(double, tmp_path):
    names = {f"m{n:02d}": {} for n in range(12)}
    double.script(models=names)
    with pytest.raises(EngineError, match=r"no model 'double-1'; .* m00, m01, .*m09 and 2 more$"):
        async with connected(double, tmp_path):
            pass
    double.script({"status": 404, "body": {"error": {"message": "gone"}}})
    async with connected(double, tmp_path) as engine:
        double.script({"status": 404, "body": {"error": {"message": "gone"}}}, models={"other": {}})
        with pytest.raises(EngineError, match=r"has no model 'double-1'; .*: other$") as caught:
            await engine.complete(REQUEST)
    assert caught.value.kind == "user"


async def test_an_endpoint_without_a_list_is_used_as_it_is(double, tmp_path):
    double.script(models=None)
    async with connected(double, tmp_path) as engine:
        assert engine.context_length is None
        assert (await engine.complete(REQUEST)).message["content"] == "hello"
        double.script({"status": 404, "body": "nothing here"}, models=None)
        with pytest.raises(EngineError, match=r"answered 404: nothing here; is engine\.base_url right\?"):
            await engine.complete(REQUEST)


async def test_a_busy_endpoint_is_asked_again_when_it_says(double, tmp_path, caplog):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    double.script(
        {"status": 429, "headers": {"Retry-After": "7"}, "body": {"error": {"message": "slow down"}}},
        {"status": 500, "body": {}},
        {"status": 503, "raw": "<html>"},
        {"content": "at last"},
    )
    clock = AgentClock(60.0)
    async with serving(double, tmp_path, sleep=sleep) as policy:
        session = opened(policy, clock=clock)
        with caplog.at_level(logging.WARNING):
            reply = await session.chat([USER])
    assert reply.message["content"] == "at last"
    assert slept[0] >= 7
    assert len(slept) == 3
    assert "answered 429: slow down; asked again in" in caplog.text
    assert session.stats.retries == 3
    assert clock.used["tokens"] < 5


async def test_a_connection_that_breaks_off_is_asked_again(double, tmp_path):
    double.script(
        {"drop": True}, {"raw": "<html>busy</html>"}, {"message": "no message"}, {"content": "whole"}
    )
    async with serving(double, tmp_path) as policy:
        session = opened(policy)
        assert (await session.chat([USER])).message["content"] == "whole"
    assert session.stats.retries == 3


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"drop": True}, "broke off the connection"),
        ({"raw": "<html>\n oops"}, r"what is no JSON: '<html> oops'"),
        ({"raw": '{"error": {"message": "overloaded"}}'}, r"no chat completion \(KeyError.*overloaded"),
        ({"raw": '{"choices": []}'}, "no chat completion"),
        ({"message": {"content": 3}}, r"no chat completion \(TypeError: content is int"),
        ({"bytes": 64 << 20}, "more than 1 MiB"),
        ({"status": 302, "headers": {"Location": "/"}}, "is engine.base_url right"),
        (
            {"status": 400, "body": {"error": {"message": "top_k\nis unknown"}}},
            "answered 400: top_k is unknown",
        ),
        ({"status": 422, "body": {"detail": [{"loc": "x"}]}}, "answered 422"),
    ],
)
async def test_what_is_no_answer_is_one_sentence(double, tmp_path, monkeypatch, step, says):
    monkeypatch.setattr(module, "MAX_BODY", 1 << 20)
    double.script(step)
    async with connected(double, tmp_path) as engine:
        with pytest.raises(EngineError, match=says) as caught:
            await engine.complete(REQUEST)
    assert "\n" not in str(caught.value)


async def test_what_further_tries_would_not_mend_is_told_apart(double, tmp_path):
    quota = {"error": {"message": "you exceeded your quota", "code": "insufficient_quota"}}
    full = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    double.script({"status": 429, "body": quota}, {"status": 400, "body": full}, {"status": 503, "body": {}})
    async with connected(double, tmp_path) as engine:
        with pytest.raises(EngineError, match="quota") as caught:
            await engine.complete(REQUEST)
        assert caught.value.kind == "user"
        with pytest.raises(ContextFullError, match=r"set model\.context_length"):
            await engine.complete(REQUEST)
        with pytest.raises(BusyError):
            await engine.complete(REQUEST)


async def test_a_slow_endpoint_is_given_up(double, tmp_path):
    double.script({"seconds": 30})
    async with connected(double, tmp_path, timeout_seconds=0.2) as engine:
        with pytest.raises(BusyError, match=r"did not answer within 0\.2 s"):
            await engine.complete(REQUEST)


async def test_the_agents_clock_ends_a_slow_reply(double, tmp_path):
    double.script({"seconds": 30})
    async with serving(double, tmp_path) as policy:
        session = opened(policy, clock=AgentClock(0.3))
        with pytest.raises(BudgetExceeded):
            await session.chat([USER])


async def test_a_cancelled_request_leaves_the_endpoint(double, tmp_path):
    double.script({"seconds": 30})
    async with serving(double, tmp_path) as policy:
        chat = asyncio.ensure_future(opened(policy).chat([USER]))
        while not (await asyncio.to_thread(double.log))["requests"]:
            pass
        chat.cancel()
        await asyncio.wait({chat})
        while not (await asyncio.to_thread(double.log))["left"]:
            pass


async def test_requests_at_once_are_bounded(double, tmp_path):
    double.script(*[{"seconds": 0.05}] * 8)
    async with serving(double, tmp_path, max_concurrent_requests=3) as policy:
        await asyncio.gather(*(opened(policy, f"s{n}").chat([USER]) for n in range(8)))
    assert double.log()["peak"] == 3


async def test_tools_go_and_calls_come_back(double, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    double.script(
        {
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }
    )
    async with serving(double, tmp_path) as policy:
        session = opened(policy)
        reply = await session.chat([USER], tools=tools)
        assert reply.finish_reason == "tool_calls"
        assert reply.message["tool_calls"] == [call]
        result = {"role": "tool", "tool_call_id": "c1", "content": "a wall"}
        assert (await session.chat([USER, reply.message, result], tools=tools)).message["content"] == "hello"
    first, second = [request["body"] for request in double.log()["requests"]]
    assert first["tools"] == tools
    assert second["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


async def test_usage_may_be_absent(double, tmp_path):
    double.script({"usage": None, "content": "word " * 100})
    async with serving(double, tmp_path) as policy:
        session = opened(policy)
        reply = await session.chat([USER])
    assert reply.completion_tokens > 100
    assert session.stats.estimated


async def test_text_that_is_no_unicode_is_the_agents_fault(double, tmp_path):
    async with serving(double, tmp_path) as policy:
        with pytest.raises(AgentError, match="no JSON"):
            await opened(policy).chat([message("user", "\ud800")])


async def test_the_key_is_in_nothing_that_is_said(double, tmp_path, caplog, monkeypatch):
    """Invariant 5: a secret is a reference; the endpoint may repeat it, we never do."""
    monkeypatch.setenv("WRONG_KEY", KEY[::-1])
    said = []
    with caplog.at_level(logging.DEBUG):
        engine = make(double.url, tmp_path, api_key="env:WRONG_KEY")
        with pytest.raises(EngineError, match="is the key in env:WRONG_KEY right") as caught:
            await engine.start()
        await engine.stop()
        said.append(str(caught.value))
        double.script(
            {"status": 429, "body": {"error": {"message": f"{KEY} is busy"}}},
            {"status": 500, "body": {"error": {"message": "x" * 290 + KEY}}},
            {"raw": f"<html>{KEY}"},
            {"echo_key": True},
            {"status": 400, "body": {"error": {"message": f"bad {KEY}"}}},
        )
        async with serving(double, tmp_path) as policy:
            session = opened(policy)
            reply = await session.chat([USER])
            with pytest.raises(EngineError) as refused:
                await session.chat([USER, reply.message, USER])
        said += [reply.message["content"], str(refused.value), repr(engine.config), str(session.messages)]
    assert reply.message["content"] == "Bearer ***"
    text = caplog.text + "".join(said) + "".join(map(repr, [caught.value, refused.value]))
    for secret in (KEY, KEY[::-1]):
        assert secret[:14] not in text


async def test_a_key_that_no_header_may_hold_is_refused_unseen(double, tmp_path, monkeypatch):
    monkeypatch.setenv("ODD_KEY", "sentinel\r\nX: y")
    engine = make(double.url, tmp_path, api_key="env:ODD_KEY")
    with pytest.raises(UsageError, match="env:ODD_KEY") as caught:
        await engine.start()
    assert "sentinel" not in str(caught.value)


async def test_the_proxy_of_the_environment_is_used(double, tmp_path, monkeypatch, nowhere):
    monkeypatch.setenv("HTTP_PROXY", nowhere)
    monkeypatch.setenv("NO_PROXY", "elsewhere")
    engine = make(double.url, tmp_path)
    with pytest.raises(EngineError, match="cannot be reached"):
        await engine.start()
    await engine.stop()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with connected(double, tmp_path):
        pass
