"""E2B's envd, behind one address: processes over the Connect protocol with its JSON codec, files, health.

A sandbox is named by the header E2b-Sandbox-Id; the proxy in front answers 502 for one that is not there.
Hints of faults for streams: `{"freeze": n}` (nothing after n events), `{"cut": s}` (reset after s seconds
without an event), `{"deadline": "error"}` (the time limit ends the stream with deadline_exceeded).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from doubles import e2b_files, e2b_state
from doubles.e2b_process import Listener, Process, is_cut
from doubles.e2b_state import Box
from doubles.faults import watch
from doubles.world import World

_STATUS = {"not_found": 404, "unauthenticated": 401, "invalid_argument": 400, "already_exists": 409}


class RpcError(Exception):
    """A Connect error: a code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def make_app(world: World) -> web.Application:
    """Return the proxy with the envd of every sandbox behind it."""
    state = e2b_state.of(world)
    routes = web.RouteTableDef()

    @routes.get("/health")
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=204)

    @routes.post("/process.Process/Start")
    async def start(request: web.Request) -> web.StreamResponse:
        box: Box = request["box"]
        message = _unframe(await request.read())
        config = message["process"]
        limit = int(request.headers.get("Connect-Timeout-Ms", 0)) / 1000 or None
        try:
            user = user_of(request) or box.machine.user
            if box.machine.account(user) is None:
                raise RpcError("unauthenticated", f"invalid username: '{user}'")
            process = await _spawn(box, config, user, bool(message.get("stdin", True)))
        except RpcError as error:
            return await _failed_stream(request, error)
        process_box = Process(box, process, {**config, "tag": message.get("tag")})
        box.processes[process_box.pid] = process_box
        listener = process_box.listen()
        world.count("e2b_commands")
        obeyed = limit if world.options.obey_timeout else None
        world.spawn(process_box.watch(obeyed))
        return await _stream(request, process_box, listener)

    @routes.post("/process.Process/Connect")
    async def connect(request: web.Request) -> web.StreamResponse:
        try:
            process = _selected(request["box"], _unframe(await request.read()))
        except RpcError as error:
            return await _failed_stream(request, error)
        listener = process.listen()
        if process.end is not None:
            await listener.put({"end": process.end})
        return await _stream(request, process, listener)

    @routes.post("/process.Process/List")
    async def list_processes(request: web.Request) -> web.Response:
        running = [p for p in request["box"].processes.values() if p.end is None]
        return web.json_response({"processes": [{"pid": p.pid, "config": _config(p)} for p in running]})

    @routes.post("/process.Process/SendInput")
    async def send_input(request: web.Request) -> web.Response:
        message = await request.json()
        process = _selected(request["box"], message)
        try:
            await process.write(base64.b64decode(message["input"].get("stdin", "")))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RpcError("internal", f"error writing to stdin: {error}") from None
        return web.json_response({})

    @routes.post("/process.Process/CloseStdin")
    async def close_stdin(request: web.Request) -> web.Response:
        _selected(request["box"], await request.json()).close_stdin()
        return web.json_response({})

    @routes.post("/process.Process/SendSignal")
    async def send_signal(request: web.Request) -> web.Response:
        message = await request.json()
        numbers = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15}
        _selected(request["box"], message, running=True).kill(numbers[message["signal"]])
        return web.json_response({})

    app = web.Application(
        middlewares=[watch(world, "e2b_envd"), _proxy(state), _rpc_errors], client_max_size=1 << 40
    )
    app.add_routes(routes)
    app.add_routes(e2b_files.routes())
    return app


def _proxy(state: e2b_state.State) -> Any:
    """Return the middleware that finds the sandbox and wants its token."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        sandbox_id = request.headers.get("E2b-Sandbox-Id", "")
        box = state.boxes.get(sandbox_id)
        if box is None or not box.up:
            answer = {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}
            return web.json_response(answer, status=502)
        if request.headers.get("E2b-Sandbox-Port") != "49983":
            message = "The sandbox is running but port is not open"
            return web.json_response({"sandboxId": sandbox_id, "message": message, "code": 502}, status=502)
        if request.path != "/health" and request.headers.get("X-Access-Token") != box.token:
            return web.json_response({"code": 401, "message": "unauthorized access"}, status=401)
        request["box"] = box
        return await handler(request)

    return middleware


@web.middleware
async def _rpc_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RpcError as error:
        body = {"code": error.code, "message": str(error)}
        return web.json_response(body, status=_STATUS.get(error.code, 500))


def user_of(request: web.Request) -> str | None:
    """Return the Linux user that a request names by basic authentication."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind != "Basic":
        return None
    try:
        return base64.b64decode(value).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "invalid authorization header") from None


async def _spawn(box: Box, config: dict[str, Any], user: str, stdin: bool) -> asyncio.subprocess.Process:
    cwd = config.get("cwd") or box.machine.workdir
    argv = [config["cmd"], *config.get("args", [])]
    if max(len(arg.encode()) for arg in argv) >= 128 << 10:
        raise RpcError("invalid_argument", "error starting process: argument list too long")
    there = await box.machine.run(["test", "-e", cwd], cwd="/", user="root") if config.get("cwd") else None
    if there is not None and there.code != 0:
        raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist")
    return await box.machine.spawn(argv, env=config.get("envs"), cwd=cwd, user=user, stdin=stdin)


def _selected(box: Box, message: dict[str, Any], running: bool = False) -> Process:
    selector = message["process"]
    for process in box.processes.values():
        named = process.pid == selector.get("pid") or (
            "tag" in selector and process.config.get("tag") == selector["tag"]
        )
        if named and not (running and process.end is not None):
            return process
    raise RpcError("not_found", f"process with pid {selector.get('pid', selector.get('tag'))} not found")


def _config(process: Process) -> dict[str, Any]:
    return {key: value for key, value in process.config.items() if key != "tag"}


def _unframe(data: bytes) -> dict[str, Any]:
    flag, size = struct.unpack(">BI", data[:5])
    if flag != 0 or len(data) != size + 5:
        raise RpcError("invalid_argument", "one uncompressed message was expected")
    message = json.loads(data[5:])
    assert isinstance(message, dict)
    return message


def _frame(message: dict[str, Any], flag: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flag, len(data)) + data


async def _failed_stream(request: web.Request, error: RpcError) -> web.StreamResponse:
    response = await _open(request)
    await response.write(_frame({"error": {"code": error.code, "message": str(error)}}, 2))
    return response


async def _open(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    await response.prepare(request)
    return response


async def _stream(request: web.Request, process: Process, listener: Listener) -> web.StreamResponse:
    hint = request.get("hint") or {}
    response = await _open(request)
    try:
        await response.write(_frame({"event": {"start": {"pid": process.pid}}}))
        await _events(request, response, listener, hint)
    except (ConnectionResetError, ConnectionError):
        pass  # the client has gone; the process goes on
    finally:
        listener.close()
    return response


async def _events(
    request: web.Request, response: web.StreamResponse, listener: Listener, hint: dict[str, Any]
) -> None:
    idle = float(request.headers.get("Keepalive-Ping-Interval", 50))
    sent = 0
    while True:
        if sent >= hint.get("freeze", 1 << 60):
            await _frozen(request)
            return
        try:
            event = await asyncio.wait_for(listener.events.get(), hint.get("cut", idle))
        except TimeoutError:
            if "cut" in hint:
                _abort(request)
                return
            event = {"keepalive": {}}
        if is_cut(event):
            _abort(request)
            return
        if event.get("end", {}).get("exitCode") == -1 and hint.get("deadline") == "error":
            error = {"code": "deadline_exceeded", "message": "context deadline exceeded"}
            await response.write(_frame({"error": error}, 2))
            return
        await response.write(_frame({"event": event}))
        sent += 1
        if "end" in event:
            await response.write(_frame({}, 2))
            return


async def _frozen(request: web.Request) -> None:
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(0.05)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
