"""What the E2B surfaces of the double share: sandboxes with their deadlines, templates and their builds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from doubles.images import Template
from doubles.machines import Machine
from doubles.world import World

if TYPE_CHECKING:
    from doubles.e2b_process import Process

ENVD_VERSION = "0.6.13"
DOMAIN = "double.invalid"
_TICK = 0.03
#: what a template build starts as: not root, as in E2B's cloud
BUILD_USER, BUILD_DIRECTORY = "user", "/home/user"


class Refusal(Exception):
    """An answer that is an error: status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Build:
    """A build of a template: waiting, building, ready or error."""

    id: str
    template_id: str
    tags: list[str]
    cpus: int
    memory_mib: int
    status: str = "waiting"
    log: list[dict[str, str]] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    image: Template | None = None
    task: asyncio.Task[None] | None = None

    def say(self, line: str, level: str = "info") -> None:
        """Add a line to the log."""
        self.log.append({"timestamp": stamp(time.time()), "level": level, "message": line})

    def fail(self, message: str, step: str | None = None) -> None:
        """End it with an error."""
        self.status = "error"
        self.reason = {"message": message, "logEntries": self.log[-10:]}
        if step is not None:
            self.reason["step"] = step


@dataclass(eq=False)
class Box:
    """A sandbox."""

    id: str
    template_id: str
    machine: Machine
    metadata: dict[str, str]
    token: str
    build: Build
    started_at: float
    end_at: float
    on_timeout: str = "kill"
    state: str = "running"
    ended_at: float | None = None
    processes: dict[int, Process] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """Whether requests reach its envd."""
        return self.state == "running" and self.machine.alive


class State:
    """All sandboxes and templates of a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.boxes: dict[str, Box] = {}
        self.gone: list[Box] = []
        self.builds: dict[str, Build] = {}
        #: alias -> template id
        self.aliases: dict[str, str] = {"base": "base"}
        #: files uploaded for COPY steps: hash -> path
        self.uploads: dict[str, Any] = {}
        self._keys: dict[str, asyncio.Task[Box]] = {}
        self._creating = 0
        self.builds["base"] = Build("base", "base", ["default"], 2, 512, "ready")
        world.closing.append(self.aclose)
        self._watch = world.spawn(self._deadlines())

    async def create(self, body: dict[str, Any], key: str | None) -> Box:
        """Create a sandbox; a key that was used before gives the same one."""
        making = self._keys.get(key) if key is not None else None
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = asyncio.ensure_future(self._create(body))
            if key is not None:
                self._keys[key] = making
        return await asyncio.shield(making)

    async def _create(self, body: dict[str, Any]) -> Box:
        options = self.world.options
        build = self.resolve(str(body.get("templateID", "base")))
        live = sum(box.state == "running" for box in self.boxes.values()) + self._creating
        if options.most_live is not None and live >= options.most_live:
            raise Refusal(options.most_live_status, options.most_live_text)
        self._creating += 1
        try:
            image = build.image or await self._base()
            await asyncio.sleep(options.step)
            network = body.get("network") or {}
            online = body.get("allow_internet_access") is not False and "0.0.0.0/0" not in (
                network.get("denyOut") or []
            )
            machine = await self.world.machines.create(
                image.root,
                network=online,
                env={**image.env, **(body.get("envVars") or {})},
                workdir=image.workdir,
                user=image.user,
            )
        finally:
            self._creating -= 1
        now = time.time()
        box = Box(
            id=f"i{secrets.token_hex(9)}",
            template_id=build.template_id,
            machine=machine,
            metadata=dict(body.get("metadata") or {}),
            token=f"ea_{secrets.token_hex(12)}",
            build=build,
            started_at=now,
            end_at=now + float(body.get("timeout", 300)),
            on_timeout="pause" if body.get("autoPause") else "kill",
        )
        self.boxes[box.id] = box
        self.world.count("e2b_sandboxes")
        self.world.peak("e2b_most_live", sum(each.state == "running" for each in self.boxes.values()))
        return box

    async def _base(self) -> Template:
        build = self.builds["base"]
        if build.image is None:
            image = await self.world.images.base("base")
            build.image = Template("base", image.root, image.env, BUILD_DIRECTORY, BUILD_USER)
        return build.image

    def resolve(self, reference: str) -> Build:
        """Return the newest ready build that a name, `name:tag` or template id stands for."""
        name, _, tag = reference.partition(":")
        tag = tag or "default"
        template_id = self.aliases.get(name, name)
        known = [build for build in self.builds.values() if build.template_id == template_id]
        if not known:
            raise Refusal(404, f"template '{reference}' not found")
        ready = [build for build in known if build.status == "ready" and tag in build.tags]
        if not ready:
            raise Refusal(404, f"tag '{tag}' does not exist for template '{name}'")
        return ready[-1]

    def get(self, sandbox_id: str) -> Box:
        """Return a sandbox; Refusal(404) for one that is not there."""
        box = self.boxes.get(sandbox_id)
        if box is None:
            raise Refusal(404, f'Sandbox "{sandbox_id}" not found')
        return box

    def listed(self) -> Sequence[Box]:
        """Return what a list shows, newest first: it may lag behind."""
        now, lag = time.time(), self.world.options.list_lag
        seen = [box for box in self.boxes.values() if now - box.started_at >= lag]
        seen += [box for box in self.gone if box.ended_at is not None and now - box.ended_at < lag]
        return sorted(seen, key=lambda box: (-box.started_at, box.id))

    async def end(self, box: Box) -> None:
        """Kill a sandbox."""
        if self.boxes.pop(box.id, None) is None:
            return
        box.state, box.ended_at = "ended", time.time()
        self.gone.append(box)
        await self._down(box)

    async def pause(self, box: Box) -> None:
        """Pause a sandbox: its streams end, its processes stop, and nothing reaches it."""
        box.state = "paused"
        for process in list(box.processes.values()):
            process.cut()
        box.machine.pause(True)

    def resume(self, box: Box, timeout: float) -> None:
        """Let a sandbox run (again), at least for so long."""
        if box.state == "paused":
            box.machine.pause(False)
            box.state = "running"
        box.end_at = max(box.end_at, time.time() + timeout)

    async def _down(self, box: Box) -> None:
        for process in list(box.processes.values()):
            process.cut()
        await self.world.machines.delete(box.machine.id)

    async def _deadlines(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            for box in list(self.boxes.values()):
                if box.state == "running" and time.time() > box.end_at:
                    await (self.pause(box) if box.on_timeout == "pause" else self.end(box))

    async def aclose(self) -> None:
        """Stop watching; machines end with the double."""
        self._watch.cancel()


def stamp(seconds: float) -> str:
    """Return an epoch time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


_states: dict[int, State] = {}


def of(world: World) -> State:
    """Return the state of a run; called within its event loop."""
    if id(world) not in _states:
        _states[id(world)] = State(world)
    return _states[id(world)]
