"""A Ray cluster whose nodes have networks and processes of their own, as on three machines; needs root.

    with namespaced_cluster(directory) as cluster:
        subprocess.run([*cluster.on_head, "curl", "http://127.0.0.1:8265"])

All ports are Ray's defaults, and a driver's address is that of its node. All nodes see the same files, but
for /tmp/ray, which is one's own. Only what was started and made here is ended and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollhook.testing.ray_cluster import ENVIRONMENT, processes_below

START_SECONDS = 90.0


@dataclass(frozen=True)
class NamespacedCluster:
    """`dashboard` is as this process reaches it; `on_head` comes before a command that runs on the head."""

    dashboard: str
    on_head: tuple[str, ...]
    head: str
    workers: tuple[str, ...]


@contextlib.contextmanager
def namespaced_cluster(
    directory: Path, *, workers: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[NamespacedCluster]:
    """Give a head without CPUs, and workers of 4 CPUs with the resource worker_node; in about 40 s."""
    if os.geteuid() != 0:
        pytest.skip("needs root: networks and processes of their own are made for each node")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2: apt-get install iproute2")
    name, subnet = f"rh{secrets.token_hex(3)}", f"10.203.{secrets.randbelow(254)}"
    hosts = [f"{subnet}.{number + 1}" for number in range(workers + 1)]
    processes: list[subprocess.Popen[bytes]] = []
    temporary = Path(tempfile.mkdtemp(prefix="rh-ns-", dir="/tmp"))
    Path("/tmp/ray").mkdir(exist_ok=True)
    try:
        try:
            _network(name, subnet, hosts)
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"needs netns (the right to make network namespaces): {error.stderr.decode().strip()}"
            )
        for number, host in enumerate(hosts):
            words = _words(number, host, hosts[0])
            log = directory / f"node-{number}.log"
            processes.append(
                _start(f"{name}-{number}", temporary / str(number), words, log, environment or {})
            )
            _wait_for(f"http://{hosts[0]}:8265", number + 1, processes[-1], log)
        on_head = ("ip", "netns", "exec", f"{name}-0")
        yield NamespacedCluster(f"http://{hosts[0]}:8265", on_head, hosts[0], tuple(hosts[1:]))
    finally:
        for process in reversed(processes):
            for pid in processes_below(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(30)
        for number in range(len(hosts)):
            subprocess.run(["ip", "netns", "del", f"{name}-{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        shutil.rmtree(temporary, ignore_errors=True)


def _network(name: str, subnet: str, hosts: list[str]) -> None:
    """Make a bridge, and a network namespace with one address on it for each node."""
    _ip("link", "add", "name", name, "type", "bridge")
    _ip("addr", "add", f"{subnet}.254/24", "dev", name)
    _ip("link", "set", name, "up")
    for number, host in enumerate(hosts):
        space, here = f"{name}-{number}", f"{name}v{number}"
        _ip("netns", "add", space)
        _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", here, "master", name, "up")
        _ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        _ip("-n", space, "route", "add", "default", "via", f"{subnet}.254")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _words(number: int, host: str, head: str) -> list[str]:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    ray += [f"--node-ip-address={host}", "--object-store-memory=100000000"]
    if number == 0:
        return [*ray, "--head", "--num-cpus=0", "--num-gpus=0", "--dashboard-host=0.0.0.0"]
    return [*ray, f"--address={head}:6379", "--num-cpus=4", '--resources={"worker_node": 100}']


def _start(
    space: str, temporary: Path, words: list[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    temporary.mkdir()
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    script = 'mount --bind "$0" /tmp/ray && exec "$@"'
    with log.open("wb") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", space, *apart, "sh", "-c", script, str(temporary), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT | dict(environment),
            cwd=log.parent,
            start_new_session=True,
        )


def _wait_for(dashboard: str, nodes: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until so many nodes are alive."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError, KeyError, ValueError):
            with urllib.request.urlopen(f"{dashboard}/api/v0/nodes", timeout=5) as answer:
                rows = json.load(answer)["data"]["result"]["result"]
            if sum(row["state"] == "ALIVE" for row in rows) >= nodes:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"node {nodes} of the Ray cluster did not come up:\n{log.read_text()}")
        time.sleep(0.2)
