"""`rollhook cluster` with `launcher: ray`; Ray's own processes are a double, all else is real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import double_python, free_ports

from rollhook_ray import clusters_node


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    short = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    keys = {"name": "verbs", "python": double_python(tmp_path), "temp_root": str(short), "workers": 1}
    ports = {f"ports.{name}": port for name, port in free_ports().items()}
    old = {"old_sessions": "/none", "old_containers": "[]"}
    yield [
        "quickstart",
        "launcher.use=ray",
        *(f"+launcher.cluster.{k}={v}" for k, v in (keys | ports | old).items()),
    ]
    for state in clusters_node.read_states("verbs").values():
        clusters_node.end_node(state)
    shutil.rmtree(short, ignore_errors=True)


def rollhook(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rollhook.cli.main", "cluster", verb, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ)


def test_up_status_and_down(arguments: list[str]) -> None:
    planned = rollhook("up", *arguments, "--dry-run", "--json")
    assert list(json.loads(planned.stdout)["requests"]) == ["head", "worker-0"]
    assert rollhook("status", *arguments).returncode == 1

    up = rollhook("up", *arguments)
    assert up.returncode == 0, up.stderr
    assert "worker-0: up after" in up.stderr
    status = rollhook("status", *arguments, "--json")
    assert status.returncode == 0
    (info,) = json.loads(status.stdout)
    assert (info["state"], info["nodes"]) == ("ready", 2)

    refused = rollhook("up", *arguments, "+launcher.cluster.setup=umask 027")
    assert refused.returncode == 1
    assert "--recreate replaces what differs" in refused.stderr
    assert "Traceback" not in refused.stderr

    down = rollhook("down", *arguments, "--old", "--yes")
    assert [line.split()[1] for line in down.stdout.splitlines()] == ["worker-0", "head"]
    assert rollhook("down", *arguments).stdout == "There was nothing to end.\n"
    assert rollhook("up", "quickstart", "launcher.use=ray", "+launcher.cluster.by=compose").returncode == 2
