"""Starts a program with an environment that all Ray workers of its job get: `python3 -m
rollhook_miles.start`.

A program that Ray's job manager starts finds its runtime environment in RAY_JOB_CONFIG_JSON_ENV_VAR, which
`ray.init` reads; what is needed is added to it, so this works whoever started the job, without a second
submission."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: passed on to the workers where they are set here
_INHERITED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "PYTHONPATH")
_OURS = ("ROLLHOOK_RUN_ID", "ROLLHOOK_ATTEMPT", "ROLLHOOK_JOB_DIR", "ROLLHOOK_JOB_FILES")


def worker_environment(literal: Mapping[str, str], here: Mapping[str, str], address: str) -> dict[str, str]:
    """Return the variables of every worker: the rendered ones, ours, and the network's of this node."""
    found = {name: here[name] for name in (*_INHERITED, *_OURS) if name in here}
    found |= {"MASTER_ADDR": address, "no_proxy": f"127.0.0.1,{address}"}
    return found | dict(literal)


def job_config(before: str, variables: Mapping[str, str]) -> str:
    """Return Ray's job configuration with these variables added to its runtime environment."""
    config: dict[str, Any] = json.loads(before) if before else {}
    runtime = dict(config.get("runtime_env") or {})
    runtime["env_vars"] = {**(runtime.get("env_vars") or {}), **variables}
    return json.dumps({**config, "runtime_env": runtime})


def node_address(ray_address: str) -> str:
    """Return the address of this node on the way to the Ray head; loopback without one."""
    host = ray_address.removeprefix("ray://").rpartition(":")[0] or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def has_nvlink() -> bool:
    """Return whether this node's GPUs are linked."""
    try:
        seen = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(word[:2] == "NV" and word[2:].isdigit() for word in seen.stdout.split())


def main() -> None:
    """Become the program."""
    address = node_address(os.environ.get("RAY_ADDRESS", ""))
    if sys.argv[1:] == ["--address"]:
        sys.stdout.write(f"{address}\n")
        return
    literal: dict[str, str] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    nvls = os.environ.get("NCCL_NVLS_ENABLE") or str(int(has_nvlink()))
    variables = {"NCCL_NVLS_ENABLE": nvls} | worker_environment(literal, os.environ, address)
    os.environ.update(variables)
    os.environ[JOB_CONFIG] = job_config(os.environ.get(JOB_CONFIG, ""), variables)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - a program with its arguments, no shell


if __name__ == "__main__":
    main()
