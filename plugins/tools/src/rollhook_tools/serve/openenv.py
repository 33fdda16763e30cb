"""An environment behind OpenEnv's protocol (openenv 0.3 to 0.10): its WebSocket and what is beside it."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollhook.errors import RollhookError
from rollhook_tools.serve.seats import Said, Seat, Table

logger = logging.getLogger(__name__)

_MOST = 16 << 20


class GuestAction(BaseModel):
    """A reply (`message`), a call of a tool (`tool`, `arguments`), or the end of the phase (`finish`)."""

    model_config = ConfigDict(extra="forbid")
    message: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    finish: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)


class GuestObservation(BaseModel):
    """What the environment says, and the tools that there are, in the OpenAI form."""

    text: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    error: bool = False


class GuestReset(BaseModel):
    """What reset takes: a task by id, or by seed; else the tasks in turn."""

    model_config = ConfigDict(extra="ignore")
    task_id: str | None = None
    seed: int | None = Field(default=None, ge=0)


def app(table: Table, name: str) -> web.Application:
    """Return the server."""
    schemas = {
        "action": GuestAction.model_json_schema(),
        "observation": GuestObservation.model_json_schema(),
        "state": {"type": "object", "properties": {"step_count": {"type": "integer"}}},
    }

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def schema(request: web.Request) -> web.Response:
        return web.json_response(schemas)

    async def metadata(request: web.Request) -> web.Response:
        about = f"{name}, served by Rollhook: {len(table.tasks)} tasks"
        return web.json_response({"name": name, "description": about})

    async def ws(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=_MOST)
        await socket.prepare(request)
        player = _Player(table)
        try:
            async for frame in socket:
                answer = await player.answer(str(frame.data))
                if answer is None:
                    break
                await socket.send_str(orjson.dumps(answer).decode())
        finally:
            await player.aclose()
        return socket

    made = web.Application()
    made.add_routes(
        [
            web.get("/health", health),
            web.get("/schema", schema),
            web.get("/metadata", metadata),
            web.get("/ws", ws),
        ]
    )
    return made


class _Player:
    """One connection: one episode after another."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seat: Seat | None = None
        self._steps = 0

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return what a message is answered with; None for the last."""
        try:
            asked = orjson.loads(text)
            kind, data = asked.get("type"), asked.get("data") or {}
        except (orjson.JSONDecodeError, AttributeError) as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        try:
            return await self._act(kind, data)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            return _error("VALIDATION_ERROR", "Invalid message", errors=errors)
        except RollhookError as error:
            return _error("EXECUTION_ERROR", str(error))
        except Exception as error:
            logger.exception("a client's message failed")
            return _error("EXECUTION_ERROR", f"{type(error).__name__}: {error}")

    async def _act(self, kind: object, data: Any) -> dict[str, Any] | None:
        match kind:
            case "close":
                return None
            case "state":
                return {"type": "state", "data": {"step_count": self._steps}}
            case "reset":
                return await self._reset(GuestReset.model_validate(data))
            case "step":
                return await self._step(GuestAction.model_validate(data))
            case _:
                return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def aclose(self) -> None:
        """End the episode."""
        if self._seat is not None:
            await self._seat.aclose()

    async def _reset(self, asked: GuestReset) -> dict[str, Any]:
        await self.aclose()
        if self._table.full:
            return _error("CAPACITY_REACHED", "no more episodes at once")
        self._steps = 0
        self._seat, said = await self._table.sit(self._table.choose(asked.task_id, asked.seed))
        return _observation(said)

    async def _step(self, action: GuestAction) -> dict[str, Any]:
        if self._seat is None:
            return _error("EXECUTION_ERROR", "reset first")
        self._steps += 1
        if action.tool is not None:
            return _observation(await self._seat.call(action.tool, action.arguments))
        if action.finish:
            return _observation(await self._seat.finish())
        return _observation(await self._seat.say(action.message or ""))


def _observation(said: Said) -> dict[str, Any]:
    observation = {"text": said.text, "tools": list(said.tools), "error": said.error, "metadata": {}}
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": said.reward, "done": said.done},
    }


def _error(code: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code, **more}}
