"""`rollhook serve ENV --protocol openenv|mcp`."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollhook.cli.attempts import begin, ending
from rollhook.cli.keys import parse_keys
from rollhook.errors import UsageError

if TYPE_CHECKING:
    import uvicorn

    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import Attempt
    from rollhook.runtime.progress import Display
    from rollhook_tools.serve.seats import Table


def serve(  # noqa: PLR0913, PLR0917 - the options of a command
    environment: Annotated[
        str, typer.Argument(metavar="ENV", help="an environment, a pack, or a directory of tasks")
    ],
    protocol: Annotated[Literal["openenv", "mcp"], typer.Option(help="what the clients speak")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 8000,
    split: Annotated[str | None, typer.Option(help="only the tasks of this split")] = None,
    sandbox: Annotated[str | None, typer.Option(help="sandbox backend, as of `tasks oracle`")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the environment")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="episodes at once")] = 16,
    reader: Annotated[
        str, typer.Option("--environment", help="environment that reads packs and directories")
    ] = "tbench2",
    run_id: Annotated[str | None, typer.Option(help="id of the new run")] = None,
    root: Annotated[str, typer.Option(help="directory of run directories")] = "./runs",
    trust_network: Annotated[
        bool, typer.Option("--trust-network", help="listen beyond loopback: whoever reaches it may play")
    ] = False,
) -> None:
    """Serve an environment to the clients of others, until interrupted: OpenEnv at /ws, MCP at /mcp."""
    from rollhook.runtime.progress import Display
    from rollhook.runtime.task_runs import proof_recipe, sandbox_source, task_source

    if not trust_network and host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise UsageError(
            f"--host {host} is reachable from outside, and nobody is asked who he is: --trust-network"
        )
    display = Display()
    recipe = proof_recipe(task_source(environment, reader, parse_keys(keys)), sandbox_source(sandbox))
    attempt = begin("serve", root, f"serve-{recipe.environment[0].use.replace('_', '-')}", run_id, None)
    with ending(attempt, display, "start it again"), _bound(host, port) as bound:
        asyncio.run(_serve(recipe, attempt, display, protocol, split, episodes, bound))


async def _serve(
    recipe: Recipe,
    attempt: Attempt,
    display: Display,
    protocol: str,
    split: str | None,
    episodes: int,
    bound: socket.socket,
) -> None:
    from rollhook.runtime.task_runs import TaskRuns, load_parts
    from rollhook_tools.serve.seats import GUEST, Guest, Table

    parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number, agents=())
    name = recipe.environment[0].use
    async with AsyncExitStack() as stack:
        guest = Guest(None, parts.context("agent"))
        runs = await stack.enter_async_context(
            TaskRuns(parts, attempt, own={GUEST: guest}, choose=lambda env: env.tasks(split))
        )
        table = Table(runs, runs.tasks, episodes)
        stack.push_async_callback(table.aclose)
        url = await _listen(protocol, table, name, bound, stack)
        display.say(f"{name}: {len(table.tasks)} tasks at {url}")
        stopped = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stopped.set)
        await stopped.wait()


async def _listen(protocol: str, table: Table, name: str, bound: socket.socket, stack: AsyncExitStack) -> str:
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if protocol == "openenv":
        from aiohttp import web

        from rollhook_tools.serve.openenv import app

        runner = web.AppRunner(app(table, name), access_log=None, shutdown_timeout=1.0)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.SockSite(runner, bound).start()
        return url
    import uvicorn

    from rollhook_tools.serve.mcp import server

    config = uvicorn.Config(server(table, name).http_app(), log_level="error", lifespan="on")
    serving = uvicorn.Server(config)
    serving.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(serving._serve([bound]))

    async def end() -> None:
        serving.should_exit = True
        await asyncio.wait({task}, timeout=5.0)

    stack.push_async_callback(end)
    await _until_started(serving, task)
    return f"{url}/mcp"


async def _until_started(serving: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not serving.started:  # uvicorn has no event for it
        done, _ = await asyncio.wait({task}, timeout=0.02)
        if done:
            await task
            raise UsageError("the server has ended before it began")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UsageError(f"--port {port} of {host} cannot be had: {error.strerror}") from None
    return made
