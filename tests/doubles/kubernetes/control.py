"""The port of the tests: faults, options, the journal, and what is there."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from doubles.kubernetes.controllers import Controllers
from doubles.kubernetes.world import World


def make_app(world: World, controllers: Controllers) -> web.Application:
    """Return the control surface: every request carries the run's key in `X-Key`."""
    routes = web.RouteTableDef()

    @routes.post("/faults")
    async def add(request: web.Request) -> web.Response:
        try:
            return web.json_response({"number": world.faults.add(await request.json())})
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"no such word in a rule: {error}") from None

    @routes.get("/faults/{number}")
    async def hits(request: web.Request) -> web.Response:
        return web.json_response({"hits": world.faults.hits(int(request.match_info["number"]))})

    @routes.delete("/faults")
    async def clear(request: web.Request) -> web.Response:
        world.faults.clear()
        return web.json_response({})

    @routes.post("/options")
    async def options(request: web.Request) -> web.Response:
        try:
            world.set_options(await request.json())
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"no such option: {error}") from None
        return web.json_response({})

    @routes.post("/namespaces/{name}")
    async def namespace(request: web.Request) -> web.Response:
        world.add_namespace(request.match_info["name"])
        return web.json_response({})

    @routes.post("/compact")
    async def compact(request: web.Request) -> web.Response:
        world.store.compact()
        return web.json_response({})

    @routes.post("/scripts/{kind}")
    async def script(request: web.Request) -> web.Response:
        scripted = {"pods": controllers.kubelet, "jobs": controllers.jobs}[request.match_info["kind"]]
        try:
            scripted.add_script(await request.json())
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"no such word in a script: {error}") from None
        return web.json_response({})

    @routes.delete("/scripts")
    async def clear_scripts(request: web.Request) -> web.Response:
        controllers.kubelet.scripts.clear()
        controllers.jobs.scripts.clear()
        return web.json_response({})

    @routes.post("/pods/{namespace}/{name}/kill")
    async def kill(request: web.Request) -> web.Response:
        await controllers.kubelet.kill(request.match_info["namespace"], request.match_info["name"])
        return web.json_response({})

    @routes.post("/pods/{namespace}/{name}/ports")
    async def ports(request: web.Request) -> web.Response:
        place = request.match_info["namespace"], request.match_info["name"]
        run = controllers.kubelet.find(*place)
        run.ports |= {int(number): real for number, real in (await request.json()).items()}
        return web.json_response({})

    @routes.get("/journal")
    async def journal(request: web.Request) -> web.Response:
        return web.json_response(world.journal)

    @routes.get("/objects")
    async def objects(request: web.Request) -> web.Response:
        return web.json_response(list(world.store.objects.values()))

    @web.middleware
    async def keyed(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("X-Key") != world.key:
            raise web.HTTPForbidden(text="the run's key is missing")
        answer = await handler(request)
        assert isinstance(answer, web.StreamResponse)
        return answer

    app = web.Application(middlewares=[keyed])
    app.add_routes(routes)
    return app
