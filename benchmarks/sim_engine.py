"""Simulated engines on a clock that jumps: data-parallel ranks with prefix caches, queues and token rates.

A rank computes one prompt after the other (what its cache does not hold, at a rate), then generates (each
request at a rate, side by side). Its cache holds whole pages of tokens, shared by equal prefixes, the least
recently used go first; a request waits while those that run fill the memory. Nothing here sleeps: `Clock`
runs what comes next at once. `SimServer` puts an engine behind SGLang's HTTP endpoints, where a request
arrives in real time and is answered when its simulated time has come.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import orjson
from aiohttp import web


class Clock:
    """Simulated seconds: actions run in the order of their times, and then in that of their planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._plan: list[tuple[float, int, Callable[[], Awaitable[None] | None]]] = []

    def at(self, when: float, action: Callable[[], Awaitable[None] | None]) -> None:
        heapq.heappush(self._plan, (when, next(self._order), action))

    async def run(self) -> None:
        """Run until nothing is planned. An action that is awaitable ends before time goes on."""
        while self._plan:
            self.now, _, action = heapq.heappop(self._plan)
            if (ending := action()) is not None:
                await ending


@dataclass(frozen=True)
class Hardware:
    """A rank: tokens per second, memory in tokens, requests side by side, tokens per page."""

    prefill: float = 8000.0
    decode: float = 40.0
    memory: int = 250_000
    slots: int = 64
    page: int = 32
    overhead: float = 0.02


@dataclass
class Request:
    """A prompt and its reply; `done` ends when that is generated, and `answered` once the client has it."""

    name: str
    ids: Sequence[int]
    reply: Sequence[int]
    done: asyncio.Future[None]
    answered: Callable[[], Awaitable[None]]
    arrived: float = 0.0
    waited: float = 0.0
    cached: int = 0


class PrefixCache:
    """Pages by a hash of all tokens up to their end; a page is used just after those behind it in a prompt,
    so the least recently used one is never needed by another."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._pages: OrderedDict[int, None] = OrderedDict()

    @property
    def tokens(self) -> int:
        return len(self._pages) * self._page

    def match(self, ids: Sequence[int]) -> int:
        """Return how many tokens at the start are held."""
        held = 0
        for name in self._names(ids):
            if name not in self._pages:
                break
            held += self._page
        return held

    def add(self, ids: Sequence[int], most: int) -> None:
        """Hold all whole pages, at most `most` tokens in all."""
        for name in reversed(self._names(ids)):
            self._pages[name] = None
            self._pages.move_to_end(name)
        while self.tokens > most and self._pages:
            self._pages.popitem(last=False)

    def _names(self, ids: Sequence[int]) -> list[int]:
        raw, width, name, names = array("q", ids).tobytes(), 8 * self._page, 0, []
        for start in range(0, len(raw) - width + 1, width):
            name = hash((name, raw[start : start + width]))
            names.append(name)
        return names


@dataclass
class Rank:
    """One rank, and what it has done so far."""

    clock: Clock
    hardware: Hardware
    requests: list[Request] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    running: dict[str, int] = field(default_factory=dict)
    busy: bool = False
    #: (seconds, requests queued or running) at every change
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.hardware.page)

    @property
    def tokens(self) -> int:
        """Tokens of the requests that run or wait."""
        return sum(self.running.values()) + sum(len(each.ids) for each in self.queue)

    def submit(self, request: Request) -> None:
        request.arrived = self.clock.now
        self.requests.append(request)
        self.queue.append(request)
        self._note()
        self._next()

    def _next(self) -> None:
        """Start computing the next prompt, if the rank is free and it fits."""
        if self.busy or not self.queue:
            return
        request, hardware = self.queue[0], self.hardware
        size = len(request.ids) + len(request.reply)
        full = sum(self.running.values()) + size > hardware.memory or len(self.running) >= hardware.slots
        if full and self.running:
            return
        self.queue.popleft()
        self.busy = True
        self.running[request.name] = size
        request.waited = self.clock.now - request.arrived
        request.cached = min(self.cache.match(request.ids), len(request.ids) - 1)
        seconds = hardware.overhead + (len(request.ids) - request.cached) / hardware.prefill
        self.clock.at(self.clock.now + seconds, lambda: self._computed(request))

    def _computed(self, request: Request) -> None:
        self.busy = False
        self.cache.add(request.ids, self.hardware.memory)
        self.clock.at(
            self.clock.now + len(request.reply) / self.hardware.decode, lambda: self._generated(request)
        )
        self._next()

    def _generated(self, request: Request) -> Awaitable[None]:
        self.cache.add([*request.ids, *request.reply], self.hardware.memory)
        del self.running[request.name]
        self._note()
        request.done.set_result(None)
        self._next()
        return request.answered()

    def _note(self) -> None:
        self.history.append((self.clock.now, len(self.running) + len(self.queue)))


class SimServer:
    """An engine with some ranks behind SGLang's endpoints. `expected` names the request under way."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.url = ""
        self._next = itertools.cycle(range(len(ranks)))
        self._expected: dict[str, tuple[Request, asyncio.Future[None]]] = {}

    def expect(self, request: Request, arrived: asyncio.Future[None]) -> None:
        """Say what a request will be, by its name in the body; `arrived` ends when it is here."""
        self._expected[request.name] = (request, arrived)

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/server_info", self._info),
                web.get("/get_server_info", self._info),
                web.get("/model_info", self._model),
                web.get("/get_model_info", self._model),
                web.get("/get_load", self._load),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        rank = body.get("data_parallel_rank", body.get("routed_dp_rank"))
        expected, arrived = self._expected.pop(body["rid"])
        assert list(body["input_ids"]) == list(expected.ids)
        self.ranks[next(self._next) if rank is None else rank].submit(expected)
        arrived.set_result(None)
        await expected.done
        meta = {"id": expected.name, "finish_reason": {"type": "length"}, "cached_tokens": expected.cached}
        return web.Response(
            body=orjson.dumps({"text": "", "output_ids": list(expected.reply), "meta_info": meta}),
            content_type="application/json",
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _info(self, request: web.Request) -> web.Response:
        # no model's name: routers that know one ask a hub for its tokenizer
        return web.json_response({"dp_size": len(self.ranks), "version": "0.5.9"})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response({"is_generation": True})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "dp_rank": number,
                    "num_reqs": len(rank.running) + len(rank.queue),
                    "num_waiting_reqs": len(rank.queue),
                    "num_tokens": rank.tokens,
                }
                for number, rank in enumerate(self.ranks)
            ]
        )
