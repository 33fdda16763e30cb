"""The router as a server: its endpoints, its token, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from rollhook.engine.client import EngineClient
from rollhook.errors import UsageError
from rollhook.router_server.admin import Admin
from rollhook.router_server.answers import json, refusal
from rollhook.router_server.engines import DpAware, Engines
from rollhook.router_server.names import parse_name
from rollhook.router_server.pool import Pool
from rollhook.router_server.proxy import Proxy, Retries, Watcher
from rollhook.routing import Chain
from rollhook.session.health import Health

#: what is sent on to one worker
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings")
LOOKING = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
#: what needs no token
OPEN = ("/health", "/liveness", "/readiness")
#: servers of Python close idle connections after 5 s; a request on one that is being closed is lost
_KEEPALIVE = 4.0


@dataclass(frozen=True)
class RouterOptions:
    """How the router serves. Times are seconds, sizes bytes; tokens are the secrets themselves.

    `token` is asked of clients, `worker_token` is sent to engines; without a `token` a client's
    Authorization is sent on. Only a loopback address may be bound without a token, unless `trust_network`.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    token: str | None = field(default=None, repr=False)
    worker_token: str | None = field(default=None, repr=False)
    trust_network: bool = False
    dp_aware: DpAware = "auto"
    session_idle: float = 600.0
    request_timeout: float = 14400.0
    connect_timeout: float = 10.0
    startup: float = 1800.0
    health_interval: float = 30.0
    load_interval: float = 5.0
    breaker_faults: int = 10
    breaker_seconds: float = 30.0
    drain: float = 180.0
    max_body: int = 256 << 20
    retries: Retries = field(default_factory=Retries)


class RouterServer:
    """Serves until it is stopped. Workers may be given at the start, and come and go through the API."""

    def __init__(
        self, chain: Chain, options: RouterOptions | None = None, workers: Sequence[str] = ()
    ) -> None:
        self.options = options or RouterOptions()
        if self.options.token is None and not (self.options.trust_network or _loopback(self.options.host)):
            raise UsageError(
                f"--host {self.options.host} is reachable from outside: name a secret with --token, or say "
                "--trust-network if whoever reaches it may add and remove workers"
            )
        try:
            self._first = [parse_name(name) for name in workers]
        except ValueError as error:
            raise UsageError(f"--worker: {error}") from None
        self.pool = Pool(
            chain,
            session_idle=self.options.session_idle,
            breaker_faults=self.options.breaker_faults,
            breaker_seconds=self.options.breaker_seconds,
        )
        self.url = ""
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Listen, and register the first workers; `url` says where. Raises OSError for a port in use."""
        async with AsyncExitStack() as opened:
            app, engines = await self._app(opened)
            # a client that goes away ends its request at the engine, too
            runner = web.AppRunner(
                app, handler_cancellation=True, shutdown_timeout=self.options.drain, access_log=None
            )
            await runner.setup()
            opened.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, self.options.host, self.options.port).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            for worker in self._first:
                engines.register(worker)
            self._open = opened.pop_all()

    async def stop(self) -> None:
        """Take no more requests, let those under way finish within `drain` seconds; safe to call twice."""
        await self._open.aclose()

    async def _app(self, opened: AsyncExitStack) -> tuple[web.Application, Engines]:
        """Return the application; what it needs open is closed with `opened`."""
        options = self.options
        own = {"Authorization": f"Bearer {options.worker_token}"} if options.worker_token else {}
        # answers go on as they came, compressed or not, and no header is added to what a client sent
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(
                total=options.request_timeout, sock_connect=options.connect_timeout
            ),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        control = aiohttp.ClientSession(headers=own)
        client = EngineClient(control)
        engines = Engines(self.pool, client, dp_aware=options.dp_aware, startup=options.startup)
        health = Health(self.pool.table, client, versions=False)
        opened.push_async_callback(http.close)
        opened.push_async_callback(control.close)
        opened.push_async_callback(engines.close)
        opened.push_async_callback(
            _ended,
            asyncio.ensure_future(health.watch(options.health_interval, asyncio.sleep, lambda: False)),
            asyncio.ensure_future(health.watch_loads(options.load_interval, asyncio.sleep)),
        )
        watcher, exposed = _measured(self.pool, engines, client)
        proxy = Proxy(
            self.pool,
            http,
            watcher,
            doubt=health.doubt,
            retries=options.retries,
            rank_field=engines.rank_field,
            headers=own,
            keep_authorization=options.token is None,
        )
        app = web.Application(client_max_size=options.max_body, middlewares=[self._guard])
        app.add_routes([web.post(path, proxy.generate) for path in GENERATING])
        app.add_routes([web.get(path, proxy.look) for path in LOOKING])
        app.add_routes([web.get(path, _alive) for path in ("/health", "/liveness")])
        app.add_routes([web.get("/readiness", self._ready)])
        app.add_routes(Admin(self.pool, engines, client).routes())
        app.add_routes(exposed)
        return app, engines

    async def _ready(self, request: web.Request) -> web.Response:
        offered = len(self.pool.table.offered())
        state = "ready" if offered else "not ready"
        counts = {"healthy_workers": offered, "total_workers": len(self.pool.table.workers)}
        return json({"status": state, **counts}, 200 if offered else 503)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token; an error of the server itself is JSON too."""
        if self.options.token is not None and request.path not in OPEN:
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {self.options.token}".encode()):
                return refusal(
                    401, "the router's token is required: Authorization: Bearer TOKEN", "unauthorized"
                )
        try:
            return await handler(request)
        except web.HTTPException as error:
            code = "body_too_large" if error.status == 413 else HTTPStatus(error.status).phrase
            return refusal(error.status, error.text or error.reason, code.lower().replace(" ", "_"))


def _measured(pool: Pool, engines: Engines, client: EngineClient) -> tuple[Watcher, list[web.RouteDef]]:
    """Return who counts requests, and the endpoints that show the counts."""
    try:
        from rollhook.router_server.metrics import Metrics, routes
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        return Watcher(), [web.get(path, _no_metrics) for path in ("/metrics", "/engine_metrics")]
    metrics = Metrics(pool)
    return metrics, routes(metrics, engines, client)


async def _no_metrics(request: web.Request) -> web.Response:
    return refusal(501, "metrics need prometheus-client: pip install 'rollhook[metrics]'", "no_metrics")


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _alive(request: web.Request) -> web.Response:
    return web.Response(text="OK")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
