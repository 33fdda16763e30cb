"""Starts the double for a test and speaks to its control port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]


class Cluster:
    """A running double: `kubeconfig`, `url`, `key`, and what tests ask of it. Calls block for a moment."""

    def __init__(self, said: dict[str, Any], directory: Path, pid: int) -> None:
        self.kubeconfig = Path(said["kubeconfig"])
        self.url: str = said["urls"]["api"]
        self.key: str = said["key"]
        self.directory = directory
        self.pid = pid
        self._control: str = said["urls"]["control"]

    def fault(self, **rule: Any) -> int:
        """Add a rule (see `doubles.faults`; hints: `doubles.kubernetes`) and return its number."""
        return int(self._ask("POST", "/faults", rule)["number"])

    def hits(self, number: int) -> int:
        """Return how many requests a rule has hit."""
        return int(self._ask("GET", f"/faults/{number}")["hits"])

    def clear_faults(self) -> None:
        """Remove all rules."""
        self._ask("DELETE", "/faults")

    def options(self, **values: Any) -> None:
        """Set options (see `doubles.kubernetes.world.Options`)."""
        self._ask("POST", "/options", values)

    def namespace(self, name: str) -> str:
        """Make a namespace, and return its name."""
        self._ask("POST", f"/namespaces/{name}")
        return name

    def pods(self, **script: Any) -> None:
        """Add a script for pods (see `doubles.kubernetes.kubelet`)."""
        self._ask("POST", "/scripts/pods", script)

    def jobs(self, **script: Any) -> None:
        """Add a script for the Ray jobs of RayJobs (see `doubles.kubernetes.ray_jobs`)."""
        self._ask("POST", "/scripts/jobs", script)

    def clear_scripts(self) -> None:
        """Remove all scripts."""
        self._ask("DELETE", "/scripts")

    def kill_pod(self, namespace: str, name: str) -> None:
        """End a pod's container as a crash would."""
        self._ask("POST", f"/pods/{namespace}/{name}/kill")

    def serve(self, namespace: str, name: str, ports: dict[int, int]) -> None:
        """Say where on this machine a pod's ports are, for port-forwards."""
        self._ask("POST", f"/pods/{namespace}/{name}/ports", {str(k): v for k, v in ports.items()})

    def claim(self, namespace: str, name: str) -> Path:
        """Return the directory behind a PersistentVolumeClaim; it is there once a pod has mounted it."""
        return self.directory / "claims" / namespace / name

    def compact(self) -> None:
        """Forget the history: watches from an older version get 410."""
        self._ask("POST", "/compact")

    def journal(self) -> list[dict[str, Any]]:
        """Return every request so far, in order."""
        return list(self._ask("GET", "/journal"))

    def requests(self, method: str, path: str) -> list[dict[str, Any]]:
        """Return the requests of a method whose path contains a text."""
        return [each for each in self.journal() if each.get("method") == method and path in each["path"]]

    def problems(self) -> list[dict[str, Any]]:
        """Return requests that the double does not know, and what failed in it: both must be none."""
        return [entry for entry in self.journal() if entry.get("miss") or entry.get("failed")]

    def objects(self, kind: str, namespace: str | None = None) -> list[dict[str, Any]]:
        """Return the stored objects of a kind, past the API."""
        found = [each for each in self._ask("GET", "/objects") if each["kind"] == kind]
        return [each for each in found if namespace in (None, each["metadata"].get("namespace"))]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self._control + path, method=method)
        request.add_header("X-Key", self.key)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def cluster(**options: Any) -> Iterator[Cluster]:
    """Run the double, with these options set; at the end no request may have been unknown to it."""
    with tempfile.TemporaryDirectory(prefix="rh-k8s-") as directory:
        program = subprocess.Popen(
            [sys.executable, "-m", "doubles.kubernetes", "--directory", directory],
            cwd=_TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert program.stdin and program.stdout  # noqa: PT018
        try:
            line = program.stdout.readline()
            if not line:
                raise RuntimeError(f"the double ended with {program.wait()}; see its messages above")
            double = Cluster(json.loads(line), Path(directory), program.pid)
            if options:
                double.options(**options)
            yield double
            if problems := double.problems():
                raise AssertionError(f"the double does not know or failed in {problems}")
        finally:
            program.stdin.close()
            try:
                program.wait(30)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            program.stdout.close()
