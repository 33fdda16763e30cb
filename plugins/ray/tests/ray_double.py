"""A double of Ray's processes, for what is about processes: `ray start --block` with its agent and dashboard.

It answers at the real ports with the real endpoints' JSON. Nodes of one machine know of each other by files
in the temporary directory. Each has a child in a session of its own with an empty environment, as workers of
Ray may be. DOUBLE_FAIL, DOUBLE_MUTE and DOUBLE_STUBBORN name nodes that do not start, never join, and ignore
TERM; DOUBLE_HELD one that waits for a file `go`; DOUBLE_LATE one that runs into Ray's own limit, once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def named(what: str, node: str) -> bool:
    return node in os.environ.get(f"DOUBLE_{what}", "").split(",")


def main() -> None:
    options = dict(each[2:].partition("=")[::2] for each in sys.argv[4:])
    node, temp = options["node-name"], Path(options["temp-dir"])
    print(f"Double of node {node} starts.", flush=True)
    if named("FAIL", node):
        print("ray: the object store is too small", flush=True)
        sys.exit(1)
    late = temp.parent / f"{node}-was-late"
    if named("LATE", node) and not late.exists():
        late.touch()
        sys.exit("Exception: The current node timed out during startup. This could happen because ...")
    while named("HELD", node) and not (temp.parent / "go").exists():
        time.sleep(0.02)
    if named("STUBBORN", node):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    joined = temp / "joined"
    joined.mkdir(parents=True, exist_ok=True)
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(child, start_new_session=True, env={}).returncode = 0
    if "head" in options:
        token = (
            Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text() if "RAY_AUTH_TOKEN_PATH" in os.environ else ""
        )
        serve(options["dashboard-host"], int(options["dashboard-port"]), lambda: listed(joined), token)
    if not named("MUTE", node):
        (joined / node).write_text(str(os.getpid()))
    serve(options["node-ip-address"], int(options["dashboard-agent-listen-port"]), lambda: "success", "")
    while True:
        time.sleep(1)


def listed(joined: Path) -> str:
    rows = [
        {"node_name": path.name, "state": "ALIVE" if Path(f"/proc/{path.read_text()}").exists() else "DEAD"}
        for path in joined.iterdir()
    ]
    return json.dumps({"result": True, "msg": "", "data": {"result": {"result": rows}}})


def serve(host: str, port: int, answer: object, token: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = not token or self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(answer().encode())  # type: ignore[operator]

        def log_message(self, *_: object) -> None:
            pass

    threading.Thread(target=ThreadingHTTPServer((host, port), Handler).serve_forever, daemon=True).start()


main()
