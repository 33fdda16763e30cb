"""Daytona's toolbox: what runs and what is read and written in one sandbox.

As the daemon: a command is given to a shell on its stdin, stdout and stderr come back as one, a limit kills
the shell alone, and a child that keeps the output open is waited for 100 ms.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time

from aiohttp import web

from doubles.daytona import Box, Daytona, problem
from doubles.machines import Machine

_DRAIN = 0.1


def add_toolbox(app: web.Application, plane: Daytona) -> None:
    """Add the routes."""
    routes = web.RouteTableDef()

    def machine_of(request: web.Request) -> tuple[Box, Machine]:
        box = plane.get(request.match_info["id"])
        box.active = time.time()
        if box.state != "started" or box.machine is None:
            raise problem(400, "bad request: no IP address found. Is the Sandbox started?")
        if not box.machine.alive:
            raise problem(502, "bad gateway: the sandbox does not answer")
        return box, box.machine

    @routes.post("/toolbox/{id}/process/execute")
    async def execute(request: web.Request) -> web.Response:
        box, machine = machine_of(request)
        body = await request.json()
        limit = body.get("timeout") if plane.world.options.obey_timeout else None
        process = await machine.spawn(
            ["/bin/bash"], env=body.get("envs"), cwd=body.get("cwd"), stdin=True, merged=True
        )
        assert process.stdin and process.stdout  # noqa: PT018
        output: list[bytes] = []
        reader = asyncio.ensure_future(_read(process.stdout, output))
        writer = asyncio.ensure_future(_write(process.stdin, body["command"].encode()))
        try:
            async with asyncio.timeout(limit):
                code = await Machine.ended(process)
        except TimeoutError:
            Machine.kill(process)
            raise problem(
                408,
                f"command execution timed out after {limit}s",
                code="PROCESS_EXECUTION_TIMEOUT",
                source="DAYTONA_DAEMON",
            ) from None
        finally:
            await asyncio.wait({reader}, timeout=_DRAIN)
            for task in (reader, writer):
                task.cancel()
            transport = process._transport  # type: ignore[attr-defined]
            transport.close()
        box.active = time.time()
        if not machine.alive:
            raise problem(502, "bad gateway: the sandbox does not answer")
        return web.json_response({"exitCode": code, "result": b"".join(output).decode("utf-8", "replace")})

    @routes.post("/toolbox/{id}/files/bulk-upload")
    async def upload(request: web.Request) -> web.Response:
        _, machine = machine_of(request)
        path = ""
        async for part in await request.multipart():
            assert part.name is not None  # type: ignore[union-attr]
            data = bytes(await part.read(decode=False))  # type: ignore[union-attr]
            if part.name.endswith(".path"):  # type: ignore[union-attr]
                path = data.decode()
                continue
            script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
            done = await machine.run(["/bin/sh", "-c", script, "sh", path], cwd="/", stdin=data)
            if done.code != 0:
                return web.json_response({"errors": [done.stderr.decode()]}, status=400)
        return web.json_response({})

    @routes.post("/toolbox/{id}/files/bulk-download")
    async def download(request: web.Request) -> web.Response:
        _, machine = machine_of(request)
        boundary = secrets.token_hex(12)
        parts = []
        for path in (await request.json())["paths"]:
            done = await machine.run(["cat", "--", path])
            name, data = ("file", done.stdout) if done.code == 0 else ("error", _absent(path))
            kind = "application/octet-stream" if done.code == 0 else "application/json"
            head = f'Content-Disposition: form-data; name="{name}"; filename="{path}"\r\nContent-Type: {kind}'
            parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n")
        return web.Response(
            body=b"".join(parts) + f"--{boundary}--\r\n".encode(),
            headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
        )

    @routes.get("/toolbox/{id}/{what:work-dir|user-home-dir}")
    async def directory(request: web.Request) -> web.Response:
        _, machine = machine_of(request)
        account = machine.account(machine.user)
        home = account[2] if account else "/"
        return web.json_response(
            {"dir": home if request.match_info["what"] == "user-home-dir" else machine.workdir}
        )

    app.add_routes(routes)


async def _read(stream: asyncio.StreamReader, output: list[bytes]) -> None:
    while chunk := await stream.read(1 << 16):
        output.append(chunk)


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        stream.close()


def _absent(path: str) -> bytes:
    said = {"message": f"file not found: {path}", "statusCode": 404, "code": "FILE_NOT_FOUND"}
    return json.dumps({**said, "source": "DAYTONA_DAEMON"}).encode()
