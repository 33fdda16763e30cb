"""The relay against a sandbox that lies: whatever comes out of it, nothing but the session's API is asked."""

import asyncio
import base64
import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollhook_agents.relay import Relay, _lines

BODY = base64.b64encode(b'{"messages": []}').decode()


class Liar:
    """A sandbox whose forwarder says given lines, and then waits."""

    def __init__(self, *lines):
        self.lines = [b'{"port": 5}', *lines]
        self.answers = []
        self.ended = asyncio.Event()

    async def spawn(self, argv, *, stdin):
        return self

    async def stdout(self):
        for line in self.lines:
            yield line + b"\n"
        await self.ended.wait()

    async def stderr(self):
        return
        yield b""

    async def write_stdin(self, data):
        self.answers.append(json.loads(data))

    async def kill(self):
        self.ended.set()

    async def aclose(self):
        pass


@pytest.fixture
async def asked():
    """Serve anything; give the address and what was asked."""
    seen = []

    async def answer(request):
        seen.append(
            (request.method, request.raw_path, request.headers.get("Authorization"), dict(request.headers))
        )
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    seen.insert(0, f"http://127.0.0.1:{runner.addresses[0][1]}/sessions/s")
    yield seen
    await runner.cleanup()


def request(number, **changes):
    said = {
        "id": number,
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": {},
        "body": BODY,
        **changes,
    }
    return json.dumps(said).encode()


async def told(liar, count):
    """Wait until so many requests have been answered; return their statuses by number."""
    async with asyncio.timeout(10):
        while sum(bool(each.get("end")) for each in liar.answers) < count:
            await asyncio.sleep(0.01)
    return {each["id"]: each["status"] for each in liar.answers if "status" in each}


async def test_only_the_sessions_api_is_asked_and_only_with_its_token(asked):
    liar = Liar(
        request(1, headers={"authorization": "Bearer other", "x-api-key": "k", "host": "h", "accept": "a/b"}),
        request(2, path="/v1/../../other/v1/models"),
        request(3, path="/v1/models/%2e%2e/x", method="GET"),
        request(4, path="http://elsewhere/v1/models"),
        request(5, method="DELETE"),
        request(6, path="/v1/models?a=b", method="GET", body=""),
    )
    async with Relay(liar, "python3", asked[0], "session-token"):
        statuses = await told(liar, 6)
    assert statuses == {1: 200, 2: 404, 3: 404, 4: 404, 5: 404, 6: 200}
    assert sorted(each[:3] for each in asked[1:]) == [
        ("GET", "/sessions/s/v1/models?a=b", "Bearer session-token"),
        ("POST", "/sessions/s/v1/chat/completions", "Bearer session-token"),
    ]
    assert not any("X-Api-Key" in each[3] or each[3]["Host"] == "h" for each in asked[1:])


async def test_what_is_no_request_is_refused(asked):
    liar = Liar(
        request(1, headers=[]),
        request(2, body="%"),
        request(3, headers={"accept": "a\r\nb: c"}),
        b'{"id": 4}',
        request(5, headers={"accept": 5}),
        b'{"id": 99, "gone": true}',
        request(6),
    )
    async with Relay(liar, "python3", asked[0], "t"):
        statuses = await told(liar, 6)
    assert statuses == {1: 400, 2: 400, 3: 200, 4: 400, 5: 400, 6: 200}


@pytest.mark.parametrize("line", [b"no json", b"[]", b'{"id": "x"}', b"3", b"{}"])
async def test_a_forwarder_that_talks_nonsense_is_left(asked, line):
    liar = Liar(line, request(1))
    async with Relay(liar, "python3", asked[0], "t") as relay:
        async with asyncio.timeout(5):
            await asyncio.wait({relay._reader})
    assert len(asked) == 1


@given(st.lists(st.binary(max_size=20)))
def test_lines_are_whole_however_they_come(chunks):
    async def stream():
        for chunk in chunks:
            yield chunk

    async def collect():
        return [line async for line in _lines(stream())]

    assert asyncio.run(collect()) == b"".join(chunks).split(b"\n")[:-1]
