"""The openenv package, apart from this environment, and a server of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollhook.testing.parts import needs_part

#: what a server of it needs beyond what is installed here; its own list of requirements is long
PACKAGES = ["openenv==0.10.0", "fastapi>=0.116", "annotated-doc"]
SERVER = Path(__file__).with_name("guess_server.py")


@pytest.fixture(scope="session")
def openenv(tmp_path_factory):
    """Return the environment variables with which a Python has openenv."""
    return install(tmp_path_factory.mktemp("openenv"), PACKAGES)


@pytest.fixture(scope="session")
def oldest_openenv(tmp_path_factory):
    """Return the same for the oldest release whose protocol is spoken."""
    return install(tmp_path_factory.mktemp("oldest"), ["openenv-core==0.3.0", *PACKAGES[1:]])


def install(target, packages):
    """Install packages alone into a directory."""
    for part in ("fastmcp", "uvicorn"):
        needs_part(part)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, *packages]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        pytest.skip(f"needs pypi (pip did not install {packages}: {done.stderr[-200:]})")
    return {"PYTHONPATH": str(target), "PATH": os.environ["PATH"]}


@pytest.fixture(scope="session")
def guess_url(openenv):
    """Serve in a process of its own; return its address."""
    process, url = serve(openenv)
    yield url
    process.kill()
    process.wait()


def serve(env, *more):
    """Start the server and wait until it answers."""
    import socket
    import urllib.request

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port), *more], env=env)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    raise AssertionError("the server does not answer")
