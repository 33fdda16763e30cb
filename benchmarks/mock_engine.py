"""An engine that says the same at once: SGLang's `/generate`, and chat completions for peers."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from aiohttp import web

TOKENS = 64
#: ordinary ids of the tokenizer of `rollhook.testing`, none of which ends a reply
IDS = [40 + n % 50 for n in range(TOKENS)]
LOGPROBS = [-(n + 1) / 128 for n in range(TOKENS)]
TEXT = "word " * TOKENS
GENERATED = orjson.dumps(
    {
        "text": TEXT,
        "output_ids": IDS,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": 1,
            "completion_tokens": TOKENS,
            "weight_version": "1",
            "output_token_logprobs": [[p, i, None] for p, i in zip(LOGPROBS, IDS, strict=True)],
        },
    }
)
COMPLETED = orjson.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1},
    }
)


def serve() -> None:
    """Serve until killed; the address is the first line of stdout."""

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=GENERATED, content_type="application/json")

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=COMPLETED, content_type="application/json")

    async def well(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def say(app: web.Application) -> None:
        print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)

    import socket

    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # some routers try HTTP/2 first
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/generate", generate), web.post("/v1/chat/completions", complete)])
    app.add_routes([web.get("/health", well)])
    app.on_startup.append(say)
    web.run_app(app, sock=sock, print=None, access_log=None)


@contextmanager
def mock_engine() -> Iterator[str]:
    """Run one in a process of its own and yield its address."""
    process = subprocess.Popen([sys.executable, Path(__file__)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve()
