"""Starts the double for a test and speaks to its control port."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]


class Double:
    """A running double: `url("daytona")`, `key`, and what tests ask of it. Calls block for a moment."""

    def __init__(self, urls: dict[str, str], key: str, pid: int) -> None:
        self.urls = urls
        self.key = key
        self.pid = pid

    def url(self, surface: str) -> str:
        """Return the base URL of a surface, without a slash at its end."""
        return self.urls[surface]

    def fault(self, **rule: Any) -> int:
        """Add a rule (see `doubles.faults`) and return its number."""
        return int(self._ask("POST", "/faults", rule)["number"])

    def hits(self, number: int) -> int:
        """Return how many requests a rule has hit."""
        return int(self._ask("GET", f"/faults/{number}")["hits"])

    def clear_faults(self) -> None:
        """Remove all rules."""
        self._ask("DELETE", "/faults")

    def options(self, **values: Any) -> None:
        """Set options (see `doubles.world.Options`)."""
        self._ask("POST", "/options", values)

    def journal(self) -> list[dict[str, Any]]:
        """Return every request so far, in order."""
        return list(self._ask("GET", "/journal"))

    def requests(self, method: str, path: str) -> list[dict[str, Any]]:
        """Return the requests of a method whose path contains a text."""
        return [e for e in self.journal() if e.get("method") == method and path in e["path"]]

    def problems(self) -> list[dict[str, Any]]:
        """Return requests that the double does not know, and what failed in it: both must be none."""
        return [entry for entry in self.journal() if entry.get("miss") or entry.get("failed")]

    def machines(self) -> list[str]:
        """Return the ids of the machines that are there."""
        return list(self._ask("GET", "/state")["machines"])

    def counts(self) -> dict[str, int]:
        """Return what the double has counted."""
        return dict(self._ask("GET", "/state")["counts"])

    def kill_machine(self, machine_id: str) -> None:
        """End a machine as a crash of its host would; its record stays."""
        self._ask("POST", f"/machines/{machine_id}/kill")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self.urls["control"] + path, method=method)
        request.add_header("X-Key", self.key)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def vendors(**options: Any) -> Iterator[Double]:
    """Run the double, with these options set; at the end no request may have been unknown to it."""
    with tempfile.TemporaryDirectory(prefix="rollhook-double-") as directory:
        program = subprocess.Popen(
            [sys.executable, "-m", "doubles.vendors", "--directory", directory],
            cwd=_TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert program.stdin and program.stdout  # noqa: PT018
        try:
            line = program.stdout.readline()
            if not line:
                raise RuntimeError(f"the double ended with {program.wait()}; see its messages above")
            said = json.loads(line)
            double = Double(said["urls"], said["key"], program.pid)
            if options:
                double.options(**options)
            yield double
            if problems := double.problems():
                raise AssertionError(f"the double does not know or failed in {problems}")
        finally:
            program.stdin.close()
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            program.stdout.close()
