"""Files of a sandbox as envd serves them: /files over HTTP and the Filesystem service over Connect.

All is done by commands inside the machine, as root, so that links lead where they lead inside. A named pipe
is opened as envd opens it: the answer waits for a writer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from doubles.e2b_state import Box
from doubles.machines import Machine

_LOOK = 'if [ ! -e "$1" ]; then exit 44; fi; [ -d "$1" ] && exit 45; stat -Lc %s -- "$1"'
_PUT = """
[ -d "$1" ] && exit 45
mkdir -p -- "${1%/*}/" && cat > "$1" && chown "$2" -- "$1"
"""
_ENTRY = 'stat -c "%F|%s|%f|%A|%U|%G|%Y|%n" -- "$@"'


def routes() -> web.RouteTableDef:
    """Return the routes of files."""
    routes = web.RouteTableDef()

    @routes.get("/files")
    async def download(request: web.Request) -> web.StreamResponse:
        box, path = _target(request)
        looked = await _sh(box, _LOOK, path)
        if looked.code == 44:
            return _said(404, f"path '{path}' does not exist")
        if looked.code == 45:
            return _said(400, f"path '{path}' is a directory")
        if looked.code != 0:
            return _said(500, f"error checking if path exists '{path}': {looked.stderr.decode()}")
        process = await box.machine.spawn(["cat", "--", path], cwd="/", user="root")
        assert process.stdout is not None
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        started = False
        try:
            while chunk := await process.stdout.read(1 << 18):
                if not started:
                    started = True
                    response.content_length = int(looked.text) if int(looked.text) >= len(chunk) else None
                    await response.prepare(request)
                await response.write(chunk)
        except ConnectionError:
            Machine.kill(process)
        if not started:
            await response.prepare(request)
        return response

    @routes.post("/files")
    async def upload(request: web.Request) -> web.Response:
        box, path = _target(request)
        user = request.query.get("username") or box.machine.user
        if box.machine.account(user) is None:
            return _said(401, f"error looking up user '{user}'")
        if request.content_type == "application/octet-stream":
            body: Any = request.content
        else:
            body = await (await request.multipart()).next()
        argv = ["/bin/sh", "-c", _PUT, "sh", path, user]
        process = await box.machine.spawn(argv, cwd="/", user="root", stdin=True)
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            while chunk := await (
                body.read(1 << 18) if body is request.content else body.read_chunk(1 << 18)
            ):
                process.stdin.write(chunk)
                await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # why is said below
        process.stdin.close()
        said = (await process.stderr.read()).decode("utf-8", "replace")
        code = await process.wait()
        if code == 45:
            return _said(400, f"path is a directory: {path}")
        if "No space left" in said:
            return _said(507, "not enough disk space available")
        if code != 0:
            return _said(500, f"error opening file: {said.strip()}")
        return web.json_response([{"path": path, "name": path.rpartition("/")[2], "type": "file"}])

    @routes.post("/filesystem.Filesystem/{method}")
    async def filesystem(request: web.Request) -> web.Response:
        from doubles.e2b_envd import RpcError

        message, box = await request.json(), request["box"]
        method = request.match_info["method"]
        path = message.get("path", message.get("source", ""))
        if method == "MakeDir":
            if (await _sh(box, 'test -e "$1"', path)).code == 0:
                raise RpcError("already_exists", f"directory already exists: {path}")
            await _sh(box, 'mkdir -p -- "$1"', path)
            return web.json_response({"entry": await _entry(box, path)})
        if method not in ("Stat", "ListDir", "Move", "Remove"):
            raise web.HTTPNotFound(text=f"the double has no Filesystem/{method}")
        if (await _sh(box, '[ -e "$1" ] || [ -L "$1" ]', path)).code != 0:
            raise RpcError("not_found", f"path not found: {path}")
        if method == "Stat":
            return web.json_response({"entry": await _entry(box, path)})
        if method == "ListDir":
            listed = await _sh(box, 'cd -- "$1" && ls -A1', path)
            names = [f"{path.rstrip('/')}/{name}" for name in listed.text.splitlines()]
            return web.json_response({"entries": [await _entry(box, name) for name in names]})
        if method == "Move":
            target = message["destination"]
            await _sh(box, 'mkdir -p -- "${2%/*}/" && mv -T -- "$1" "$2"', path, target)
            return web.json_response({"entry": await _entry(box, target)})
        await _sh(box, 'rm -rf -- "$1"', path)
        return web.json_response({})

    return routes


def _target(request: web.Request) -> tuple[Box, str]:
    box: Box = request["box"]
    path = request.query.get("path", "")
    if not path.startswith("/"):
        account = box.machine.account(request.query.get("username") or box.machine.user)
        path = f"{account[2] if account else '/'}/{path}"
    return box, path


async def _sh(box: Box, script: str, *words: str) -> Any:
    return await box.machine.run(["/bin/sh", "-c", script, "sh", *words], cwd="/", user="root")


async def _entry(box: Box, path: str) -> dict[str, Any]:
    kind, size, mode, permissions, owner, group, modified, _ = (
        (await _sh(box, _ENTRY, path)).text.strip().split("|", 7)
    )
    kinds = {"directory": "FILE_TYPE_DIRECTORY", "symbolic link": "FILE_TYPE_SYMLINK"}
    return {
        "name": path.rpartition("/")[2],
        "type": kinds.get(kind, "FILE_TYPE_FILE"),
        "path": path,
        "size": size,
        "mode": int(mode, 16) & 0o7777,
        "permissions": permissions,
        "owner": owner,
        "group": group,
        "modifiedTime": await asyncio.to_thread(_time, int(modified)),
    }


def _time(seconds: int) -> str:
    from doubles.e2b_state import stamp

    return stamp(seconds)


def _said(status: int, message: str) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status)
