"""The worker API of SGLang's router, the older forms with a query, and what is asked of all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web

from rollhook.engine.client import EngineClient
from rollhook.engine.server_info import RankLoad
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.router_server.answers import json, refusal
from rollhook.router_server.engines import Engine, Engines
from rollhook.router_server.names import parse_name, worker_id, worker_name
from rollhook.router_server.pool import Pool
from rollhook.session.workers import Entry


class Admin:
    """Lists, adds, drains and removes workers; asks every engine once, whatever its ranks."""

    def __init__(self, pool: Pool, engines: Engines, client: EngineClient) -> None:
        self._pool = pool
        self._engines = engines
        self._client = client

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        one = "/workers/{worker:.+}"
        return [
            web.post("/workers", self._add),
            web.get("/workers", self._list),
            web.get(one, self._show),
            web.put(one, self._change),
            web.patch(one, self._change),
            web.delete(one, self._remove),
            web.post("/add_worker", self._add_by_query),
            web.post("/remove_worker", self._remove_by_query),
            web.get("/list_workers", self._list_names),
            web.delete("/sessions/{session:.+}", self._forget),
            web.post("/flush_cache", self._flush),
            web.post("/abort_request", self._abort),
            web.get("/get_loads", self._loads),
        ]

    # -- the worker API

    async def _add(self, request: web.Request) -> web.Response:
        body = await _object(request)
        if body is None or not isinstance(body.get("url"), str):
            return refusal(400, 'the body must be a JSON object with the engine\'s "url"', "invalid_body")
        return self._register(body["url"])

    def _register(self, name: str) -> web.Response:
        try:
            worker = parse_name(name)
        except ValueError as error:
            return refusal(400, str(error), "invalid_url")
        self._engines.register(worker)
        location = f"/workers/{worker_id(worker)}"
        answer = json(
            {
                "status": "accepted",
                "worker_id": worker_id(worker),
                "url": worker_name(worker),
                "location": location,
                "message": "the worker is routable once it is healthy; its location says when",
            },
            202,
        )
        answer.headers["Location"] = location
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        rows = [self._row(entry) for entry in self._pool.table]
        stats = {"regular_count": len(rows), "prefill_count": 0, "decode_count": 0}
        return json({"workers": rows, "total": len(rows), "stats": stats})

    async def _show(self, request: web.Request) -> web.Response:
        worker = self._find(request)
        if worker is None:
            return _unknown(request)
        entry, engine = self._pool.table.get(worker), self._engines.of(worker)
        row: dict[str, Any] = {"id": worker_id(worker), "url": worker_name(worker)}
        if entry is not None:
            row = self._row(entry)
        if engine is not None:
            row["job_status"] = {
                "job_type": "AddWorker",
                "worker_url": worker_name(worker),
                "status": {"pending": "processing", "ready": "completed", "failed": "failed"}[engine.state],
                "message": engine.problem or None,
            }
        return json(row)

    async def _change(self, request: web.Request) -> web.Response:
        worker, body = self._find(request), await _object(request)
        if worker is None:
            return _unknown(request)
        if body is None or set(body) != {"draining"} or not isinstance(body["draining"], bool):
            return refusal(400, 'only {"draining": true} or false can be set', "invalid_body")
        for entry in self._pool.of(worker):
            entry.draining = body["draining"]
        return json({"status": "accepted", "worker_id": worker_id(worker)}, 202)

    async def _remove(self, request: web.Request) -> web.Response:
        worker = self._find(request)
        if worker is None:
            return _unknown(request)
        self._engines.remove(worker)
        return json({"status": "accepted", "worker_id": worker_id(worker), "message": "removed"}, 202)

    async def _forget(self, request: web.Request) -> web.Response:
        key = request.match_info["session"]
        if self._pool.forget(key):
            return web.Response(status=204)
        return refusal(404, f"no session {key!r} came lately", "session_not_found")

    # -- the forms before 0.2.2

    async def _add_by_query(self, request: web.Request) -> web.Response:
        name = await _queried(request)
        if name is None:
            return refusal(400, "name the engine: /add_worker?url=http://HOST:PORT", "invalid_url")
        answer = self._register(name)
        if answer.status >= 300:
            return answer
        return json({"status": "success", "worker_urls": self._names()})

    async def _remove_by_query(self, request: web.Request) -> web.Response:
        name = await _queried(request)
        try:
            worker = None if name is None else parse_name(name)
        except ValueError as error:
            return refusal(400, str(error), "invalid_url")
        if worker is None:
            return refusal(400, "name the engine: /remove_worker?url=http://HOST:PORT", "invalid_url")
        if not self._known(worker):
            return refusal(404, f"no worker {name!r} is registered", "WORKER_NOT_FOUND")
        self._engines.remove(worker)
        return json({"status": "success", "worker_urls": self._names()})

    async def _list_names(self, request: web.Request) -> web.Response:
        return json({"urls": self._names()})

    # -- asked of all

    async def _flush(self, request: web.Request) -> web.Response:
        problems = await self._all(self._client.flush)
        failed = [{"worker": url, "error": said} for url, said in problems.items() if said]
        successful = [url for url, said in problems.items() if not said]
        answer = {
            "status": "partial_success" if failed else "success",
            "successful": successful,
            "failed": failed,
        }
        return json(answer, 206 if failed else 200)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _object(request)
        rid = (body or {}).get("rid")
        if body is None or not (isinstance(rid, str) or body.get("abort_all")):
            return refusal(400, 'name a request as {"rid": ...}, or {"abort_all": true}', "invalid_body")
        problems = await self._all(lambda worker: self._client.abort(worker, rid))
        failed = {url: said for url, said in problems.items() if said}
        return json({"failed": failed}, 502 if failed else 200)

    async def _loads(self, request: web.Request) -> web.Response:
        found: dict[str, list[RankLoad]] = {}

        async def ask(worker: Worker) -> None:
            found[worker.url] = await self._client.load(worker)

        await self._all(ask)
        rows = [
            {"worker": worker_name(worker), "load": _tokens(found.get(worker.url), worker.dp_rank)}
            for worker in self._pool.table.workers
        ]
        return json({"workers": rows})

    async def _all(self, ask: Callable[[Worker], Awaitable[None]]) -> dict[str, str]:
        """Ask every engine at once; return what went wrong by URL, empty texts where nothing did."""

        async def one(url: str) -> str:
            try:
                await ask(Worker(url))
            except EngineError as error:
                return str(error)
            return ""

        urls = self._engines.urls
        return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

    # -- names and rows

    def _names(self) -> list[str]:
        return [worker_name(worker) for worker in self._pool.table.workers]

    def _known(self, worker: Worker) -> bool:
        return worker in self._pool.table.workers or self._engines.of(worker) is not None

    def _find(self, request: web.Request) -> Worker | None:
        """Return the worker that a path names by id or by name, None when there is none."""
        text = unquote(request.match_info["worker"])
        candidates = [*self._pool.table.workers, *map(Worker, self._engines.urls)]
        return next((each for each in candidates if text in (worker_id(each), worker_name(each))), None)

    def _row(self, entry: Entry) -> dict[str, Any]:
        worker = entry.worker
        engine = self._engines.of(worker) or Engine(worker)
        return {
            "id": worker_id(worker),
            "url": worker_name(worker),
            "base_url": worker.url,
            "dp_rank": worker.dp_rank,
            "model_id": engine.info.model_path or "unknown",
            "worker_type": "regular",
            "connection_mode": "HTTP",
            "priority": 50,
            "cost": 1.0,
            "is_healthy": entry.healthy,
            "draining": entry.draining,
            "circuit_breaker": "open" if entry.breaker.open else "closed",
            "load": entry.requests,
            "sessions": entry.open_sessions,
            "tokens_in_flight": entry.tokens_in_flight,
            "metadata": {"dp_size": str(engine.info.dp_size), "model_path": engine.info.model_path},
        }


def _tokens(loads: list[RankLoad] | None, rank: int | None) -> int:
    """Return the tokens in use on a rank, or on all; -1 where the engine does not say."""
    if loads is None:
        return -1
    return sum(load.tokens for load in loads if rank is None or load.dp_rank == rank)


async def _object(request: web.Request) -> dict[str, Any] | None:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None


async def _queried(request: web.Request) -> str | None:
    """Return the URL of a query, or of a body as some frameworks send it."""
    if name := request.query.get("url") or request.query.get("worker_url"):
        return name
    body = await _object(request) or {}
    name = body.get("url") or body.get("worker_url")
    return name if isinstance(name, str) else None


def _unknown(request: web.Request) -> web.Response:
    return refusal(404, f"no worker {request.match_info['worker']!r}; see GET /workers", "WORKER_NOT_FOUND")
