"""E2B's control plane: sandboxes of both generations of the API. Templates are in `e2b_templates`.

The wire is that of the SDK's generated client (e2b 2.53 to 2.63); errors are `{code, message}`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from doubles import e2b_state, e2b_templates
from doubles.e2b_state import DOMAIN, ENVD_VERSION, Box, Refusal, stamp
from doubles.faults import watch
from doubles.world import World

_MOST_SECONDS = 24 * 3600


def make_app(world: World) -> web.Application:
    """Return the control plane."""
    state = e2b_state.of(world)
    routes = web.RouteTableDef()

    @routes.post("/sandboxes")
    @routes.post("/v2/sandboxes")
    async def create(request: web.Request) -> web.Response:
        body = await _body(request)
        if not body.get("templateID"):
            raise Refusal(400, "Error when parsing request: templateID is required")
        if not 0 <= float(body.get("timeout", 300)) <= _MOST_SECONDS:
            raise Refusal(400, "Timeout cannot be greater than 24 hours")
        box = await state.create(body, request.headers.get("Idempotency-Key"))
        return web.json_response(_created(box), status=201)

    @routes.post("/sandboxes/{id}/connect")
    @routes.post("/v2/sandboxes/{id}/connect")
    @routes.post("/sandboxes/{id}/resume")
    async def connect(request: web.Request) -> web.Response:
        box = state.get(request.match_info["id"])
        paused = box.state == "paused"
        if request.path.endswith("/resume") and not paused:
            raise Refusal(409, f"Sandbox '{box.id}' is already running")
        state.resume(box, float((await _body(request)).get("timeout", 300)))
        return web.json_response(_created(box), status=201 if paused else 200)

    @routes.get("/sandboxes/{id}")
    async def info(request: web.Request) -> web.Response:
        return web.json_response(_listed(state.get(request.match_info["id"])))

    @routes.get("/sandboxes")
    async def list_all(request: web.Request) -> web.Response:
        return web.json_response([_listed(box) for box in _wanted(request, state) if box.state == "running"])

    @routes.get("/v2/sandboxes")
    async def list_pages(request: web.Request) -> web.Response:
        found = _wanted(request, state)
        if token := request.query.get("nextToken"):
            started, _, last = token.partition("_")
            found = [box for box in found if (-box.started_at, box.id) > (-float(started), last)]
        size = min(world.options.page, int(request.query.get("limit", 100)))
        page, headers = found[:size], {}
        if len(found) > size:
            headers["X-Next-Token"] = f"{page[-1].started_at!r}_{page[-1].id}"
        return web.json_response([_listed(box) for box in page], headers=headers)

    @routes.delete("/sandboxes/{id}")
    async def kill(request: web.Request) -> web.Response:
        box = state.get(request.match_info["id"])
        if world.options.stuck_deletes > 0:
            world.options.stuck_deletes -= 1
            raise Refusal(500, "Error killing sandbox")
        await state.end(box)
        return web.Response(status=204)

    @routes.post("/sandboxes/{id}/timeout")
    async def timeout(request: web.Request) -> web.Response:
        box = state.get(request.match_info["id"])
        box.end_at = time.time() + float((await _body(request))["timeout"])
        return web.Response(status=204)

    @routes.post("/sandboxes/{id}/pause")
    async def pause(request: web.Request) -> web.Response:
        box = state.get(request.match_info["id"])
        if box.state == "paused":
            raise Refusal(409, f"Sandbox '{box.id}' cannot be paused while in 'paused' state")
        await state.pause(box)
        return web.Response(status=204)

    @routes.get("/sandboxes/{id}/metrics")
    async def metrics(request: web.Request) -> web.Response:
        state.get(request.match_info["id"])
        return web.json_response([])

    app = web.Application(middlewares=[watch(world, "e2b_api"), _answers(world)], client_max_size=1 << 40)
    app.add_routes(routes)
    app.add_routes(e2b_templates.routes(world, state))
    return app


def _answers(world: World) -> Any:
    """Return the middleware that wants the key and turns refusals into answers."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        keyed = request.headers.get("X-API-KEY") == world.key and world.options.accept_key
        if not keyed and not request.path.startswith("/upload/"):
            return _error(401, "Invalid API key, please visit the dashboard to get your API key.")
        try:
            return await handler(request)
        except Refusal as refusal:
            return _error(refusal.status, str(refusal))

    return middleware


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise Refusal(400, f"Error when parsing request: {error}") from None
    assert isinstance(body, dict)
    return body


def _wanted(request: web.Request, state: e2b_state.State) -> list[Box]:
    wanted = filter_of(request.query.get("metadata", ""))
    states = {word for value in request.query.getall("state", []) for word in value.split(",")}
    return [
        box
        for box in state.listed()
        if wanted.items() <= box.metadata.items() and (not states or box.state in states or box.ended_at)
    ]


def filter_of(text: str) -> dict[str, str]:
    """Return the labels of a metadata filter, which clients encode several times over."""
    return {unquote(name): unquote(value) for name, value in parse_qsl(text, keep_blank_values=True)}


def _created(box: Box) -> dict[str, Any]:
    return {
        "sandboxID": box.id,
        "templateID": box.template_id,
        "clientID": "double",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": box.token,
        "domain": DOMAIN,
        "trafficAccessToken": None,
    }


def _listed(box: Box) -> dict[str, Any]:
    return {
        "sandboxID": box.id,
        "templateID": box.template_id,
        "clientID": "double",
        "cpuCount": box.build.cpus,
        "memoryMB": box.build.memory_mib,
        "diskSizeMB": 1024,
        "startedAt": stamp(box.started_at),
        "endAt": stamp(box.end_at),
        "envdVersion": ENVD_VERSION,
        "state": "running" if box.state == "ended" else box.state,
        "metadata": box.metadata,
    }
