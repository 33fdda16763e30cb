"""A double of an OpenAI-compatible endpoint that tests steer: `python -m rollhook.testing.chat_server`.

It prints its URL and serves until its standard input ends. `POST /script` takes a list of steps, one for each
request that comes after; without a step the answer is `hello`. `GET /log` returns what came in.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import web

MODEL = "double-1"


class ChatServer:
    """Answers chat completions as its script says.

    A step may hold `message` (or its `content` alone), `finish_reason`, `usage` (null: none) and `seconds` to
    wait before; or `status` with `headers` and `body`; or `raw`, a text in place of JSON; or `drop`: half of
    an answer, then nothing; or `bytes`, the size of an endless one. `echo_key` answers with the caller's key.
    """

    def __init__(self, *, key: str | None = None, models: Mapping[str, Any] | None = None) -> None:
        self.key = key
        self.models = {MODEL: {"max_model_len": 4096}} if models is None else models
        self.script: deque[dict[str, Any]] = deque()
        self.requests: list[dict[str, Any]] = []
        self.running = 0
        self.peak = 0
        self.left = 0

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._list),
                web.post("/script", self._scripted),
                web.get("/log", self._log),
            ]
        )
        return app

    async def _scripted(self, request: web.Request) -> web.Response:
        given = await request.json()
        self.script = deque(given.get("steps", ()))
        self.models = given.get("models", self.models)
        self.requests, self.peak, self.left = [], self.running, 0
        return web.Response(status=204)

    async def _log(self, request: web.Request) -> web.Response:
        return web.json_response({"requests": self.requests, "peak": self.peak, "left": self.left})

    async def _list(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _refusal(request)
        if self.models is None:
            raise web.HTTPNotFound
        rows = [{"id": name, "object": "model", **more} for name, more in self.models.items()]
        return web.json_response({"object": "list", "data": rows})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append({"headers": dict(request.headers), "body": body})
        if not self._knows(request):
            return _refusal(request)
        step = self.script.popleft() if self.script else {}
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(step.get("seconds", 0.0))
            return await self._answer(request, body, step)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: Any, step: dict[str, Any]) -> web.StreamResponse:
        if "status" in step:
            return web.json_response(step.get("body", {}), status=step["status"], headers=step.get("headers"))
        if "raw" in step:
            return web.Response(text=step["raw"], content_type="text/html")
        if "drop" in step or "bytes" in step:
            return await _piecemeal(request, step.get("bytes", 0))
        content = step.get("content", "hello")
        if step.get("echo_key"):
            content = request.headers["Authorization"]
        message = step.get("message", {"role": "assistant", "content": content})
        answer = {
            "id": "chatcmpl-double",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": step.get("finish_reason", "stop")}],
        }
        prompt = sum(len(str(each.get("content")).split()) for each in body["messages"])
        usage = step.get("usage", {"prompt_tokens": prompt, "completion_tokens": len(str(content).split())})
        return web.json_response(answer if usage is None else {**answer, "usage": usage})

    def _knows(self, request: web.Request) -> bool:
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"


def _refusal(request: web.Request) -> web.Response:
    """Refuse a key, repeating it as some endpoints do."""
    given = request.headers.get("Authorization", "no key")
    error = {"message": f"Incorrect API key provided: {given}", "code": "invalid_api_key"}
    return web.json_response({"error": error}, status=401)


async def _piecemeal(request: web.Request, size: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    if not size:
        response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"choices": [')
    for _ in range(size >> 20):
        await response.write(b" " * (1 << 20))
    assert request.transport is not None
    request.transport.close()
    return response


async def _serve(key: str | None) -> None:
    runner = web.AppRunner(ChatServer(key=key).app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(json.dumps({"url": "http://{}:{}".format(*runner.addresses[0][:2])}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1] if len(sys.argv) > 1 else None))
