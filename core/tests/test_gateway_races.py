"""Sessions over HTTP when things happen at once, and streams whose client or engine goes away."""

import asyncio
import socket

import aiohttp
import openai
import pytest
from aiohttp import web

from rollhook.engine.messages import Completion, MessageEngine, RequestLimits
from rollhook.session import Limits, MessagePolicy, Renderer
from rollhook.session.gateway import Gateway
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

USER = {"role": "user", "content": "go"}
PATHS = ("/v1/chat/completions", "/v1/messages")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(directory):
    return FakeEngine(says(Renderer(directory), "hello there"))


@pytest.fixture
async def face(engine, directory):
    limits = Limits(attempts=2, backoff=0.001)
    async with serving(engine, directory=directory, limits=limits) as policy:
        gateway = Gateway(policy)
        await gateway.start()
        async with aiohttp.ClientSession(gateway.url) as http:
            yield Face(policy, http)
        await gateway.stop()


class Face:
    """A client of a gateway."""

    def __init__(self, policy, http):
        self.policy, self.http = policy, http

    async def open(self):
        async with self.http.post("/sessions") as response:
            return "/sessions/" + (await response.json())["session_id"]

    async def chat(self, session, path=PATHS[0], **more):
        async with self.http.post(session + path, json={"messages": [USER], **more}) as response:
            return response.status, await response.text()

    async def delete(self, session):
        async with self.http.delete(session) as response:
            return response.status


async def test_concurrent_chats_of_a_session_are_all_answered_and_recorded(face, engine):
    session = await face.open()
    engine.hold()
    calls = [asyncio.ensure_future(face.chat(session, path)) for path in PATHS * 4]
    await engine.until(lambda: engine.running == 8)
    await engine.release()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 8
    (inner,) = face.policy.sessions.values()
    assert len(inner.leaves()) == 8
    assert inner.stats.turns == 8


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_delete_during_a_reply_ends_it_with_404_and_records_nothing(face, engine, path, stream):
    session = await face.open()
    (inner,) = face.policy.sessions.values()
    engine.hold()
    call = asyncio.ensure_future(face.chat(session, path, stream=stream))
    await engine.until(lambda: engine.running == 1)
    assert await face.delete(session) == 204
    status, text = await call
    assert status == 404
    assert "closed during the reply" in text
    await engine.until(lambda: engine.running == 0)
    assert not inner.leaves()


@pytest.mark.parametrize("path", PATHS)
async def test_a_delete_in_the_middle_of_a_stream_ends_it_with_an_error(face, engine, path):
    session = await face.open()
    engine.hold(after=3)
    body = {"messages": [USER], "stream": True}
    async with face.http.post(session + path, json=body) as response:
        assert response.status == 200
        first = await response.content.readany()
        assert await face.delete(session) == 204
        rest = (await response.read()).decode()
    assert first
    assert "closed during the reply" in rest
    assert "[DONE]" not in rest
    assert "message_stop" not in rest


async def test_chats_during_and_after_a_delete_and_a_second_delete_are_404(face, engine):
    session = await face.open()
    engine.hold()
    running = asyncio.ensure_future(face.chat(session))
    await engine.until(lambda: engine.running == 1)
    deleted, *chats = await asyncio.gather(
        face.delete(session), *(face.chat(session, path) for path in PATHS * 3)
    )
    assert deleted == 204
    assert {status for status, _ in [await running, *chats]} == {404}
    assert await face.delete(session) == 404
    assert (await face.chat(session))[0] == 404


async def test_two_deletes_at_once_succeed_once(face):
    session = await face.open()
    assert sorted(await asyncio.gather(face.delete(session), face.delete(session))) == [204, 404]


async def test_queued_chats_end_when_their_session_is_deleted(face, engine):
    """They wait for a weight update, so they have not even reached the engine."""
    session = await face.open()
    face.policy.pause()
    (inner,) = face.policy.sessions.values()
    calls = [asyncio.ensure_future(face.chat(session)) for _ in range(5)]
    while inner.turns_left > 25:
        await asyncio.sleep(0)
    assert await face.delete(session) == 204
    assert [status for status, _ in await asyncio.gather(*calls)] == [404] * 5
    assert not engine.requests


async def test_rapid_lives_of_many_sessions_leave_nothing_behind(face, engine):
    async def life(path):
        session = await face.open()
        status, _ = await face.chat(session, path, stream=path == PATHS[1])
        return status, await face.delete(session)

    assert set(await asyncio.gather(*(life(path) for path in PATHS * 20))) == {(200, 204)}
    assert not face.policy.sessions
    assert [(e.open_sessions, e.tokens_in_flight) for e in face.policy.table] == [(0, 0)]


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_its_stream_ends_the_turn(face, engine, path):
    session = await face.open()
    engine.hold(after=3)
    async with face.http.post(session + path, json={"messages": [USER], "stream": True}) as response:
        await response.content.readany()
        response.close()
    await engine.until(lambda: engine.running == 0)
    assert engine.control[-1][0] == "abort_request"
    (inner,) = face.policy.sessions.values()
    assert not inner.leaves()
    await engine.release()
    assert (await face.chat(session, path))[0] == 200


async def test_a_server_that_does_not_cancel_notices_by_writing_that_a_client_has_left(
    engine, directory, caplog
):
    async with serving(engine, directory=directory) as policy:
        runner = web.AppRunner(Gateway(policy).app(), handler_cancellation=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        session = policy.open("s", max_seq_len=1000, reply_tokens=100, turns=3)
        engine.hold(after=3)
        async with (
            aiohttp.ClientSession(url) as http,
            http.post("/sessions/s" + PATHS[0], json={"messages": [USER], "stream": True}) as response,
        ):
            await response.content.readany()
            response.close()
        await engine.release()
        await engine.until(lambda: engine.running == 0)
        await runner.cleanup()
        assert session.turns_left >= 2
    assert "unexpectedly" not in caplog.text
    assert "Error handling request" not in caplog.text


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_fails_in_a_stream_for_good_ends_it_with_an_error(face, engine, path):
    session = await face.open()
    engine.cut(2, 2)
    status, text = await face.chat(session, path, stream=True)
    assert status == 200
    assert "no answer after 2 tries" in text
    assert ("server_error" if path == PATHS[0] else "api_error") in text
    (inner,) = face.policy.sessions.values()
    assert not inner.leaves()


async def test_an_engine_that_fails_before_the_first_token_is_a_502(face, engine):
    session = await face.open()
    engine.fail("/generate", 500, times=2)
    assert (await face.chat(session, stream=True))[0] == 502


async def test_the_official_client_raises_what_ends_a_stream(face, engine):
    session = await face.open()
    engine.cut(2, 2)
    base = str(face.http._base_url).rstrip("/") + session + "/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="no answer after 2 tries"):
            [chunk async for chunk in stream]


class Talker(MessageEngine):
    """Says more than the buffers of a connection hold."""

    limits = RequestLimits()

    async def start(self):
        pass

    async def complete(self, request):
        return Completion({"role": "assistant", "content": "x" * (40 << 20)}, "stop")

    async def stop(self):
        pass


async def test_a_client_that_does_not_read_its_stream_is_left(directory, caplog):
    policy = MessagePolicy(Talker(None, build_context(directory)))
    gateway = Gateway(policy, stall=0.05)
    await gateway.start()
    policy.open("s", max_seq_len=1 << 30, reply_tokens=1 << 30, turns=3)
    body = b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}'
    head = (
        "POST /sessions/s/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, head.encode() + body)
        while "has not read its stream" not in caplog.text:
            await asyncio.sleep(0.01)
        got = 0
        with pytest.raises(ConnectionResetError):  # noqa: PT012 - it comes after what was buffered
            while piece := await loop.sock_recv(client, 1 << 20):
                got += len(piece)
            raise ConnectionResetError
    await gateway.stop()
    assert got < 40 << 20


async def test_ten_thousand_sessions_are_open_at_once(face, engine):
    opened = [face.policy.open(f"s{n}", max_seq_len=1000, reply_tokens=10, turns=3) for n in range(10_000)]
    session = await face.open()
    for path in PATHS:
        assert (await face.chat(session, path))[0] == 200
        assert (await face.chat("/sessions/s9999", path))[0] == 200
    assert len(face.policy.sessions) == 10_001
    for each in opened:
        await each.close()
    assert [entry.open_sessions for entry in face.policy.table] == [1]
