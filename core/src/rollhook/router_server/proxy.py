"""Requests on their way to a worker and back: which failures are tried again, and which are passed on."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from aiohttp.typedefs import LooseHeaders

from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.router_server import asked as asking
from rollhook.router_server.answers import refusal
from rollhook.router_server.asked import Asked
from rollhook.router_server.pool import Pool
from rollhook.session.workers import Entry

log = logging.getLogger(__name__)

#: an engine says so before it starts a request, so another may have it
_NOT_STARTED = frozenset({429, 503})
#: headers of one connection (RFC 9110, 7.6.1), and those that aiohttp sets anew
_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_ASKED_ANEW = _HOP | {"host", "content-length", "content-encoding", "expect"}


@dataclass(frozen=True)
class Retries:
    """How often a request is tried in all, and the pauses when all workers failed it (seconds, jittered)."""

    attempts: int = 5
    backoff: float = 0.05
    growth: float = 1.5
    most: float = 30.0
    jitter: float = 0.2
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Watcher:
    """Hears how requests end; this one makes nothing of it."""

    def answered(self, entry: Entry, path: str, status: int, seconds: float) -> None:
        """Hear that a worker answered with a status, its headers after so many seconds."""

    def failed(self, entry: Entry, path: str) -> None:
        """Hear that a worker gave no answer."""

    def retried(self) -> None:
        """Hear that a request is tried again."""


class _FailedError(EngineError):
    """A worker failed a request; `answer` is what it said, if it said something."""

    def __init__(self, reason: str, *, started: bool, status: int | None = None) -> None:
        super().__init__(reason, kind="retryable", status=status)
        self.started = started
        self.answer: web.StreamResponse | None = None


class Proxy:
    """Sends requests on, body and answer as they came, streams included.

    Tried again, elsewhere where possible: what no worker has started (no connection; 429; 503), and a GET
    whatever went wrong. A generation that may have begun is never run twice: its client gets the error. A
    worker that gives no answer is put to the `doubt`.
    """

    def __init__(
        self,
        pool: Pool,
        http: aiohttp.ClientSession,
        watcher: Watcher,
        *,
        doubt: Callable[[Entry], Awaitable[None]],
        retries: Retries | None = None,
        rank_field: Callable[[Worker], str] = lambda worker: asking.RANK_FIELDS[1],
        headers: Mapping[str, str] | None = None,
        keep_authorization: bool = True,
        seed: int = 0,
    ) -> None:
        self._pool = pool
        self._http = http
        self._watcher = watcher
        self._doubt = doubt
        self._retries = retries or Retries()
        self._rank_field = rank_field
        self._headers = dict(headers or {})
        self._dropped = _ASKED_ANEW | {name.lower() for name in self._headers}
        if not keep_authorization:
            self._dropped |= {"authorization"}
        self._random = random.Random(seed)  # noqa: S311 - spreads retries

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Send a generation to the worker that the policies choose."""
        try:
            asked = asking.read(request.headers, await request.read())
        except asking.BodyError as error:
            return refusal(400, str(error), "invalid_body")
        return await self._tried(request, asked)

    async def look(self, request: web.Request) -> web.StreamResponse:
        """Send a GET, which any worker answers alike, to one of them."""
        return await self._tried(request, asking.read(request.headers, b"{}"))

    async def _tried(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        failed: set[Worker] = set()
        failure: _FailedError | None = None
        with self._pool.request(asked):
            for attempt in range(self._retries.attempts):
                entry = self._pool.choose(asked, failed)
                if entry is None:
                    break
                if failure is not None:
                    self._watcher.retried()
                    if entry.worker in failed:
                        await self._back_off(attempt)
                        failed.clear()
                try:
                    with entry.sending(asked.route.expected_tokens):
                        return await self._sent(request, asked, entry)
                except _FailedError as error:
                    failure = error
                    failed.add(entry.worker)
                    if error.answer is None:
                        self._watcher.failed(entry, request.path)
                        log.warning("a request failed: %s", error)
                        await self._doubt(entry)
                    if error.started and request.method != "GET":
                        break
        if failure is None:
            return refusal(503, _none(self._pool, asked), "no_available_workers")
        if failure.answer is not None:
            return failure.answer
        return refusal(502, str(failure), "engine_failed" if failure.started else "engine_unreachable")

    async def _sent(self, request: web.Request, asked: Asked, entry: Entry) -> web.StreamResponse:
        """Try one worker. Raises _FailedError for an answer of 429 or 5xx, and for none."""
        worker = entry.worker
        body = None if request.method == "GET" else asked.for_rank(worker.dp_rank, self._rank_field(worker))
        began = time.monotonic()
        try:
            async with self._http.request(
                request.method, worker.url + request.raw_path, data=body, headers=self._onward(request)
            ) as upstream:
                self._watcher.answered(entry, request.path, upstream.status, time.monotonic() - began)
                if upstream.status < 500 and upstream.status not in _NOT_STARTED:
                    return await self._answer(request, upstream)
                failure = _FailedError(
                    f"{worker.url} answered {upstream.status}",
                    started=upstream.status not in _NOT_STARTED,
                    status=upstream.status,
                )
                failure.answer = await _whole(upstream)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise _FailedError(f"{worker.url} broke off a request: {reason}", started=connected) from error
        raise failure

    async def _answer(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on: whole where its length is known, else piece by piece as it comes."""
        if upstream.content_length is not None:
            return await _whole(upstream)
        response = web.StreamResponse(status=upstream.status, headers=_kept(upstream))
        await response.prepare(request)
        try:
            async for piece in upstream.content.iter_any():
                await response.write(piece)
        except aiohttp.ClientPayloadError:
            # the client must see that the stream is cut, not that it has ended
            if request.transport is not None:
                request.transport.abort()
            failure = _FailedError(f"{upstream.url.origin()} broke off a stream", started=True)
            failure.answer = response
            raise failure from None
        await response.write_eof()
        return response

    def _onward(self, request: web.Request) -> dict[str, str]:
        onward = {name: value for name, value in request.headers.items() if name.lower() not in self._dropped}
        return {**onward, **self._headers}

    async def _back_off(self, attempt: int) -> None:
        retries = self._retries
        pause = min(retries.most, retries.backoff * retries.growth ** (attempt - 1))
        await retries.sleep(pause * self._random.uniform(1 - retries.jitter, 1 + retries.jitter))


async def _whole(upstream: aiohttp.ClientResponse) -> web.Response:
    return web.Response(status=upstream.status, headers=_kept(upstream), body=await upstream.read())


def _kept(upstream: aiohttp.ClientResponse) -> LooseHeaders:
    kept = upstream.headers.copy()
    for name in _HOP | {"content-length"}:
        kept.popall(name, None)
    return kept


def _none(pool: Pool, asked: Asked) -> str:
    workers = pool.table.workers
    if not workers:
        return "no engine has joined; add one with POST /workers, its location says what is waited for"
    rank = "" if asked.rank is None else f" has rank {asked.rank} and"
    why = f" ({why})" if (why := pool.table.why_none()) else ""
    return f"none of the {len(workers)} workers{rank} takes requests{why}; see GET /workers"
