"""The program: `python -m doubles.kubernetes --directory D` prints a JSON line, serves until stdin ends."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

from aiohttp import web

from doubles.kubernetes import api, control
from doubles.kubernetes.controllers import Controllers
from doubles.kubernetes.world import World


def certificate(directory: Path) -> tuple[Path, Path]:
    """Make a certificate for loopback, which is its own authority, and its key."""
    cert, key = directory / "tls.crt", directory / "tls.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=doubles.kubernetes"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def kubeconfig(world: World, cert: Path) -> dict[str, Any]:
    """Return a kubeconfig (as JSON, which is YAML) with one context."""
    authority = base64.b64encode(cert.read_bytes()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "contexts": [
            {"name": "double", "context": {"cluster": "double", "user": "tester", "namespace": "default"}}
        ],
        "clusters": [
            {
                "name": "double",
                "cluster": {"server": world.urls["api"], "certificate-authority-data": authority},
            }
        ],
        "users": [{"name": "tester", "user": {"token": world.key}}],
    }


async def serve(directory: Path) -> None:
    """Serve every surface on a port of its own until stdin ends or SIGTERM."""
    world = World(directory, secrets.token_hex(16))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def heard() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, heard)
    cert, key = certificate(directory)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    controllers = Controllers(world)
    world.spawn(world.collect())
    world.spawn(controllers.run())
    runners = []
    for name, app, secured in (
        ("api", api.make_app(world, controllers.kubelet), tls),
        ("control", control.make_app(world, controllers), None),
    ):
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        scheme = "http" if secured is None else "https"
        world.urls[name] = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, sock, ssl_context=secured).start()
        runners.append(runner)
    config = directory / "kubeconfig.json"
    config.write_text(json.dumps(kubeconfig(world, cert)))
    said = {"key": world.key, "urls": world.urls, "kubeconfig": str(config)}
    print(json.dumps(said), flush=True)
    await stop.wait()
    await world.aclose()
    for runner in runners:
        await runner.cleanup()


def main() -> None:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(prog="doubles.kubernetes", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory for its files")
    asyncio.run(serve(parser.parse_args().directory))


if __name__ == "__main__":
    main()
