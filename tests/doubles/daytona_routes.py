"""The requests of Daytona's control plane, and the application with its toolbox and build logs."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

import socketio  # type: ignore[import-untyped]
from aiohttp import web

from doubles.daytona import CHANGING, Daytona, authorized, iso, problem
from doubles.daytona_toolbox import add_toolbox
from doubles.faults import watch
from doubles.images import BuildError
from doubles.world import World


def make_app(world: World) -> web.Application:
    """Return the control plane, the toolbox and the build logs."""

    @web.middleware
    async def keyed(request: web.Request, handler: Any) -> web.StreamResponse:
        if "/socket.io" not in request.path:
            authorized(world, request)
        answer = await handler(request)
        assert isinstance(answer, web.StreamResponse)
        return answer

    app = web.Application(middlewares=[watch(world, "daytona"), keyed], client_max_size=1 << 40)
    sio = socketio.AsyncServer(async_mode="aiohttp", cors_allowed_origins="*")
    sio.attach(app, socketio_path="/api/socket.io")

    @sio.event  # type: ignore[untyped-decorator]
    async def connect(sid: str, environ: Any, auth: dict[str, Any]) -> bool:
        return world.options.events and (auth or {}).get("token") == world.key

    plane = Daytona(world, sio)
    app.add_routes(_sandbox_routes(plane))
    app.add_routes(_state_routes(plane))
    app.add_routes(_snapshot_routes(plane))
    add_toolbox(app, plane)
    return app


def _sandbox_routes(plane: Daytona) -> web.RouteTableDef:
    routes = web.RouteTableDef()

    @routes.post("/api/sandbox")
    async def create(request: web.Request) -> web.Response:
        body = request["entry"]["body"] = await request.json()
        return web.json_response(plane.json(plane.create(body)))

    @routes.get("/api/sandbox")
    async def listing(request: web.Request) -> web.Response:
        labels = json.loads(request.query.get("labels") or "{}")
        after = int(request.query.get("cursor") or 0)
        size = min(int(request.query.get("limit") or 100), plane.world.options.page)
        found = plane.listed(labels)
        items = [plane.json(box, listed=True) for box in found[after : after + size]]
        more = str(after + size) if len(found) > after + size else None
        return web.json_response({"items": items, "nextCursor": more})

    @routes.get("/api/sandbox/{id}")
    async def get(request: web.Request) -> web.Response:
        return web.json_response(plane.json(plane.get(request.match_info["id"])))

    @routes.delete("/api/sandbox/{id}")
    async def delete(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        if box.state in CHANGING:
            raise problem(409, "Sandbox state change in progress")
        if box.state != "destroying":
            plane.world.spawn(plane.destroy(box))
            while box.state not in ("destroying", "destroyed"):
                await asyncio.sleep(0)
        elif box.stuck:  # asked again, it goes
            box.stuck = False
            plane.world.spawn(plane.destroy(box))
        return web.json_response(plane.json(box))

    @routes.put("/api/sandbox/{id}/labels")
    async def labels(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        box.labels = (await request.json())["labels"]
        return web.json_response({"labels": box.labels})

    @routes.post("/api/sandbox/{id}/last-activity")
    async def activity(request: web.Request) -> web.Response:
        plane.get(request.match_info["id"]).active = time.time()
        return web.Response(status=201)

    @routes.get("/api/sandbox/{id}/toolbox-proxy-url")
    async def toolbox_url(request: web.Request) -> web.Response:
        plane.get(request.match_info["id"])
        return web.json_response({"url": plane.world.urls["daytona"] + "/toolbox"})

    @routes.get("/api/sandbox/{id}/build-logs-url")
    async def logs_url(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        return web.json_response({"url": f"{plane.world.urls['daytona']}/logs/{box.id}"})

    @routes.get("/logs/{id}")
    async def logs(request: web.Request) -> web.StreamResponse:
        box = plane.get(request.match_info["id"])
        stream = web.StreamResponse()
        stream.content_type = "text/plain"
        await stream.prepare(request)
        sent = 0
        while True:
            done = box.state not in ("pending_build", "building_snapshot")
            for line in box.logs[sent:]:
                await stream.write(line.encode() + b"\n")
            sent = len(box.logs)
            if done or "follow" not in request.query:
                return stream
            await asyncio.sleep(0.01)

    return routes


def _state_routes(plane: Daytona) -> web.RouteTableDef:
    routes = web.RouteTableDef()

    @routes.post("/api/sandbox/{id}/start")
    async def start(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        if box.state == "stopped":
            plane.world.spawn(plane.start(box))
        return web.json_response(plane.json(box))

    @routes.post("/api/sandbox/{id}/stop")
    async def stop(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        if box.state == "started":
            plane.world.spawn(plane.stop(box))
        return web.json_response(plane.json(box))

    @routes.post("/api/sandbox/{id}/{timer:autostop|autodelete|ttl}/{minutes}")
    async def timer(request: web.Request) -> web.Response:
        box = plane.get(request.match_info["id"])
        names = {"autostop": "auto_stop", "autodelete": "auto_delete", "ttl": "ttl"}
        setattr(box, names[request.match_info["timer"]], int(request.match_info["minutes"]))
        return web.json_response(plane.json(box))

    return routes


def _snapshot_routes(plane: Daytona) -> web.RouteTableDef:
    routes = web.RouteTableDef()

    def get(name: str) -> dict[str, Any]:
        if name not in plane.snapshots:
            raise problem(404, f"Snapshot {name} not found")
        return plane.snapshots[name]

    async def build(snapshot: dict[str, Any]) -> None:
        await asyncio.sleep(plane.world.options.step)
        snapshot["state"] = "building"
        try:
            await plane.build(snapshot["buildInfo"]["dockerfileContent"], snapshot["logs"])
        except BuildError as error:
            snapshot["state"], snapshot["errorReason"] = "build_failed", str(error)
        else:
            snapshot["state"] = "active"

    def shown(snapshot: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in snapshot.items() if name not in ("logs", "buildInfo")}

    @routes.post("/api/snapshots")
    async def create(request: web.Request) -> web.Response:
        body, now = await request.json(), iso(time.time())
        if body["name"] in plane.snapshots:
            raise problem(409, f'Snapshot with name "{body["name"]}" already exists')
        snapshot = plane.snapshots[body["name"]] = {
            "id": secrets.token_hex(8),
            "general": False,
            "name": body["name"],
            "state": "pending",
            "size": None,
            "entrypoint": None,
            "cpu": body.get("cpu", 1),
            "gpu": 0,
            "mem": body.get("memory", 1),
            "disk": body.get("disk", 3),
            "errorReason": None,
            "createdAt": now,
            "updatedAt": now,
            "lastUsedAt": None,
            "sourceSandboxId": None,
            "buildInfo": body["buildInfo"],
            "logs": [],
        }
        plane.world.count("daytona_snapshots")
        plane.world.spawn(build(snapshot))
        return web.json_response(shown(snapshot))

    @routes.get("/api/snapshots/{name}")
    async def one(request: web.Request) -> web.Response:
        return web.json_response(shown(get(request.match_info["name"])))

    @routes.delete("/api/snapshots/{name}")
    async def delete(request: web.Request) -> web.Response:
        del plane.snapshots[get(request.match_info["name"])["name"]]
        return web.Response(status=204)

    @routes.get("/api/snapshots/{name}/build-logs-url")
    async def logs_url(request: web.Request) -> web.Response:
        get(request.match_info["name"])
        return web.json_response(
            {"url": f"{plane.world.urls['daytona']}/snapshot-logs/{request.match_info['name']}"}
        )

    @routes.get("/snapshot-logs/{name}")
    async def logs(request: web.Request) -> web.Response:
        return web.Response(text="\n".join(get(request.match_info["name"])["logs"]) + "\n")

    return routes
