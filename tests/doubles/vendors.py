"""The program: `python -m doubles.vendors --directory D` prints one JSON line and serves until stdin ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from doubles import control, daytona_routes, e2b_api, e2b_envd
from doubles.world import World

#: surfaces and what makes them
SURFACES: dict[str, Callable[[World], web.Application]] = {
    "control": control.make_app,
    "daytona": daytona_routes.make_app,
    "e2b_api": e2b_api.make_app,
    "e2b_envd": e2b_envd.make_app,
}


async def serve(directory: Path) -> None:
    """Serve every surface on a port of its own until stdin ends or SIGTERM."""
    world = World.make(directory, secrets.token_hex(16))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def heard() -> None:
        if not os.read(0, 4096):
            stop.set()

    loop.add_reader(0, heard)
    sockets = {name: socket.create_server(("127.0.0.1", 0), backlog=1024) for name in SURFACES}
    world.urls |= {name: f"http://127.0.0.1:{sock.getsockname()[1]}" for name, sock in sockets.items()}
    runners = []
    for name, make in SURFACES.items():
        runner = web.AppRunner(make(world), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, sockets[name]).start()
        runners.append(runner)
    print(json.dumps({"key": world.key, "urls": world.urls}), flush=True)
    await stop.wait()
    for runner in runners:
        await runner.cleanup()
    await world.aclose()


def main() -> None:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(prog="doubles.vendors", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory for its machines")
    asyncio.run(serve(parser.parse_args().directory))


if __name__ == "__main__":
    main()
