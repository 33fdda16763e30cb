"""Replays a trace of agents on simulated engines, through a router over HTTP or by a call in the process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson
from router_trace import Session, Trace
from sim_engine import Clock, Rank, Request, SimServer

from rollhook import plugins
from rollhook.engine.server_info import RankLoad
from rollhook.router import RouteRequest, Worker
from rollhook.routing import build_chain, chain_names
from rollhook.session.fleet import Fleet, Route
from rollhook.session.workers import Gate
from rollhook.testing.environment import build_context

ENGINES = 2
RANKS = 4
VOCABULARY = 128_000


@dataclass(frozen=True)
class Result:
    """What a replay came to; times are simulated seconds.

    `hit_rate` is the share of prompt tokens that were cached. `imbalance` is how many requests, queued or
    running, the fullest rank has over the mean of all, both averaged over time. `queue_*` is how long
    requests waited before their prompts were computed; `seconds` is when the last reply was there.
    """

    hit_rate: float
    imbalance: float
    queue_mean: float
    queue_p99: float
    seconds: float

    @classmethod
    def of(cls, ranks: Sequence[Rank]) -> Result:
        requests = [request for rank in ranks for request in rank.requests]
        waited = np.array([request.waited for request in requests])
        prompts = sum(len(request.ids) for request in requests)
        end = max(rank.history[-1][0] for rank in ranks if rank.history)
        times = np.unique(np.concatenate([[at for at, _ in rank.history] or [0.0] for rank in ranks]))
        counts = np.array([_at(rank, times) for rank in ranks])
        spans, mean, most = np.diff(times), counts.mean(axis=0)[:-1], counts.max(axis=0)[:-1]
        return cls(
            hit_rate=sum(request.cached for request in requests) / prompts,
            imbalance=float((most * spans).sum() / (mean * spans).sum()),
            queue_mean=float(waited.mean()),
            queue_p99=float(np.quantile(waited, 0.99)),
            seconds=end,
        )


def _at(rank: Rank, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many requests a rank had from each of these times on."""
    if not rank.history:
        return np.zeros(len(times))
    at, counts = (np.array(column) for column in zip(*rank.history, strict=True))
    found = np.searchsorted(at, times, side="right") - 1
    return np.where(found >= 0, counts[found], 0)


class Router(Protocol):
    """What a replay asks for every turn. `send` ends when the request is answered; see `Replay`."""

    def send(self, session: Session, request: Request, arrived: asyncio.Future[None]) -> Awaitable[None]: ...

    async def leave(self, session: Session) -> None: ...


class Replay:
    """Plays sessions: a turn is sent, arrives, is computed, generated and answered; then the tool runs."""

    def __init__(self, trace: Trace, clock: Clock, router: Router) -> None:
        self._trace = trace
        self._clock = clock
        self._router = router
        self._waiting = iter(trace.sessions)
        self._system = span("system", trace.system)

    async def run(self) -> None:
        for session in itertools.islice(self._waiting, self._trace.concurrency):
            self._begin(session)
        await self._clock.run()

    def _begin(self, session: Session) -> None:
        ids = [*self._system, *span(session.group, session.task), *span(session.name, session.own)]
        self._clock.at(self._clock.now, lambda: self._turn(session, 0, ids))

    async def _turn(self, session: Session, number: int, ids: list[int]) -> None:
        """Send a turn and return once it is at an engine; what follows is planned for when it is done."""
        loop = asyncio.get_running_loop()
        turn, name = session.turns[number], f"{session.name}/{number}"
        arrived: asyncio.Future[None] = loop.create_future()

        async def answered() -> None:
            await sent
            if number + 1 == len(session.turns):
                await self._router.leave(session)
                if (following := next(self._waiting, None)) is not None:
                    self._begin(following)
                return
            grown = [*ids, *request.reply, *span(f"{name}/tool", turn.tool_tokens)]
            later = self._clock.now + turn.tool_seconds
            self._clock.at(later, lambda: self._turn(session, number + 1, grown))

        request = Request(name, ids, span(name, turn.reply), loop.create_future(), answered)
        sent = asyncio.ensure_future(self._router.send(session, request, arrived))
        await asyncio.wait({sent, arrived}, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.done():
            await sent  # raises what went wrong
            raise RuntimeError(f"{name} was answered, but came to no engine")


def span(name: str, length: int) -> list[int]:
    """Return the ids of a span: its own, the same ones every time."""
    seed = int.from_bytes(orjson.dumps(name).ljust(8, b"."), "big")
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()  # type: ignore[no-any-return]


class Well:
    """Engines that are always well."""

    async def health(self, worker: Worker) -> bool:
        return True

    async def weight_version(self, worker: Worker) -> int:
        return 1

    async def load(self, worker: Worker) -> list[RankLoad]:
        return []


class InProcess:
    """A chain of Rollhook's policies, asked as a rollout asks it; no HTTP."""

    def __init__(self, use: str, ranks: Sequence[Rank], keys: dict[str, Any] | None = None) -> None:
        loaded = plugins.load([("router", name) for name in chain_names(use)])
        chain = build_chain(use, keys or {}, loaded, build_context())
        self.fleet = Fleet(chain, Well(), Gate(lambda: 0.0), now=lambda: 0.0)
        self._ranks = {worker_of(number): rank for number, rank in enumerate(ranks)}
        self.fleet.set_workers(list(self._ranks), 1)
        self._routes: dict[str, Route] = {}

    async def send(self, session: Session, request: Request, arrived: asyncio.Future[None]) -> None:
        asked = RouteRequest(session.name, session.group, request.ids, len(request.ids) + len(request.reply))
        route = self._routes.get(session.name) or self.fleet.enter(asked)
        self._routes[session.name] = route
        entry = await self.fleet.worker(route, set(), 0, request.ids)
        with self.fleet.sending(entry, asked.expected_tokens):
            self._ranks[entry.worker].submit(request)
            arrived.set_result(None)
            await request.done

    async def leave(self, session: Session) -> None:
        self.fleet.leave(self._routes.pop(session.name))


class OverHttp:
    """A router behind an address, before engines that are real servers with simulated time."""

    def __init__(
        self, url: str, servers: Sequence[SimServer], http: aiohttp.ClientSession, *, told: bool = False
    ) -> None:
        self._url = url
        self._servers = servers
        self._http = http
        self._told = told

    async def send(self, session: Session, request: Request, arrived: asyncio.Future[None]) -> None:
        for server in self._servers:
            server.expect(request, arrived)
        params = {"max_new_tokens": len(request.reply), "temperature": 0.0}
        body = {"rid": request.name, "input_ids": request.ids, "sampling_params": params, "stream": False}
        headers = {"X-SMG-Routing-Key": session.name, "Content-Type": "application/json"}
        async with self._http.post(
            f"{self._url}/generate", data=orjson.dumps(body), headers=headers
        ) as response:
            text = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{self._url} answered {response.status}: {text[:200]!r}")

    async def leave(self, session: Session) -> None:
        """Say that a session is over, where the router can be told."""
        if self._told:
            async with self._http.delete(f"{self._url}/sessions/{session.name}") as response:
                await response.read()


def worker_of(number: int) -> Worker:
    return Worker(f"http://engine-{number // RANKS}", number % RANKS)
