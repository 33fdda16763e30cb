"""What a host of a cluster answers: it is looked at, nodes are started and ended, packages are installed.

Sent to the host with `clusters_node` and `clusters_old`; the standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from rollhook_ray import clusters_node
from rollhook_ray.clusters_node import (
    Process,
    Refused,
    belonging,
    clusters_directory,
    command,
    directory,
    emit,
    end,
    end_node,
    forget,
    here,
    keeper_of,
    locked,
    machine,
    processes,
    read_states,
    state_file,
    states_here,
    temporary,
    write,
)
from rollhook_ray.clusters_old import find_old, remove_old


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a node, and wait until its agent answers; what runs already is kept."""
    cluster, node = request["cluster"], request["node"]
    with locked(cluster, node):
        state = read_states(cluster).get(node)
        if state is not None and state["nonce"] == request["nonce"]:
            running = keeper_of(state)
            if running is not None:
                return {"kept": True, "pid": running.pid}
            end(belonging(state, processes()), request["stop_seconds"])
        elif state is not None and keeper_of(state) is not None:
            raise Refused(f"node {node} of another cluster of this name runs here")
        home = directory(cluster)
        _make_private(temporary(request["temp_root"], request["nonce"]))  # Ray lets all write into its own
        names = (
            "cluster",
            "node",
            "nonce",
            "spec",
            "argv",
            "env",
            "setup",
            "temp_root",
            "from",
            "stop_seconds",
        )
        state = {name: request[name] for name in names}
        state.update({"schema": 1, "started": time.time(), "machine": machine()})
        if request["token"] is not None:
            write(os.path.join(home, "token"), request["token"])
            state["env"]["RAY_AUTH_TOKEN_PATH"] = os.path.join(home, "token")
        write(state_file(cluster, node), json.dumps(state))
        program = os.path.join(home, "node.py")
        write(program, clusters_node.SOURCE)
        log = os.path.join(home, "logs", node + ".log")
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            keeper = subprocess.Popen(
                [sys.executable, program, cluster, node],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=home, start_new_session=True,
            )  # fmt: skip
        while keeper.poll() is None and "keeper" not in read_states(cluster)[node]:
            time.sleep(0.02)
    deadline = time.monotonic() + request["seconds"]
    address, port = request["agent"]
    while request["wait"] and not _answers(f"http://{address}:{port}/api/local_raylet_healthz", None):
        if keeper.poll() is not None or "ended" in read_states(cluster).get(node, {}):
            raise Refused("Ray ended as it started; its log ends:\n" + tail(cluster, node))
        if time.monotonic() > deadline:
            words = "its agent at %s:%d did not answer within %g s; its log ends:\n"
            raise Refused(words % (address, port, request["seconds"]) + tail(cluster, node))
        time.sleep(0.1)
    return {"kept": False, "pid": keeper.pid}


def _make_private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if (
        found.st_uid != os.getuid()
        or not os.path.isdir(path)
        or os.path.islink(path)
        or found.st_mode & 0o022
    ):
        raise Refused(f"{path} is there and is not a directory of this user alone")


def stop(request: dict[str, Any]) -> list[dict[str, Any]]:
    """End nodes of a cluster in the order asked, and what they leave; a node of another nonce is let be."""
    cluster, done = request["cluster"], []
    for node in request["nodes"]:
        with locked(cluster, node):
            state = states_here(cluster).get(node)
            if state is None or state["nonce"] != request["nonce"]:
                continue
            done.append(end_node(state))
    forget(cluster)
    return done


def await_nodes(request: dict[str, Any]) -> dict[str, Any]:
    """Wait on the head until all nodes that are named have joined; return those that have not."""
    deadline, missing, token = time.monotonic() + request["seconds"], request["nodes"], request["token"]
    host, port = request["dashboard"]
    url = f"http://{host}:{port}/api/v0/nodes?detail=1&limit=10000"
    while True:
        answer = _answers(url, token)
        alive = {}
        if answer:
            result = json.loads(answer)["data"]["result"]["result"]
            alive = {each["node_name"]: each for each in result if each["state"] == "ALIVE"}
        now = [name for name in request["nodes"] if name not in alive]
        if len(now) < len(missing) and now:
            emit("say", "waiting for {}".format(", ".join(now)))
        missing = now
        if not missing or time.monotonic() > deadline:
            return {"missing": missing, "nodes": alive, "answers": bool(answer)}
        time.sleep(0.2)


def _answers(url: str, token: str | None) -> str:
    """Return what is answered with 200; empty if it is not."""
    request = urllib.request.Request(url)  # noqa: S310 - an address of our own
    if token:
        request.add_header("Authorization", "Bearer " + token)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text or "empty"
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def tail(cluster: str, node: str, lines: int = 15) -> str:
    """Return the end of a node's log, without colours."""
    try:
        with open(os.path.join(clusters_directory(), cluster, "logs", node + ".log"), encoding="utf-8",
                  errors="replace") as stream:  # fmt: skip
            text = re.sub(r"\x1b\[[0-9;]*m", "", stream.read()[-20000:])
    except OSError:
        return "(there is no log)"
    kept = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join("    " + line[:300] for line in kept[-lines:]) or "(its log is empty)"


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Say what is here: the machine, Python and Ray, nodes of the cluster, taken ports, older deployments."""
    cluster, table = request["cluster"], processes()
    nodes, ours = {}, set()
    for name, state in states_here(cluster).items():
        group = belonging(state, table)
        ours |= {each.pid for each in group}
        keeper = keeper_of(state)
        nodes[name] = {
            "nonce": state["nonce"], "spec": state["spec"], "from": state["from"],
            "started": state["started"],
            "pid": keeper.pid if keeper else None, "left": len(group), "ended": state.get("ended"),
        }  # fmt: skip
    try:
        ray: str | None = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = None
    listening = _listening()
    busy = []
    for port in request["ports"]:
        for inode in listening.get(port, []):
            holder = _holder(inode, table)
            if holder is None or holder not in ours:
                busy.append({"port": port, "pid": holder, "command": command(holder)[:160] if holder else ""})
    return {
        "hostname": socket.gethostname(), "uid": os.getuid(), "python": sys.version.split()[0], "ray": ray,
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")), "cpus": len(os.sched_getaffinity(0)),
        "nodes": nodes, "busy": busy, "addresses": [a for a in request["addresses"] if _is_own(a)],
        "old": find_old(cluster, request["nonce"], request["old"], table, ours) if request["old"] else None,
        "temp": os.access(request["temp_root"], os.W_OK), **here(),
    }  # fmt: skip


def _is_own(address: str) -> bool:
    try:
        family = socket.getaddrinfo(address, 0)[0][0]
        with socket.socket(family) as attempt:
            attempt.bind((address, 0))
    except OSError:
        return False
    return True


def _listening() -> dict[int, list[str]]:
    """Return the inodes of the TCP sockets that listen, by port."""
    found: dict[int, list[str]] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as stream:
            for fields in [line.split() for line in stream][1:]:
                if fields[3] == "0A":
                    found.setdefault(int(fields[1].rpartition(":")[2], 16), []).append(fields[9])
    return found


def _holder(inode: str, table: dict[int, Process]) -> int | None:
    wanted = f"socket:[{inode}]"
    for pid in table:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}") == wanted:
                        return pid
    return None


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Install packages into this Python with pip."""
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "constraints.txt")
        write(path, request["constraints"])
        # the constraints hold for what is built, too
        command_line = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check",
                        "-c", path, *request["options"], *request["packages"]]  # fmt: skip
        running = subprocess.Popen(
            command_line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        last: list[str] = []
        assert running.stdout is not None
        for line in running.stdout:
            last = [*last[-14:], line.rstrip()]
            if line.startswith(("Collecting", "Installing", "Successfully", "  Downloading", "Building")):
                emit("say", line.strip())
        if running.wait():
            raise Refused(
                f"pip ended with code {running.returncode}:\n" + "\n".join("    " + x for x in last)
            )
    return {}


def log(request: dict[str, Any]) -> str:
    """Return the end of a node's log."""
    return tail(request["cluster"], request["node"])


REQUESTS = {
    "probe": probe, "start": start, "stop": stop, "await": await_nodes, "remove_old": remove_old,
    "install": install, "log": log,
}  # fmt: skip


def main(request: dict[str, Any]) -> None:
    """Answer one request."""
    try:
        emit("result", REQUESTS[request["do"]](request))
    except Refused as error:
        emit("error", str(error))
    except OSError as error:
        emit("error", f"{error.filename or request['do']}: {error.strerror or error}")
