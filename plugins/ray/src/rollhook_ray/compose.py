"""The docker-compose project of a cluster: a head without CPUs and GPUs, and workers; rendered only.

Keys are those of the Compose Specification (https://github.com/compose-spec/compose-spec).
"""

from __future__ import annotations

import json
from typing import Any

from rollhook_ray.cluster_keys import ClusterKeys
from rollhook_ray.clusters_plan import HEAD

COMPOSE_FILE = "docker-compose.yaml"
_SECRET = "ray_token"  # noqa: S105 - its name
_SECRET_PATH = f"/run/secrets/{_SECRET}"


def render(keys: ClusterKeys) -> dict[str, str]:
    """Return the project's files: name -> text."""
    services = {HEAD: _service(keys, HEAD, _head(keys))}
    services[HEAD] |= {
        "ports": [f"{keys.dashboard_host}:{keys.ports.dashboard}:{keys.ports.dashboard}"],
        "healthcheck": {
            "test": ["CMD", "ray", "health-check", "--address", f"localhost:{keys.ports.gcs}"],
            "interval": "5s",
            "timeout": "10s",
            "retries": 24,
        },
    }
    for number in range(keys.workers):
        name = f"worker-{number}"
        services[name] = _service(keys, name, _worker(keys))
        services[name]["depends_on"] = {HEAD: {"condition": "service_healthy"}}
        if keys.gpus_per_worker:
            first = number * keys.gpus_per_worker
            ids = [str(first + each) for each in range(keys.gpus_per_worker)]
            device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            services[name]["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    project: dict[str, Any] = {"name": keys.name, "services": services}
    if keys.auth == "token":
        project["secrets"] = {_SECRET: {"file": f"./{keys.name}.token"}}
    return {COMPOSE_FILE: "# Written by Rollhook.\n" + _yaml(project)}


def _service(keys: ClusterKeys, name: str, options: list[str]) -> dict[str, Any]:
    start = ["ray", "start", "--block", "--disable-usage-stats", f"--node-name={name}", *options]
    command = start
    if keys.setup.strip():
        command = ["bash", "-c", f'set -e\n{keys.setup}\nexec "$@"', "setup", *start]
    environment = {"RAY_USAGE_STATS_ENABLED": "0"} | keys.env
    service: dict[str, Any] = {
        "image": keys.compose.image,
        "container_name": f"{keys.name}-ray-{name}",
        "hostname": name,
        "command": [_literal(each) for each in command],
        "volumes": [
            {"type": "bind", "source": keys.compose.shared, "target": keys.compose.shared_root}
        ],
        "shm_size": keys.compose.shm_size,
        "init": True,
        "stop_grace_period": f"{keys.stop_seconds:g}s",
    }  # fmt: skip
    if keys.auth == "token":
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": _SECRET_PATH}
        service["secrets"] = [_SECRET]
    service["environment"] = {key: _literal(value) for key, value in environment.items()}
    return service


def _head(keys: ClusterKeys) -> list[str]:
    return [
        "--head", f"--port={keys.ports.gcs}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=true",
        "--dashboard-host=0.0.0.0", f"--dashboard-port={keys.ports.dashboard}",
        f"--ray-client-server-port={keys.ports.client}",
    ]  # fmt: skip


def _worker(keys: ClusterKeys) -> list[str]:
    found = [f"--address={HEAD}:{keys.ports.gcs}", f"--resources={json.dumps(keys.worker_resources)}"]
    found += [f"--num-cpus={keys.cpus_per_worker}"] if keys.cpus_per_worker is not None else []
    found += [f"--num-gpus={keys.gpus_per_worker}"] if keys.gpus_per_worker is not None else []
    found += [f"--object-store-memory={keys.object_store_bytes}"] if keys.object_store_bytes else []
    return found


def _literal(text: str) -> str:
    """Return text in which Compose expands no variable."""
    return text.replace("$", "$$")


def _yaml(value: Any) -> str:
    """Return a value as YAML, in the order of its keys."""
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000))
