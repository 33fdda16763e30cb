"""E2B's template builds: request, upload of files, steps, status and log, names."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import shutil
import string
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from aiohttp import web

from doubles.e2b_state import BUILD_DIRECTORY, BUILD_USER, Build, Refusal, State
from doubles.images import BuildError, Step
from doubles.world import World

#: what commands of a build start with
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOG_PAGE = 100
_LEAST_MIB = 512
SUPERSEDED = "The build was canceled because it was superseded by a newer one."


def routes(world: World, state: State) -> web.RouteTableDef:
    """Return the routes of templates."""
    routes = web.RouteTableDef()

    @routes.post("/v3/templates")
    async def request_build(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        name, _, tag = str(body["name"]).partition(":")
        cpus, memory = int(body.get("cpuCount", 2)), int(body.get("memoryMB", 1024))
        if memory % 2 or memory < _LEAST_MIB:
            raise Refusal(400, f"Memory must be an even number of MiB, at least {_LEAST_MIB}")
        template_id = state.aliases.setdefault(name, secrets.token_hex(10))
        tags = list(dict.fromkeys([tag or "default", *(body.get("tags") or [])]))
        build = Build(secrets.token_hex(16), template_id, tags, cpus, memory)
        for other in state.builds.values():
            under_way = other.template_id == template_id and other.status in ("waiting", "building")
            if under_way and set(other.tags) & set(tags):
                if other.task is not None:
                    other.task.cancel()
                other.fail(SUPERSEDED)
        state.builds[build.id] = build
        world.count("e2b_build_requests")
        answer = {"templateID": template_id, "buildID": build.id, "public": False, "aliases": [name]}
        return web.json_response({**answer, "names": [f"double/{name}"], "tags": tags}, status=202)

    @routes.get("/templates/{id}/files/{hash}")
    async def upload_link(request: web.Request) -> web.Response:
        digest = request.match_info["hash"]
        if digest in state.uploads:
            return web.json_response({"present": True}, status=201)
        url = f"{world.urls['e2b_api']}/upload/{digest}"
        return web.json_response({"present": False, "url": url}, status=201)

    @routes.put("/upload/{hash}")
    async def upload(request: web.Request) -> web.Response:
        target = world.directory / "uploads" / Path(request.match_info["hash"]).name
        target.parent.mkdir(exist_ok=True)
        await asyncio.to_thread(_unpack, await request.read(), target)
        state.uploads[request.match_info["hash"]] = target
        return web.Response(status=200)

    @routes.post("/v2/templates/{id}/builds/{build}")
    async def start(request: web.Request) -> web.Response:
        build = _build(state, request)
        body = json.loads(await request.read())
        if build.status == "waiting":
            build.status = "building"
            build.task = world.spawn(_run(world, state, build, body))
        return web.Response(status=202)

    @routes.get("/templates/{id}/builds/{build}/status")
    async def status(request: web.Request) -> web.Response:
        build = _build(state, request)
        offset = int(request.query.get("logsOffset", 0))
        entries = build.log[offset : offset + min(_LOG_PAGE, int(request.query.get("limit", _LOG_PAGE)))]
        answer: dict[str, Any] = {"templateID": build.template_id, "buildID": build.id}
        answer |= {"status": build.status, "logEntries": entries}
        answer["logs"] = [entry["message"] for entry in entries]
        return web.json_response(answer | ({"reason": build.reason} if build.reason else {}))

    @routes.get("/templates/aliases/{alias}")
    async def alias(request: web.Request) -> web.Response:
        name, tagged, _ = request.match_info["alias"].partition(":")
        if name not in state.aliases:
            raise Refusal(404, f"template '{name}' not found")
        if tagged:
            state.resolve(request.match_info["alias"])
        return web.json_response({"templateID": state.aliases[name], "public": False})

    @routes.get("/templates/{id}/tags")
    async def tags(request: web.Request) -> web.Response:
        template_id = state.aliases.get(request.match_info["id"], request.match_info["id"])
        found = [build for build in state.builds.values() if build.template_id == template_id]
        rows = [
            {"tag": tag, "buildID": b.id, "createdAt": "2026-01-01T00:00:00Z"}
            for b in found
            for tag in b.tags
        ]
        return web.json_response(rows)

    @routes.delete("/templates/{id}")
    async def delete(request: web.Request) -> web.Response:
        template_id = state.aliases.pop(request.match_info["id"], request.match_info["id"])
        mine = [key for key, build in state.builds.items() if build.template_id == template_id]
        if not mine:
            raise Refusal(404, f"template '{request.match_info['id']}' not found")
        for key in mine:
            del state.builds[key]
        return web.Response(status=204)

    return routes


def _build(state: State, request: web.Request) -> Build:
    build = state.builds.get(request.match_info["build"])
    if build is None or build.template_id != request.match_info["id"]:
        raise Refusal(404, f"Build '{request.match_info['build']}' not found")
    return build


async def _run(world: World, state: State, build: Build, body: Mapping[str, Any]) -> None:
    """Build, starting as an ordinary user as E2B's cloud does."""
    world.count("e2b_builds")
    steps = [Step("USER", [BUILD_USER]), Step("WORKDIR", [BUILD_DIRECTORY])]
    files: dict[str, Path] = {}
    try:
        env = {"PATH": PATH}
        for step in body.get("steps") or []:
            steps.append(_step(world, state, step, files, env))
        base: Any = body.get("fromImage")
        if not base:
            source = state.resolve(str(body.get("fromTemplate")))
            base = source.image or await state._base()
        await asyncio.sleep(world.options.step)
        build.image = await world.images.build(base, steps, files=files, log=build.say)
    except BuildError as error:
        build.say(str(error), "error")
        build.fail(str(error), step=str(len(build.log)))
    except Refusal as refusal:
        build.fail(str(refusal))
    else:
        build.status = "ready"


def _step(
    world: World, state: State, step: Mapping[str, Any], files: dict[str, Path], env: dict[str, str]
) -> Step:
    args = [str(arg) for arg in step.get("args") or []]
    if step["type"] == "ENV":
        for name, value in zip(args[::2], args[1::2], strict=True):
            env[name] = string.Template(value).safe_substitute(env)
        args = [part for name in args[::2] for part in (name, env[name])]
    if step["type"] != "COPY":
        return Step(step["type"], args)
    source, target = args[0], args[1]
    unpacked = state.uploads.get(step.get("filesHash", ""))
    if unpacked is None:
        raise BuildError(f"COPY {source}: its files were not uploaded")
    key = f"{step['filesHash']}-{secrets.token_hex(4)}"
    staged = world.directory / "staged" / key
    staged.mkdir(parents=True)
    found = unpacked / source
    if found.is_dir():
        shutil.copytree(found, staged, symlinks=True, dirs_exist_ok=True)
        directory = target
    elif "*" not in source and not target.endswith("/") and target != ".":
        shutil.copy2(found, staged / PurePosixPath(target).name)
        directory = str(PurePosixPath(target).parent)
    else:
        for each in sorted(unpacked.glob(source)):
            (shutil.copytree if each.is_dir() else shutil.copy2)(each, staged / each.name)
        directory = target
    files[key] = staged
    return Step("COPY", [source, directory], files=key)


def _unpack(data: bytes, target: Path) -> None:
    target.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="tar")
