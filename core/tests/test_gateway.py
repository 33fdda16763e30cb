"""The HTTP face of sessions: the same Session object, and the right status for whatever comes in."""

import asyncio
import logging
import zlib
from contextlib import asynccontextmanager

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.engine.base import SamplingParams
from rollhook.errors import UsageError
from rollhook.session import Limits, Renderer
from rollhook.session.gateway import Gateway, SessionDefaults
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

USER = {"role": "user", "content": "go"}
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(directory):
    return FakeEngine(says(Renderer(directory), "hello", "again"))


class Face:
    """A client of a gateway."""

    def __init__(self, gateway, policy, http):
        self.gateway, self.policy, self.http = gateway, policy, http

    async def call(self, method, path, json=None, **keys):
        async with self.http.request(method, self.gateway.url + path, json=json, **keys) as response:
            raw = await response.read()
            if response.content_type == "text/event-stream":
                assert raw.rstrip().endswith((b"[DONE]", b'{"type":"message_stop"}')), raw
                return response.status, None
            return response.status, await response.json() if raw else None

    async def session(self, **body):
        status, answer = await self.call("POST", "/sessions", body)
        assert status == 201
        return "/sessions/" + answer["session_id"]

    async def chat(self, session, *messages, **body):
        return await self.call("POST", session + CHAT, {"messages": list(messages), **body})


@asynccontextmanager
async def facing(engine, directory, *, limits=None, **keys):
    async with serving(engine, directory=directory, limits=limits) as policy:
        gateway = Gateway(policy, **keys)
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as http:
                yield Face(gateway, policy, http)
        finally:
            await gateway.stop()
            await gateway.stop()


@pytest.fixture
async def face(engine, directory):
    async with facing(engine, directory) as face:
        yield face


async def test_fields_that_change_nothing_are_taken(face):
    session = await face.session()
    harmless = {"n": 1, "temperature": 1, "top_p": 1.0, "stop": None, "user": "me", "logprobs": False}
    assert (await face.chat(session, USER, tool_choice="none", store=True, **harmless))[0] == 200


async def test_a_conversation_over_http_is_a_session(face, engine):
    session = await face.session(task_id="t")
    status, first = await face.chat(session, USER, model="m")
    assert status == 200
    (choice,) = first["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert first["object"] == "chat.completion"
    assert first["model"] == "m"
    assert first["usage"]["completion_tokens"] == 6
    status, second = await face.chat(session, USER, choice["message"], USER)
    assert second["choices"][0]["message"]["content"] == "again"
    sent = [request["input_ids"] for request in engine.requests]
    assert sent[1][: len(sent[0])] == sent[0]
    status, shown = await face.call("GET", session)
    assert (shown["turns"], shown["turns_left"], len(shown["branches"])) == (2, 28, 1)
    (inner,) = face.policy.sessions.values()
    assert len(inner.leaves()) == 1


async def test_delete_closes_once(face):
    session = await face.session()
    assert (await face.call("DELETE", session))[0] == 204
    assert (await face.call("DELETE", session))[0] == 404
    assert (await face.call("GET", session))[0] == 404
    assert (await face.chat(session, USER))[0] == 404


async def test_a_session_gets_what_was_asked_and_no_more_than_the_defaults(engine, directory):
    defaults = SessionDefaults(max_seq_len=500, reply_tokens=50, turns=2, sampling=SamplingParams(0.5))
    async with facing(engine, directory, defaults=defaults) as face:
        session = await face.session(reply_tokens=3, temperature=0.0, seed=1)
        await face.chat(session, USER)
        assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 3
        assert engine.requests[0]["sampling_params"]["temperature"] == 0.0
        assert (await face.call("POST", "/sessions", {"turns": 3}))[0] == 422


async def test_max_tokens_of_a_request_bounds_its_reply(face, engine):
    session = await face.session()
    _, answer = await face.chat(session, USER, max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 2


async def test_text_parts_are_joined(face, engine, directory):
    session = await face.session()
    parts = [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]
    assert (await face.chat(session, {"role": "user", "content": parts}))[0] == 200
    assert engine.requests[0]["input_ids"] == Renderer(directory).first([USER])


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 400, "messages must be a list"),
        ({"messages": []}, 400, "messages must be a list"),
        ({"messages": "hi"}, 400, "messages must be a list"),
        ({"messages": ["hi"]}, 400, "an object with role and content"),
        ({"messages": [{"role": "boss", "content": "x"}]}, 400, "role 'boss' is unknown"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "is unknown"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "must be text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, 400, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "name": []}]}, 400, "name of a message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "only text parts"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "last message is the assistant's"),
        ({"messages": [USER], "stream": "yes"}, 400, "stream must be true or false"),
        ({"messages": [USER], "stream_options": 1}, 400, "stream_options must be"),
        ({"messages": [USER], "n": 2}, 400, "n other than 1 is not supported"),
        ({"messages": [USER], "logprobs": True}, 400, "logprobs other than False"),
        ({"messages": [USER], "stop": ["x"]}, 400, "stop other than []"),
        (
            {"messages": [USER], "temperature": 0.5},
            400,
            "temperature is set when a session is opened, here to 1",
        ),
        ({"messages": [USER], "tool_choice": "required"}, 400, "tool_choice 'required' is not supported"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, 400, "response_format other"),
        ({"messages": [USER], "min_p": 0.1}, 400, "min_p is not supported"),
        ({"messages": [{**USER, "function_call": {}}]}, 400, "function_call"),
        ({"messages": [USER], "tools": "x"}, 400, "tools must be"),
        (
            {"messages": [USER], "tools": [{"type": "custom", "custom": {}}]},
            400,
            "every tool is of type function",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, 400, "its function has a name"),
        ({"messages": [USER], "max_tokens": 0}, 422, "max_tokens must be"),
        ({"messages": [USER], "max_tokens": "many"}, 422, "max_tokens must be"),
        ({"messages": [USER], "max_completion_tokens": True}, 422, "max_completion_tokens must be"),
    ],
)
async def test_bad_chats_are_answered_in_words(face, engine, body, status, told):
    session = await face.session()
    answered, error = await face.call("POST", session + CHAT, body)
    assert answered == status
    assert told in error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"not json", "not JSON"),
        (b"", "not JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not JSON"),
        (b'{"messages": "\xff"}', "not JSON"),
    ],
    ids=["text", "empty", "list", "lone surrogate", "deep", "no utf-8"],
)
async def test_bodies_that_are_no_json_object_are_refused(face, raw, told):
    session = await face.session()
    status, error = await face.call("POST", session + CHAT, data=raw, headers=JSON)
    assert status == 400
    assert told in error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"turn": 2, "top_k": 5}, "no such fields: top_k, turn; a session has max_seq_len"),
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": ".."}, "session_id"),
        ({"max_seq_len": 10**9}, "max_seq_len"),
        ({"turns": -1}, "turns"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ],
)
async def test_bad_sessions_are_refused_in_words(face, body, told):
    status, error = await face.call("POST", "/sessions", body)
    assert status == 422
    assert told in error["error"]["message"]


async def test_an_id_is_open_once(face):
    assert await face.session(session_id="mine") == "/sessions/mine"
    assert (await face.call("POST", "/sessions", {"session_id": "mine"}))[0] == 409


async def test_a_turn_cut_for_length_conflicts(face):
    session = await face.session(reply_tokens=2)
    _, cut = await face.chat(session, USER)
    status, error = await face.chat(session, USER, cut["choices"][0]["message"], USER)
    assert status == 409
    assert "cut for length" in error["error"]["message"]


async def test_a_body_too_large_is_refused_before_it_is_read(engine, directory):
    async with facing(engine, directory, max_body=1 << 20) as face:
        session = await face.session()
        # the length is announced, the hundred megabytes are never sent
        reader, writer = await asyncio.open_connection("127.0.0.1", int(face.gateway.url.rpartition(":")[2]))
        writer.write(
            f"POST {session}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Content-Length: 104857600\r\n\r\n{".encode()
        )
        assert b"413" in await reader.readline()
        writer.close()
        await writer.wait_closed()
        status, error = await face.call("POST", session + CHAT, data=_endless(2 << 20), headers=JSON)
        assert status == 413
        assert "larger than" in error["error"]["message"]
        assert (await face.chat(session, USER))[0] == 200


async def _endless(size):
    for _ in range(size >> 16):
        yield b" " * (1 << 16)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | json},
    optional={
        "content": st.text(max_size=10) | json,
        "tool_calls": json | st.just([{"id": "1", "function": {"name": "f", "arguments": "{"}}]),
        "tool_call_id": json,
        "name": json,
        "reasoning_content": json,
    },
)


block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"]) | json},
    optional={
        "text": st.text(max_size=6) | json,
        "thinking": st.text(max_size=6) | json,
        "id": st.text(max_size=6) | json,
        "name": st.text(max_size=6) | json,
        "input": json,
        "tool_use_id": st.text(max_size=6) | json,
        "content": st.text(max_size=6) | json,
    },
)
anthropic_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]) | json},
    optional={"content": st.text(max_size=10) | st.lists(block, max_size=3) | json},
)
tool = st.fixed_dictionaries({"name": st.text(max_size=6) | json}, optional={"input_schema": json}) | json
extras = {"max_tokens": json, "model": json, "stream": st.booleans() | json, "tool_choice": json}
chat_body = st.fixed_dictionaries(
    {"messages": st.lists(message, max_size=3) | json},
    optional={"tools": st.lists(tool, max_size=2) | json, "n": json, "stream_options": json, **extras},
)
messages_body = st.fixed_dictionaries(
    {"messages": st.lists(anthropic_message, max_size=3) | json},
    optional={"tools": st.lists(tool, max_size=2) | json, "system": json, "thinking": json, **extras},
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.just(CHAT), chat_body)
        | st.tuples(st.just("/v1/messages"), messages_body)
        | st.tuples(st.just(""), json),
        max_size=10,
    )
)
def test_any_json_is_answered_and_never_with_a_500(directory, bodies):
    async def send():
        engine = FakeEngine(says(Renderer(directory), "hello"))
        async with facing(engine, directory) as face:
            session = await face.session(turns=2)
            for path, body in bodies:
                url = session + path if path else "/sessions"
                status, answer = await face.call("POST", url, body)
                assert status in (200, 201, 400, 409, 422), answer
                if status >= 400 and path == "/v1/messages":
                    assert answer["type"] == "error"

    asyncio.run(send())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_of_another_type_is_refused(face, kind):
    session = await face.session()
    for path in (session + CHAT, session + "/v1/messages", "/sessions"):
        status, error = await face.call("POST", path, data=b"{}", headers={"Content-Type": kind})
        assert status == 415
        assert "must be application/json" in error["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "other"])
async def test_a_compressed_body_is_refused_as_it_came(face, encoding):
    session = await face.session()
    body = zlib.compress(b" " * (100 << 20), 1)
    headers = {**JSON, "Content-Encoding": encoding}
    status, error = await face.call("POST", session + CHAT, data=body, headers=headers)
    assert status == 415
    assert "must not be compressed" in error["error"]["message"]


async def test_a_body_that_does_not_come_is_not_waited_for(engine, directory):
    async with facing(engine, directory, stall=0.05) as face:
        session = await face.session()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(face.gateway.url.rpartition(":")[2]))
        writer.write(
            f"POST {session}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        assert b"408" in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert (await face.chat(session, USER))[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 400, "messages must be a list"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "role, user or assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "content of a message must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 422, "only text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "tool_use_id"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "nothing was appended"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "last message is the assistant's"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
            400,
            "a tool_use has",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, USER]},
            400,
            "thinking of a",
        ),
        ({"messages": [USER], "system": 3}, 400, "system must be text"),
        ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "of type custom"),
        ({"messages": [USER], "tool_choice": {"type": "any"}}, 400, "only type auto"),
        ({"messages": [USER], "tool_choice": "auto"}, 400, "only type auto"),
        (
            {"messages": [USER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            400,
            "only type auto",
        ),
        ({"messages": [USER], "top_k": 5}, 400, "top_k is set when a session is opened"),
        ({"messages": [USER], "mcp_servers": []}, 400, "mcp_servers is not supported"),
        ({"messages": [USER], "max_tokens": 0}, 422, "max_tokens must be"),
    ],
)
async def test_bad_messages_are_answered_in_anthropics_form(face, engine, body, status, told):
    session = await face.session()
    answered, error = await face.call("POST", session + "/v1/messages", body)
    assert answered == status
    assert error == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": error["error"]["message"]},
    }
    assert told in error["error"]["message"]
    assert not engine.requests


async def test_unknown_paths_and_methods_have_openai_errors(face):
    for method, path, status in [("GET", "/nowhere", 404), ("PUT", "/sessions", 405)]:
        answered, error = await face.call(method, path)
        assert answered == status
        assert error["error"]["type"] == "invalid_request_error"


async def test_a_failing_engine_is_a_bad_gateway(engine, directory):
    engine.fail("/generate", 500, times=9)
    async with facing(engine, directory, limits=Limits(attempts=2, backoff=0.001)) as face:
        session = await face.session()
        status, error = await face.chat(session, USER)
        assert status == 502
        assert error["error"] == {
            "message": error["error"]["message"],
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }


async def test_a_request_that_the_template_refuses_is_unprocessable(engine, tmp_path):
    write_tokenizer(
        tmp_path,
        template="{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}",
    )
    async with facing(engine, tmp_path) as face:
        session = await face.session()
        status, error = await face.chat(session, {"role": "tool", "content": "x", "tool_call_id": "1"})
        assert status == 422
        assert "no tools here" in error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_the_template_leaves_out_are_refused(engine, tmp_path, stream):
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    write_tokenizer(tmp_path / "plain", template=template)
    async with facing(engine, tmp_path / "plain") as face:
        session = await face.session()
        tools = [{"type": "function", "function": {"name": "run"}}]
        status, error = await face.chat(session, USER, tools=tools, stream=stream)
        assert status == 400
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["code"] == "tools_not_supported"
        assert "chat_template.jinja of plain leaves tools out" in error["error"]["message"]
        assert (await face.chat(session, USER))[0] == 200


async def test_a_client_that_goes_away_ends_its_reply(face, engine):
    engine.hold()
    session = await face.session()
    call = asyncio.ensure_future(face.chat(session, USER))
    await engine.until(lambda: engine.running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.until(lambda: engine.running == 0)
    (inner,) = face.policy.sessions.values()
    assert not inner.leaves()


async def test_deleting_during_a_reply_ends_it(face, engine):
    engine.hold()
    session = await face.session()
    call = asyncio.ensure_future(face.chat(session, USER))
    await engine.until(lambda: engine.running == 1)
    assert (await face.call("DELETE", session))[0] == 204
    status, error = await call
    assert status == 404
    assert "closed during the reply" in error["error"]["message"]


async def test_the_number_of_sessions_is_bounded(engine, directory):
    async with facing(engine, directory, max_sessions=1) as face:
        await face.session()
        assert (await face.call("POST", "/sessions"))[0] == 429


async def test_sessions_that_nobody_uses_are_closed(engine, directory):
    time = [0.0]
    async with facing(engine, directory, now=lambda: time[0]) as face:
        idle, asked, looked_at = [await face.session() for _ in range(3)]
        face.policy.open("of an episode", max_seq_len=100, reply_tokens=10, turns=1)
        time[0] = 60.0
        await face.chat(asked, USER)
        await face.call("GET", looked_at)
        time[0] = 100.0
        await face.gateway.close_idle(100.0)
        assert (await face.call("GET", idle))[0] == 404
        assert (await face.call("GET", asked))[0] == 200
        assert len(face.policy.sessions) == 3
        time[0] = 199.0
        await face.gateway.close_idle(100.0)
        assert len(face.policy.sessions) == 2
        time[0] = 1000.0
        await face.gateway.close_idle(100.0)
        assert list(face.policy.sessions) == ["of an episode"]


async def test_a_session_in_use_and_the_next_one_of_its_id_are_kept(engine, directory):
    time = [0.0]
    async with facing(engine, directory, now=lambda: time[0]) as face:
        session = await face.session(session_id="s")
        engine.hold()
        call = asyncio.ensure_future(face.chat(session, USER))
        await engine.until(lambda: engine.running == 1)
        time[0] = 1000.0
        await face.gateway.close_idle(100.0)
        await engine.release()
        assert (await call)[0] == 200
        await face.gateway.close_idle(100.0)
        inner = face.policy.sessions["s"]
        await inner.close()
        face.policy.open("s", max_seq_len=100, reply_tokens=10, turns=1)
        time[0] = 5000.0
        await face.gateway.close_idle(100.0)
        assert list(face.policy.sessions) == ["s"]


async def test_the_gateway_looks_for_idle_sessions_by_itself(engine, directory):
    async with facing(engine, directory, idle_ttl=0.01) as face:
        await face.session()
        while face.policy.sessions:
            await asyncio.sleep(0.001)


async def test_a_token_is_required_where_there_is_one(engine, directory, caplog):
    caplog.set_level(logging.DEBUG)
    async with facing(engine, directory, token="s3cret") as face:
        assert (await face.call("POST", "/sessions?api_key=s3cret"))[0] == 401
        assert (await face.call("GET", "/health"))[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            status, error = await face.call("POST", "/sessions", headers=headers)
            assert status == 401
            assert "s3cret" not in error["error"]["message"]
        right = {"Authorization": "Bearer s3cret"}
        assert (await face.call("POST", "/sessions", headers=right))[0] == 201
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
async def test_an_address_that_others_reach_needs_a_token(engine, directory, bind):
    async with serving(engine, directory=directory) as policy:
        with pytest.raises(UsageError, match=r"gateway\.token must name a secret"):
            Gateway(policy, bind=bind)
        Gateway(policy, bind=bind, token="s3cret")


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
async def test_a_loopback_address_needs_none(engine, directory, bind):
    async with serving(engine, directory=directory) as policy:
        Gateway(policy, bind=bind)
