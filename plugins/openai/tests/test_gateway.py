"""The engine against a real server of ours: the gateway, with its token-exact sessions, over real sockets."""

from contextlib import asynccontextmanager

import pytest

from rollhook.engine.base import SamplingParams
from rollhook.errors import EngineError
from rollhook.messages import message
from rollhook.session import MessagePolicy, Renderer
from rollhook.session.gateway import Gateway, SessionDefaults
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer
from rollhook_openai import OpenAIConfig
from rollhook_openai.engine import OpenAIEngine

TOKEN = "sentinel-of-the-gateway"
USER = message("user", "go")
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


@asynccontextmanager
async def asked(directory, *texts, stop=True, defaults=None):
    """Yield a policy over an endpoint that is a session of the gateway, that session, and the fake below."""
    fake = FakeEngine(says(Renderer(write_tokenizer(directory)), *texts, stop=stop))
    async with serving(fake, directory=directory) as tokens:
        gateway = Gateway(tokens, token=TOKEN, defaults=defaults)
        await gateway.start()
        inner = tokens.open("s1", max_seq_len=5000, reply_tokens=100, turns=3, sampling=SamplingParams(0.0))
        config = OpenAIConfig(
            base_url=f"{gateway.url}/sessions/s1", model="policy", api_key="env:GATEWAY_TOKEN"
        )
        engine = OpenAIEngine(config, build_context(directory))
        try:
            await engine.start()
            yield MessagePolicy(engine), inner, fake
        finally:
            await engine.stop()
            await gateway.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("GATEWAY_TOKEN", TOKEN)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def opened(policy):
    return policy.open("mine", max_seq_len=4000, reply_tokens=100, turns=9, sampling=SamplingParams(0.0))


async def test_both_ends_of_a_conversation_count_the_same_tokens(tmp_path):
    async with asked(tmp_path, "one", "two") as (policy, inner, fake):
        session = opened(policy)
        first = await session.chat([USER])
        assert first.message == {"role": "assistant", "content": "one"}
        second = await session.chat([USER, first.message, USER])
        assert second.message["content"] == "two"
    (leaf,) = inner.leaves()
    assert len(leaf.token_ids) == 4000 - session.tokens_left
    for name in ("turns", "prompt_tokens", "completion_tokens"):
        assert getattr(session.stats, name) == getattr(inner.stats, name)
    assert fake.requests[0]["sampling_params"]["max_new_tokens"] == 100


async def test_tools_travel_through_both_ends(tmp_path):
    async with asked(tmp_path, CALL, "seen") as (policy, inner, _):
        session = opened(policy)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        reply = await session.chat([USER], tools=tools)
        assert reply.finish_reason == "tool_calls"
        (call,) = reply.message["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": "x"}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a wall"}
        assert (await session.chat([USER, reply.message, result], tools=tools)).message["content"] == "seen"
    assert len(inner.leaves()) == 1


async def test_a_reply_that_is_cut_there_is_length_here(tmp_path):
    async with asked(tmp_path, "word " * 300, stop=False) as (policy, _, _):
        reply = await opened(policy).chat([USER])
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 100)


async def test_what_the_gateway_refuses_is_told(tmp_path, monkeypatch):
    async with asked(tmp_path, "one") as (policy, inner, fake):
        await inner.close()
        with pytest.raises(EngineError, match=r"answered 404: session 's1' is unknown or closed"):
            await opened(policy).chat([USER])
        assert not fake.requests
    monkeypatch.setenv("GATEWAY_TOKEN", "wrong")
    with pytest.raises(EngineError, match=r"answered 401: .* is the key in env:GATEWAY_TOKEN right"):
        async with asked(tmp_path, "one"):
            pass


async def test_a_gateway_over_messages_serves_outside_agents_too(tmp_path):
    async with asked(tmp_path, "one", "two") as (policy, _, _):
        face = Gateway(policy, defaults=SessionDefaults(turns=1))
        await face.start()
        opened(policy)
        config = OpenAIConfig(base_url=f"{face.url}/sessions/mine", model="policy")
        engine = OpenAIEngine(config, build_context(tmp_path))
        try:
            await engine.start()
            outer = MessagePolicy(engine).open(
                "outer", max_seq_len=4000, reply_tokens=100, turns=9, sampling=SamplingParams(0.0)
            )
            assert (await outer.chat([USER])).message["content"] == "one"
        finally:
            await engine.stop()
            await face.stop()
