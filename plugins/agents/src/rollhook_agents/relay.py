"""A session's HTTP face inside a sandbox that has no network: requests come out over a command's streams."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from rollhook.errors import AgentError, SandboxError

if TYPE_CHECKING:
    from rollhook.sandbox import Spawned
    from rollhook.sandbox.agent_view import AgentSandbox

logger = logging.getLogger(__name__)

#: what may be asked of a session from inside
_PATHS = re.compile(r"/v1/(chat/completions|messages|models)(\?[\w=&.-]{0,200})?")
_HEADERS = ("content-type", "anthropic-version", "accept")
_BACK = ("content-type", "x-should-retry", "x-rollhook-turns-left", "x-rollhook-tokens-left")
#: bytes of one line from inside: a body of 16 MiB in base64, and its headers
_LONGEST = 24 << 20
#: requests under way at once
_MOST = 64
_START_SECONDS = 30.0


class Relay:
    """Forwards requests from a sandbox to one session and to nothing else; `url` is its base URL inside.

    What comes from the sandbox is hostile: paths are those of the session's API, lengths and numbers are
    bounded, and the session's token stays outside.
    """

    def __init__(self, sandbox: AgentSandbox, python: str, target: str, token: str) -> None:
        self._sandbox = sandbox
        self._python = python
        self._target = target
        self._token = token
        self._client: aiohttp.ClientSession | None = None
        self._process: Spawned | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._errors: asyncio.Task[bytes] | None = None
        self._writing = asyncio.Lock()
        self.url = ""

    async def __aenter__(self) -> Relay:
        """Start the forwarder. Raises AgentError when it does not come up."""
        text = resources.files("rollhook_agents").joinpath("forwarder.py").read_text("utf-8")
        self._process = await self._sandbox.spawn([self._python, "-c", text], stdin=True)
        self._errors = asyncio.create_task(_read(self._process.stderr()))
        lines = _lines(self._process.stdout())
        try:
            async with asyncio.timeout(_START_SECONDS):
                port = orjson.loads(await anext(lines))["port"]
            self.url = f"http://127.0.0.1:{int(port)}"
        except (TimeoutError, StopAsyncIteration, ValueError, KeyError, TypeError) as error:
            await asyncio.wait({self._errors}, timeout=1.0)
            said = self._errors.result() if self._errors.done() else b""
            await self.__aexit__()
            reason = said.decode("utf-8", "replace").strip()[-300:] or type(error).__name__
            raise AgentError(
                f"agent.python: {self._python} does not run the forwarder in the sandbox ({reason}); name a "
                "Python 3.8 or later that is there, or give the sandbox a network and set gateway.public_url",
                kind="user",
            ) from None
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        self._reader = asyncio.create_task(self._serve(lines))
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks = [*self._requests.values(), *filter(None, [self._reader, self._errors])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            with contextlib.suppress(SandboxError):  # what is left of it ends with the agent's phase
                await self._process.kill()
            await self._process.aclose()

    async def _serve(self, lines: AsyncIterator[bytes]) -> None:
        try:
            async for line in lines:
                self._take(orjson.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("a sandbox's forwarder says what it must not, and is left: %s", error)

    def _take(self, said: dict[str, Any]) -> None:
        number = int(said["id"])
        if said.get("gone"):
            if number in self._requests:
                self._requests[number].cancel()
            return
        if number in self._requests or len(self._requests) >= _MOST:
            raise ValueError(f"{len(self._requests)} requests are under way")
        task = asyncio.create_task(self._forward(number, said))
        self._requests[number] = task
        task.add_done_callback(lambda done: self._requests.pop(number, None))

    async def _forward(self, number: int, said: dict[str, Any]) -> None:
        assert self._client is not None
        try:
            path, method, body, headers = _request(said)
        except (ValueError, KeyError, TypeError, AttributeError):
            await self._fail(number, 400, "that is no request")
            return
        if method not in ("GET", "POST") or not _PATHS.fullmatch(path):
            await self._fail(number, 404, f"{path[:100]} is not of a session's API")
            return
        headers["authorization"] = f"Bearer {self._token}"
        try:
            async with self._client.request(
                method, self._target + path, headers=headers, data=body or None, allow_redirects=False
            ) as response:
                back = {k.lower(): v for k, v in response.headers.items() if k.lower() in _BACK}
                await self._answer(id=number, status=response.status, headers=back)
                async for data in response.content.iter_any():
                    await self._answer(id=number, data=base64.b64encode(data).decode())
            await self._answer(id=number, end=True)
        except aiohttp.ClientError as error:
            await self._fail(number, 502, f"the session cannot be reached: {type(error).__name__}")

    async def _fail(self, number: int, status: int, text: str) -> None:
        body = orjson.dumps({"error": {"message": text, "type": "invalid_request_error"}})
        await self._answer(id=number, status=status, headers={"content-type": "application/json"})
        await self._answer(id=number, data=base64.b64encode(body).decode(), end=True)

    async def _answer(self, **fields: Any) -> None:
        assert self._process is not None
        async with self._writing:
            with contextlib.suppress(BrokenPipeError):
                await self._process.write_stdin(orjson.dumps(fields) + b"\n")


def _request(said: dict[str, Any]) -> tuple[str, str, bytes, dict[str, str]]:
    """Return path, method, body and headers of a request; raises for what is none."""
    headers = {k: v for k, v in said["headers"].items() if k in _HEADERS and v.isprintable() and v.isascii()}
    return str(said["path"]), str(said["method"]), base64.b64decode(said["body"], validate=True), headers


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; ValueError for one that is too long."""
    left = bytearray()
    async for chunk in chunks:
        looked = len(left)
        left += chunk
        while (end := left.find(b"\n", looked)) >= 0:
            yield bytes(left[:end])
            del left[: end + 1]
            looked = 0
        if len(left) > _LONGEST:
            raise ValueError("a line is too long")


async def _read(chunks: AsyncIterator[bytes]) -> bytes:
    kept = b""
    async for chunk in chunks:
        kept = (kept + chunk)[-2000:]
    return kept
