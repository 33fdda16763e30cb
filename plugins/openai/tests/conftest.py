"""A double of an endpoint in a process of its own, started once."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

#: the key that the double wants; it may be found in nothing that is written
KEY = "sk-sentinel-0123456789abcdef"


class Double:
    """Steers the double, and reads what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url

    def script(self, *steps: dict[str, Any], **more: Any) -> None:
        """Say what the next requests are answered with; forgets what came before."""
        body = json.dumps({"steps": steps, "models": {"double-1": {"max_model_len": 4096}}, **more}).encode()
        urllib.request.urlopen(urllib.request.Request(self.url + "/script", body)).close()

    def log(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/log") as response:
            found: dict[str, Any] = json.load(response)
        return found


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    argv = [sys.executable, "-m", "rollhook.testing.chat_server", KEY]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.communicate(timeout=30)


@pytest.fixture
def double(server: str, monkeypatch: pytest.MonkeyPatch) -> Double:
    monkeypatch.setenv("DOUBLE_KEY", KEY)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    found = Double(server)
    found.script()
    return found
