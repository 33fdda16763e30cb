"""What goes over a connection of its own: logs, exec and port-forward, the latter two over WebSockets.

Protocols: v4.channel.k8s.io and v5.channel.k8s.io (exec), v4.channel.k8s.io or none (port-forward), and
SPDY/3.1+portforward.k8s.io (kubectl from 1.31). The older upgrade to bare SPDY is not served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from datetime import UTC, datetime
from typing import Any

from aiohttp import WSMsgType, web

from doubles.kubernetes import containers, spdy
from doubles.kubernetes.errors import ApiError
from doubles.kubernetes.kubelet import Kubelet, Log, Run
from doubles.kubernetes.store import Object

_TUNNEL = "SPDY/3.1+portforward.k8s.io"


async def answer(kubelet: Kubelet, request: web.Request, subresource: str, pod: Object) -> web.StreamResponse:
    """Answer a request for a pod's stream."""
    run = kubelet.run_of(pod)
    name = request.query.get("container", "")
    try:
        container = containers.container_of(pod, name)
    except KeyError:
        told = f"container {name} is not valid for pod {pod['metadata']['name']}"
        raise ApiError(400, told) from None
    if subresource == "log":
        return await _log(request, pod, container, run)
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise ApiError(400, "Upgrade request required")
    if pod.get("status", {}).get("phase") != "Running" or run is None:
        told = (
            f"unable to upgrade connection: pod does not exist or is not running: {pod['metadata']['name']}"
        )
        raise ApiError(500, told)
    if subresource == "exec":
        return await _exec(kubelet, request, pod, container, run)
    return await _forward(request, run)


# Logs.


async def _log(request: web.Request, pod: Object, container: Object, run: Run | None) -> web.StreamResponse:
    query = request.query
    if pod.get("status", {}).get("phase", "Pending") == "Pending" or run is None:
        waiting = (
            (pod.get("status", {}).get("containerStatuses") or [{}])[0].get("state", {}).get("waiting", {})
        )
        why = waiting.get("reason", "ContainerCreating")
        told = (
            f'container "{container["name"]}" in pod "{pod["metadata"]["name"]}" is waiting to start: {why}'
        )
        raise ApiError(400, told)
    follow, stamps = query.get("follow") == "true", query.get("timestamps") == "true"
    first = container["name"] == pod["spec"]["containers"][0]["name"]
    log = run.log if first else Log(ended=True)
    at = 0
    if "tailLines" in query:
        lines = bytes(log.data).splitlines(keepends=True)
        at = len(log.data) - sum(map(len, lines[max(0, len(lines) - int(query["tailLines"])) :]))
    left = int(query["limitBytes"]) if "limitBytes" in query else None
    response = web.StreamResponse()
    response.content_type = "text/plain"
    await response.prepare(request)
    hint = request["hint"] or {}
    sent = 0
    while True:
        news = log.news
        data = bytes(log.data[at:])
        at += len(data)
        if stamps:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode()
            data = b"".join(stamp + line for line in data.splitlines(keepends=True))
        data = data if left is None else data[: left - sent]
        if "cut" in hint and sent + len(data) > hint["cut"]:
            await response.write(data[: hint["cut"] - sent])
            _drop(request)
            break
        if data:
            await response.write(data)
            sent += len(data)
        if not follow or log.ended or request.transport is None or sent == left:
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await news.wait()
    return response


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


# Exec.


async def _exec(
    kubelet: Kubelet, request: web.Request, pod: Object, container: Object, run: Run
) -> web.StreamResponse:
    query = request.query
    wants = {each: query.get(each, "") in ("true", "1") for each in ("stdin", "stdout", "stderr", "tty")}
    if run.process is not None and run.log.ended:
        raise ApiError(500, f'unable to upgrade connection: container not found ("{container["name"]}")')
    env = containers.environment(kubelet.world.store, pod, container)
    machine = await kubelet.machine(run, pod, container, env)
    socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=0)
    await socket.prepare(request)
    request["entry"]["protocol"] = socket.ws_protocol
    argv = query.getall("command", [])
    process = await machine.spawn(
        ["/usr/bin/env", "--", *argv], stdin=wants["stdin"], merged=wants["tty"], cwd=machine.workdir
    )
    hint = request["hint"] or {}
    reader = asyncio.ensure_future(_typed(socket, process))

    async def pump(channel: int, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(65536)):
            if wants["stdout" if channel == 1 else "stderr"]:
                await socket.send_bytes(bytes([channel]) + data)

    pumps = asyncio.gather(pump(1, process.stdout), pump(2, process.stderr))
    try:
        if "cut" in hint:
            await asyncio.sleep(hint["cut"])
            _drop(request)
            return socket
        waiting = asyncio.ensure_future(machine.ended(process))
        done, _ = await asyncio.wait({waiting, reader}, return_when=asyncio.FIRST_COMPLETED)
        if waiting not in done:  # the client has gone: the command is not ended, as under Kubernetes
            waiting.cancel()
            return socket
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(pumps)
        await socket.send_bytes(b"\x03" + json.dumps(_ended(waiting.result(), argv)).encode())
        await socket.close()
    finally:
        reader.cancel()
        pumps.cancel()
    return socket


async def _typed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY or process.stdin is None or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        with contextlib.suppress(ConnectionError):
            if channel == 0 and data:
                process.stdin.write(data)
                await process.stdin.drain()
            elif channel == 255 and data == b"\x00":  # v5: the client closes a channel
                process.stdin.close()


def _ended(code: int, argv: list[str]) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    status: Object = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode"}
    status["message"] = f"command terminated with non-zero exit code: exit status {code}"
    status["details"] = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    if code == 127:
        status["message"] = (
            f"error executing command in container: {argv[0]}: executable file not found in $PATH"
        )
    return status


# Port-forward.


async def _forward(request: web.Request, run: Run) -> web.StreamResponse:
    asked = request.headers.get("Sec-WebSocket-Protocol", "")
    tunnel = _TUNNEL in asked
    protocols = (_TUNNEL,) if tunnel else ("v4.channel.k8s.io",)
    socket = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
    await socket.prepare(request)
    request["entry"]["protocol"] = socket.ws_protocol
    hint = request["hint"] or {}
    if "cut" in hint:
        asyncio.get_running_loop().call_later(hint["cut"], _drop, request)
    if tunnel:
        await _Tunnel(socket, run).serve()
    else:
        await _channels(request, socket, run)
    return socket


async def _connect(run: Run, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if port not in run.ports:
        raise ConnectionRefusedError(f"nothing listens on port {port} of the pod")
    return await asyncio.open_connection("127.0.0.1", run.ports[port])


def _refused(run: Run, port: int, error: OSError) -> bytes:
    name = run.key[2]
    text = f"error forwarding port {port} to pod {name}, uid : failed to connect to localhost:{port} inside "
    return f"{text}namespace: connect: connection refused ({error})".encode()


async def _channels(request: web.Request, socket: web.WebSocketResponse, run: Run) -> None:
    ports = [int(each) for text in request.query.getall("ports", []) for each in text.split(",")]
    if not ports:
        await socket.close(message=b"query parameter 'ports' is required")
        return
    writers: dict[int, asyncio.StreamWriter] = {}
    pumps = []

    async def pump(channel: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await socket.send_bytes(bytes([channel]) + data)
        await socket.close()

    for number, port in enumerate(ports):
        for channel in (2 * number, 2 * number + 1):
            await socket.send_bytes(bytes([channel]) + struct.pack("<H", port))
        try:
            reader, writers[2 * number] = await _connect(run, port)
            pumps.append(asyncio.ensure_future(pump(2 * number, reader)))
        except OSError as error:
            await socket.send_bytes(bytes([2 * number + 1]) + _refused(run, port, error))
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[0] in writers:
                writers[message.data[0]].write(message.data[1:])
                with contextlib.suppress(ConnectionError):
                    await writers[message.data[0]].drain()
    finally:
        for each in pumps:
            each.cancel()
        for writer in writers.values():
            writer.close()


class _Tunnel:
    """SPDY inside a WebSocket: an error stream and a data stream for each connection."""

    def __init__(self, socket: web.WebSocketResponse, run: Run) -> None:
        self._socket, self._run = socket, run
        self._framer = spdy.Framer()
        self._errors: dict[str, int] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pumps: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Serve until the client goes."""
        try:
            async for message in self._socket:
                if message.type is WSMsgType.BINARY:
                    for frame in self._framer.feed(message.data):
                        await self._frame(frame)
        finally:
            for pump in self._pumps:
                pump.cancel()
            for writer in self._writers.values():
                writer.close()

    async def _frame(self, frame: spdy.Frame) -> None:
        if frame.kind == spdy.SYN_STREAM and frame.headers is not None:
            await self._socket.send_bytes(self._framer.reply(frame.stream))
            headers = {name.lower(): value for name, value in frame.headers.items()}
            if headers.get("streamtype") == "error":
                self._errors[headers["requestid"]] = frame.stream
            else:
                await self._open(frame.stream, headers)
        elif frame.kind == spdy.PING:
            await self._socket.send_bytes(self._framer.pong(frame))
        elif frame.kind == spdy.RST_STREAM and frame.stream in self._writers:
            self._writers.pop(frame.stream).close()
        elif frame.kind == 0 and frame.stream in self._writers:
            writer = self._writers[frame.stream]
            with contextlib.suppress(ConnectionError):
                writer.write(frame.data)
                await writer.drain()
                if frame.flags & spdy.FIN and writer.can_write_eof():
                    writer.write_eof()

    async def _open(self, stream: int, headers: dict[str, str]) -> None:
        port, failed = int(headers["port"]), self._errors.pop(headers["requestid"], 0)
        try:
            reader, self._writers[stream] = await _connect(self._run, port)
        except OSError as error:
            refusal = _refused(self._run, port, error)
            await self._socket.send_bytes(self._framer.data(failed, refusal, fin=True))
            await self._socket.send_bytes(self._framer.data(stream, b"", fin=True))
            return
        pump = asyncio.ensure_future(self._pump(stream, failed, reader))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump(self, stream: int, failed: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(32768):
                await self._socket.send_bytes(self._framer.data(stream, data))
            await self._socket.send_bytes(self._framer.data(stream, b"", fin=True))
            await self._socket.send_bytes(self._framer.data(failed, b"", fin=True))
