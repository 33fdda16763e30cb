"""A real Ray cluster on this machine for tests: a head without CPUs, and workers, on loopback addresses.

    @pytest.fixture(scope="session")
    def cluster(tmp_path_factory) -> Iterator[RayCluster]:
        with ray_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
            yield cluster

Only processes that it started are ever ended. All nodes see one another's processes, so a driver attaches to
the raylet of the head wherever it was started: tell nodes apart by their ids or addresses as actors see them.
About 1.5 GB with two workers, and 10 to 20 s on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: a custom resource that workers have and the head has not
WORKER_RESOURCE = "worker_node"
#: no telemetry, no metrics agent, and a dead node is noticed within seconds
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
_START_SECONDS = 120.0


@dataclass
class Node:
    """A node of the cluster: the address that others know it by, and the process that keeps it."""

    name: str
    host: str
    agent_port: int
    log: Path
    process: subprocess.Popen[bytes]

    def processes(self) -> list[int]:
        """Return the processes of the node that are alive: Ray's own, and below them actors and children."""
        return processes_below(self.process.pid)

    def kill(self) -> None:
        """Kill all of it at once, as if its machine had gone."""
        while pids := self.processes():  # until none is left that could start another
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()


@dataclass
class RayCluster:
    """A running cluster; `address` is what RAY_ADDRESS takes, `dashboard` the URL of its job API."""

    directory: Path
    address: str
    dashboard: str
    head: Node
    workers: list[Node] = field(default_factory=list)
    cpus: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)

    def add_worker(self, *, resources: Mapping[str, float] | None = None) -> Node:
        """Start one more worker, at the next loopback address, and return when its raylet has joined."""
        number = len(self.workers) + 2
        offered = {WORKER_RESOURCE: 100.0} if resources is None else dict(resources)
        arguments = [
            f"--address={self.address}",
            f"--num-cpus={self.cpus}",
            f"--resources={json.dumps(offered)}",
        ]
        node = _start_again(
            self.directory, f"worker-{number - 2}", f"127.0.0.{number}", lambda: arguments, self.environment
        )
        self.workers.append(node)
        return node

    def stop(self) -> None:
        """End it, and remove Ray's own files."""
        for node in [*self.workers, self.head]:
            node.kill()
        shutil.rmtree(_temporary(self.directory).resolve(), ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(
    directory: Path, *, workers: int = 2, cpus: int = 4, environment: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """Give a cluster of a 0-CPU head and `workers` workers of `cpus` CPUs each; logs go to `directory`.

    `environment` is set for all its nodes, and for what they run. Skips the test where Ray is absent.
    """
    import pytest

    pytest.importorskip("ray", reason="needs ray: pip install 'rollhook[ray]'")
    variables = ENVIRONMENT | dict(environment or {})
    directory.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix="rh-test-", dir="/tmp")  # sockets have short paths
    _temporary(directory).symlink_to(temporary)
    port = dashboard = 0

    def arguments() -> list[str]:
        nonlocal port, dashboard
        port, dashboard = free_port(), free_port()
        return [
            "--head",
            f"--port={port}",
            "--num-cpus=0",
            "--num-gpus=0",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={temporary}",
        ]

    head = _start_again(directory, "head", "127.0.0.1", arguments, variables)
    cluster = RayCluster(
        directory, f"{head.host}:{port}", f"http://127.0.0.1:{dashboard}", head, [], cpus, variables
    )
    try:
        for _ in range(workers):
            cluster.add_worker()
        yield cluster
    finally:
        cluster.stop()


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_below(root: int) -> list[int]:
    """Return the live processes of the session that `root` leads, and all that descend from one of them."""
    parents: dict[int, list[int]] = {}
    stack, found = [root], []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if state not in "ZX":
            pid = int(path.parent.name)
            parents.setdefault(int(parent), []).append(pid)
            if int(session) == root:
                stack.append(pid)
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.append(pid)
            stack += parents.get(pid, [])
    return [pid for pid in found if pid != root or Path(f"/proc/{root}").exists()]


def _start_again(
    directory: Path,
    name: str,
    host: str,
    arguments: Callable[[], list[str]],
    environment: Mapping[str, str],
    tries: int = 3,
) -> Node:
    """Start a node, and again if it does not come up: a port that was free may be taken meanwhile."""
    for _ in range(tries - 1):
        with contextlib.suppress(AssertionError):
            return _start(directory, name, host, arguments(), environment)
    return _start(directory, name, host, arguments(), environment)


def _start(
    directory: Path, name: str, host: str, arguments: list[str], environment: Mapping[str, str]
) -> Node:
    """Start one node, by `ray start --block` in a session of its own, and wait until it is up."""
    agent_port = free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        f"--node-ip-address={host}",
        f"--dashboard-agent-listen-port={agent_port}",
        "--object-store-memory=100000000",
        *arguments,
    ]
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=os.environ | dict(environment), cwd=directory, start_new_session=True,
        )  # fmt: skip
    node = Node(name, host, agent_port, log, process)
    deadline = time.monotonic() + _START_SECONDS
    while "Ray runtime started" not in log.read_text() or not _answers(agent_port):
        if process.poll() is not None or time.monotonic() > deadline:
            node.kill()
            raise AssertionError(f"node {name} of the Ray cluster did not come up:\n{log.read_text()}")
        time.sleep(0.1)
    if found := re.search(r"Local node IP.*?(\d+\.\d+\.\d+\.\d+)", log.read_text()):
        node.host = found[1]  # Ray takes this machine's own address for 127.0.0.1
    return node


def _answers(port: int) -> bool:
    """Return whether a node's agent listens: without it no job can be submitted there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _temporary(directory: Path) -> Path:
    return directory / "ray"
