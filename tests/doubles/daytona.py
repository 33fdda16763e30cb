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

from doubles.images import BuildError, Template, parse_dockerfile
from doubles.machines import Machine
from doubles.world import World

#: states in which nothing else may be asked of a sandbox
CHANGING = frozenset(
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
                over = box.ttl and now - box.created > box.ttl * minute and box.state not in CHANGING
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
            "createdAt": iso(box.created),
            "updatedAt": iso(time.time()),
            "lastActivityAt": iso(box.active),
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


def iso(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def authorized(world: World, request: web.Request) -> None:
    """Refuse a request without the run's key."""
    if request.headers.get("Authorization") != f"Bearer {world.key}" or not world.options.accept_key:
        raise problem(401, "Unauthorized")
