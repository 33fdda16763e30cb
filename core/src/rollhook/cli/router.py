"""`rollhook router`: the router policies as a proxy of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rollhook.router_server.server import RouterServer
    from rollhook.routing import Chain


def router(  # noqa: PLR0913, PLR0917 - the options of a command
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="an engine's base URL; repeatable. More come by POST /workers"),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="router policies, chained by +; `rollhook plugins` lists them")
    ] = "sticky+min_load",
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="POLICY.KEY=VALUE", help="a key of a policy, e.g. sticky.ttl=3600; repeatable"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 30000,
    dp_aware: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="each data-parallel rank is a worker: where an engine has several, of every engine, never"
        ),
    ] = "auto",
    token: Annotated[
        str | None,
        typer.Option(metavar="REFERENCE", help="secret that clients must send, as env:NAME or file:PATH"),
    ] = None,
    worker_token: Annotated[
        str | None,
        typer.Option(metavar="REFERENCE", help="secret that engines ask for; default: what the client sends"),
    ] = None,
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network", help="listen beyond loopback without a token: who reaches it may add workers"
        ),
    ] = False,
    session_idle: Annotated[
        float, typer.Option(min=0, help="seconds after which an idle session no longer counts as open")
    ] = 600.0,
    request_timeout: Annotated[float, typer.Option(min=1, help="seconds that a request may take")] = 14400.0,
    health_interval: Annotated[
        float, typer.Option(min=0.1, help="seconds between questions for the health of every engine")
    ] = 30.0,
    breaker_faults: Annotated[
        int,
        typer.Option(min=1, help="faults of a worker in a row after which it gets no requests for a while"),
    ] = 10,
    breaker_seconds: Annotated[float, typer.Option(min=0, help="how long that while is")] = 30.0,
    drain: Annotated[
        float, typer.Option(min=0, help="seconds that requests may go on after SIGTERM or Ctrl-C")
    ] = 180.0,
    seed: Annotated[int, typer.Option(help="seed of what policies draw")] = 0,
) -> None:
    """Route requests of OpenAI's and SGLang's APIs to engines, by the policies that recipes use.

    Serves /generate, /v1/chat/completions, /v1/completions, /v1/messages and /v1/embeddings, streams
    included; bodies and answers go on as they came. A session is named by the header X-SMG-Routing-Key (or
    X-Rollhook-Session) and keeps its worker while that is there; policies choose for new ones. Engines come
    and go by the worker API of SGLang's router: POST /workers {"url": ...}, GET /workers, DELETE /workers/ID;
    so a framework that takes an external router registers its own here. /metrics is for Prometheus.

        rollhook router --worker http://10.0.0.7:30000 --policy prefix_cache

        rollhook router --host 0.0.0.0 --token env:ROUTER_TOKEN
    """
    from rollhook.router_server.server import RouterOptions, RouterServer

    options = RouterOptions(
        host=host,
        port=port,
        token=_secret("--token", token),
        worker_token=_secret("--worker-token", worker_token),
        trust_network=trust_network,
        dp_aware=dp_aware,
        session_idle=session_idle,
        request_timeout=request_timeout,
        health_interval=health_interval,
        breaker_faults=breaker_faults,
        breaker_seconds=breaker_seconds,
        drain=drain,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _stopped)  # until requests can be let finish: what was made is removed
    with tempfile.TemporaryDirectory(prefix="rollhook-router-") as scratch:
        chain = _chain(policy, keys, seed, Path(scratch))
        asyncio.run(_serve(RouterServer(chain, options, worker or [])))


def _stopped(number: int, frame: object) -> None:
    raise SystemExit(3)


def _chain(policy: str, keys: list[str] | None, seed: int, scratch: Path) -> Chain:
    """Build the policies of a chain, each with its keys."""
    from rollhook import plugins
    from rollhook.cli.keys import parse_keys
    from rollhook.component import BuildContext
    from rollhook.packs import cache_directory
    from rollhook.routing import build_chain, chain_names

    loaded = plugins.load([("router", name) for name in chain_names(policy)])
    context = BuildContext(logging.getLogger("rollhook.router"), scratch, cache_directory(), seed)
    return build_chain(policy, parse_keys(keys), loaded, context)


async def _serve(server: RouterServer) -> None:
    """Serve until SIGTERM or SIGINT, then let requests finish; a second signal ends them."""
    from rollhook.errors import UsageError

    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: task.cancel() if stop.is_set() else stop.set())
    try:
        await server.start()
    except OSError as error:
        options = server.options
        raise UsageError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
    typer.echo(f"The router listens on {server.url}", err=True)
    try:
        await stop.wait()
        typer.echo("Stopping: requests under way may finish, once more ends them ...", err=True)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await server.stop()


def _secret(option: str, reference: str | None) -> str | None:
    """Return a secret's value, None without a reference. Raises UsageError, which quotes no value."""
    from rollhook.errors import UsageError
    from rollhook.secrets import FORMS, Secret

    if reference is None:
        return None
    try:
        return Secret.parse(reference).resolve().get_secret_value()
    except ValueError:
        raise UsageError(f"{option} takes a reference to a secret, not the secret itself: {FORMS}") from None
