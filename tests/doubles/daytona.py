"""Daytona's control plane as the SDK 0.x calls it: sandboxes, their states, timers, labels, logs and events.

Wire format: the generated clients in the SDK's wheel (`daytona_api_client_async`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import socketio  # type: ignore[import-untyped]
from aiohttp import web

from doubles.faults import watch
from doubles.images import BuildError, Template, parse_dockerfile
from doubles.machines import Machine
from doubles.world import World

_CHANGING = frozenset(
    {"creating", "pending_build", "building_snapshot", "pulling_snapshot", "starting", "stopping"}
)


@dataclass(eq=False)
class Box:
    """A sandbox of the control plane. Intervals are in the vendor's minutes, times in epoch seconds."""

    id: str
    body: dict[str, Any]
    state: str
    labels: dict[str, str]
    created: float = field(default_factory=time.time)
    active: float = field(default_factory=time.time)
    stopped: float | None = None
    deleted: float | None = None
    error: str | None = None
    machine: Machine | None = None
    logs: list[str] = field(default_factory=list)
    auto_stop: int = 15
    auto_delete: int = -1
    ttl: int = 0
    stuck: bool = False


class Daytona:
    """The sandboxes of one run, and what happens to them by themselves."""

    def __init__(self, world: World, sio: socketio.AsyncServer) -> None:
        self.world = world
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self._sio = sio
        world.spawn(self._timers())

    def get(self, name: str) -> Box:
        """Return a sandbox by id or name; 404 once it is gone."""
        for box in self.boxes.values():
            if name in (box.id, box.body.get("name")) and box.state != "destroyed":
                return box
        raise problem(404, f"Sandbox with ID or name {name} not found")

    @property
    def live(self) -> list[Box]:
        """The sandboxes that take a place."""
        return [box for box in self.boxes.values() if box.state != "destroyed"]

    def create(self, body: dict[str, Any]) -> Box:
        """Take in a new sandbox; it comes up by itself."""
        options = self.world.options
        if options.most_live is not None and len(self.live) >= options.most_live:
            raise problem(options.most_live_status, options.most_live_text)
        for name in ("cpu", "memory", "disk"):
            if name in body and type(body[name]) is not int:
                raise problem(400, f"{name} must be an integer number")
        if body.get("snapshot") and not body["snapshot"].startswith("daytona"):
            if self.snapshots.get(body["snapshot"], {}).get("state") != "active":
                raise problem(404, f"Snapshot {body['snapshot']} not found")
            if any(name in body for name in ("cpu", "memory", "disk")):
                raise problem(400, "Cannot specify Sandbox resources when using a snapshot")
        state = "pending_build" if body.get("buildInfo") else "creating"
        box = Box(secrets.token_hex(8), body, state, dict(body.get("labels") or {}))
        box.auto_stop = body.get("autoStopInterval", 15)
        box.auto_delete = body.get("autoDeleteInterval", -1)
        box.ttl = body.get("ttlMinutes") or 0
        self.boxes[box.id] = box
        self.world.count("daytona_creates")
        self.world.peak("daytona_peak", len(self.live))
        self.world.spawn(self._come_up(box))
        return box

    async def _come_up(self, box: Box) -> None:
        step = self.world.options.step
        fail = self.world.options.fail_state
        try:
            await asyncio.sleep(step)
            if box.body.get("buildInfo"):
                await self.move(box, "building_snapshot")
                template = await self.build(box.body["buildInfo"]["dockerfileContent"], box.logs)
            else:
                await self.move(box, "pulling_snapshot")
                template = await self._template_of(box.body.get("snapshot"))
            await asyncio.sleep(step)
            await self.move(box, "starting")
            if fail is not None:
                raise BuildError(f"the runner failed ({fail})")
            box.machine = await self.world.machines.create(
                template.root,
                machine_id=box.id,
                network=not box.body.get("networkBlockAll"),
                env={**template.env, **(box.body.get("env") or {})},
                workdir=template.workdir if template.workdir != "/" else "/root",
                user=box.body.get("user") or template.user,
            )
            await asyncio.sleep(step)
            box.active = time.time()
            await self.move(box, "started")
        except BuildError as error:
            box.error = str(error)
            await self.move(box, fail or "build_failed")

    async def _template_of(self, snapshot: str | None) -> Template:
        if snapshot in self.snapshots:
            return await self.build(self.snapshots[snapshot]["buildInfo"]["dockerfileContent"], [])
        base = await self.world.images.base("daytona")
        return Template(base.key, base.root, user="daytona", workdir="/home/daytona")

    async def build(self, dockerfile: str, logs: list[str]) -> Template:
        """Build an image; what is built already is not built again."""
        base, steps = parse_dockerfile(dockerfile)
        before = self.world.images.builds
        try:
            template = await self.world.images.build(base, steps, log=logs.append)
        finally:
            self.world.counts["image_builds"] = self.world.images.builds
        if self.world.images.builds == before:
            logs.append("CACHED")
        return template

    async def move(self, box: Box, state: str) -> None:
        """Change the state and say so to who listens."""
        old, box.state = box.state, state
        if self.world.options.events:
            event = {"sandbox": self.json(box), "oldState": old, "newState": state}
            await self._sio.emit("sandbox.state.updated", event)

    async def stop(self, box: Box) -> None:
        """Stop it; its files stay."""
        await self.move(box, "stopping")
        if box.machine is not None:
            await box.machine.stop()
        box.stopped = time.time()
        await self.move(box, "stopped")

    async def start(self, box: Box) -> None:
        """Start it over its files."""
        await self.move(box, "starting")
        assert box.machine is not None
        await box.machine.start()
        box.active, box.stopped = time.time(), None
        await self.move(box, "started")

    async def destroy(self, box: Box) -> None:
        """Delete it; it is listed for a while where lists lag."""
        await self.move(box, "destroying")
        if self.world.options.stuck_deletes > 0:
            self.world.options.stuck_deletes -= 1
            box.stuck = True
            return
        await self.world.machines.delete(box.id)
        box.deleted = time.time()
        self.world.count("daytona_deletes")
        await self.move(box, "destroyed")

    async def _timers(self) -> None:
        while True:
            minute = self.world.options.minute
            await asyncio.sleep(min(0.5, minute / 4))
            now = time.time()
            for box in list(self.live):
                if box.state == "started" and 0 < box.auto_stop * minute < now - box.active:
                    await (self.destroy(box) if box.auto_delete == 0 else self.stop(box))
                    continue
                forgotten = box.state == "stopped" and 0 < box.auto_delete * minute < now - (
                    box.stopped or now
                )
                over = box.ttl and now - box.created > box.ttl * minute and box.state not in _CHANGING
                if forgotten or over:
                    await self.destroy(box)

    def listed(self, labels: dict[str, str]) -> list[Box]:
        """Return what a list shows now, oldest first."""
        lag, now = self.world.options.list_lag, time.time()
        found = []
        for box in self.boxes.values():
            fresh = now - box.created < lag
            ghost = box.deleted is not None and now - box.deleted < lag
            gone = box.state == "destroyed" and not ghost
            if not fresh and not gone and labels.items() <= box.labels.items():
                found.append(box)
        return found

    def json(self, box: Box, listed: bool = False) -> dict[str, Any]:
        """Return the sandbox as the API shows it."""
        body = box.body
        shown = {
            "id": box.id,
            "organizationId": "org",
            "name": body.get("name") or box.id,
            "user": body.get("user") or "daytona",
            "env": body.get("env") or {},
            "labels": box.labels,
            "public": bool(body.get("public")),
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "networkAllowList": body.get("networkAllowList"),
            "domainAllowList": body.get("domainAllowList"),
            "kvm": False,
            "target": body.get("target") or "us",
            "cpu": body.get("cpu", 1),
            "gpu": 0,
            "memory": body.get("memory", 1),
            "disk": body.get("disk", 3),
            "state": "started" if listed and box.deleted else box.state,
            "errorReason": box.error,
            "autoStopInterval": box.auto_stop,
            "autoDeleteInterval": box.auto_delete,
            "createdAt": _iso(box.created),
            "updatedAt": _iso(time.time()),
            "lastActivityAt": _iso(box.active),
            "toolboxProxyUrl": self.world.urls["daytona"] + "/toolbox",
        }
        if listed:
            del shown["env"], shown["kvm"]
        return {name: value for name, value in shown.items() if value is not None}


def problem(status: int, message: str, **more: Any) -> web.HTTPException:
    """Return an error as the API words it."""
    body = {"statusCode": status, "message": message, **more}
    known: dict[int, Any] = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 403: web.HTTPForbidden}
    known |= {404: web.HTTPNotFound, 408: web.HTTPRequestTimeout, 409: web.HTTPConflict}
    known |= {429: web.HTTPTooManyRequests, 502: web.HTTPBadGateway}
    error: web.HTTPException = known[status](text=json.dumps(body), content_type="application/json")
    return error


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def authorized(world: World, request: web.Request) -> None:
    """Refuse a request without the run's key."""
    if request.headers.get("Authorization") != f"Bearer {world.key}" or not world.options.accept_key:
        raise problem(401, "Unauthorized")


def make_app(world: World) -> web.Application:
    """Return the control plane, the toolbox and the build logs."""
    from doubles.daytona_toolbox import add_toolbox

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
        if box.state in _CHANGING:
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
        body, now = await request.json(), _iso(time.time())
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
