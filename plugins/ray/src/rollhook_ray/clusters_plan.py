"""The nodes of a cluster and how each is started; nothing here looks at a machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollhook.errors import UsageError
from rollhook_ray.cluster_keys import PORTS_PER_NODE, ClusterKeys, Host
from rollhook_ray.clusters_node import temporary
from rollhook_ray.ssh import local_python

HEAD = "head"
#: ports of a node's daemons, from the node's first; Ray's own default of the agent's is everyone's
_DAEMONS = {
    "node-manager-port": 0,
    "object-manager-port": 1,
    "dashboard-agent-listen-port": 2,
    "dashboard-agent-grpc-port": 3,
    "runtime-env-agent-port": 4,
    "metrics-export-port": 5,
}
_FIRST_WORKER_PORT = 10
#: Ray takes the machine's own address for 127.0.0.1
_LOCAL_ADDRESS = "127.0.0.{}"
_HEAD_STORE_BYTES = 200_000_000
_LOCAL_STORE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Node:
    """A node: `host` is where ssh goes, empty on this machine; `ports` are number -> key below `cluster`."""

    name: str
    host: str
    machine: str
    address: str
    python: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[int, str]
    agent: int

    @property
    def is_head(self) -> bool:
        """Whether it is the head."""
        return self.name == HEAD

    def spec(self, keys: ClusterKeys) -> str:
        """Return a digest of how it is started, to see what has changed."""
        text = json.dumps([self.argv, dict(self.env), keys.setup], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_nodes(
    keys: ClusterKeys,
    *,
    nonce: str,
    resolve: Callable[[str], str] = lambda name: name,
    cpus: int | None = None,
) -> list[Node]:
    """Return the head and the workers, in the order in which they are started.

    `resolve` makes an address of a name; `cpus` are those of this machine. Raises UsageError for keys that
    cannot be met.
    """
    hosts = _hosts(keys)
    addresses = [host.address or resolve(host.host.rpartition("@")[2]) for host in hosts]
    if keys.auth == "none" and not all(map(is_loopback, [*addresses, keys.dashboard_host])):
        raise UsageError("launcher.cluster.auth: none is for loopback addresses; leave it at token")
    nodes: list[Node] = []
    share = max(1, cpus // keys.workers) if cpus and keys.by == "local" else None
    gcs = f"{addresses[0]}:{keys.ports.gcs}"
    temp = f"{temporary(keys.temp_root, nonce)}/ray"
    for index, (host, address) in enumerate(zip(hosts, addresses, strict=True)):
        name = f"worker-{index - 1}" if index else HEAD
        machine = "loopback" if is_loopback(address) else host.host.rpartition("@")[2]
        before = [each for each in nodes if each.machine == machine]
        first = keys.ports.node + PORTS_PER_NODE * len(before)
        if first + PORTS_PER_NODE > 65536:
            raise UsageError(
                f"{name} has no ports left on its machine; set launcher.cluster.ports.node lower"
            )
        python = host.python or (
            local_python(keys.python) if keys.by == "local" else keys.python or "python3"
        )
        env = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token" if keys.auth == "token" else "disabled",
        }
        ports = {first + offset: key for key, offset in _DAEMONS.items()}
        argv = [python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        argv += [f"--node-name={name}", f"--node-ip-address={address}", f"--temp-dir={temp}"]
        argv += [f"--{key}={port}" for port, key in ports.items()]
        argv += [
            f"--min-worker-port={first + _FIRST_WORKER_PORT}",
            f"--max-worker-port={first + PORTS_PER_NODE - 1}",
        ]
        if before:
            argv.append("--include-log-monitor=false")  # the first one's reads the logs of all
        if not index:
            argv += ["--head", f"--port={keys.ports.gcs}", f"--ray-client-server-port={keys.ports.client}"]
            argv += ["--include-dashboard=true", f"--dashboard-host={keys.dashboard_host}"]
            argv += [f"--dashboard-port={keys.ports.dashboard}", "--num-cpus=0", "--num-gpus=0"]
            argv.append(f"--object-store-memory={_HEAD_STORE_BYTES}")
            named = {"gcs": keys.ports.gcs, "dashboard": keys.ports.dashboard, "client": keys.ports.client}
            ports |= {port: f"ports.{key}" for key, port in named.items()}
        else:
            argv.append(f"--address={gcs}")
            argv += _worker(keys, host, share)
            workers = [each for each in before if not each.is_head]
            env |= _gpus(
                keys,
                host,
                len(workers),
                shared=keys.by == "local" or [each.host for each in hosts].count(host.host) > 1,
            )
        ports = {port: name if name.startswith("ports.") else "ports.node" for port, name in ports.items()}
        agent = first + _DAEMONS["dashboard-agent-listen-port"]
        where = "" if keys.by == "local" else host.host
        env |= keys.env
        nodes.append(Node(name, where, machine, address, python, tuple(argv), env, ports, agent))
    return nodes


def on(nodes: list[Node], host: str) -> list[Node]:
    """Return the nodes of a host."""
    return [each for each in nodes if each.host == host]


def start_request(keys: ClusterKeys, node: Node, nonce: str) -> dict[str, Any]:
    """Return what a host is asked to start a node, but for the token and who asks."""
    return {
        "do": "start",
        "cluster": keys.name,
        "node": node.name,
        "nonce": nonce,
        "spec": node.spec(keys),
        "argv": list(node.argv),
        "env": dict(node.env),
        "setup": keys.setup,
        "temp_root": keys.temp_root,
        "agent": [node.address, node.agent],
        "seconds": keys.start_seconds,
        "stop_seconds": keys.stop_seconds,
    }


def is_loopback(address: str) -> bool:
    """Return whether an address is of a machine's own loopback interface."""
    return address.startswith("127.") or address in ("localhost", "::1")


def _hosts(keys: ClusterKeys) -> list[Host]:
    if keys.by == "local":
        addresses = [_LOCAL_ADDRESS.format(number) for number in range(2, keys.workers + 3)]
        return [Host(host="localhost", address=address) for address in addresses]
    return [Host(host=each) if isinstance(each, str) else each for each in keys.hosts]


def _worker(keys: ClusterKeys, host: Host, share: int | None) -> list[str]:
    cpus = host.cpus if host.cpus is not None else keys.cpus_per_worker
    cpus = share if cpus is None else cpus
    gpus = host.gpus if host.gpus is not None else keys.gpus_per_worker
    store = keys.object_store_bytes or (_LOCAL_STORE_BYTES if keys.by == "local" else None)
    found = [f"--resources={json.dumps(keys.worker_resources, sort_keys=True)}"]
    found += [f"--num-cpus={cpus}"] if cpus is not None else []
    found += [f"--num-gpus={gpus}"] if gpus is not None else []
    found += [f"--object-store-memory={store}"] if store is not None else []
    return found


def _gpus(keys: ClusterKeys, host: Host, before: int, *, shared: bool) -> dict[str, str]:
    """Return which GPUs a worker sees, where several workers share those of a machine."""
    gpus = host.gpus if host.gpus is not None else keys.gpus_per_worker
    if not shared or not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(before * gpus + number) for number in range(gpus))}


def dashboard_host(keys: ClusterKeys) -> str:
    """Return where the head itself reaches the dashboard."""
    everywhere = keys.dashboard_host in ("0.0.0.0", "::", "localhost")  # noqa: S104 - none is bound here
    return "127.0.0.1" if everywhere else keys.dashboard_host
