"""A Podman service of a test session's own: its socket, storage, state and configuration touch nobody else's.

    @pytest.fixture(scope="session")
    def engine() -> Iterator[Engine]:
        with container_engine() as engine:
            yield engine

Where DOCKER_HOST names an engine, Docker's or another, that one is used, and the images are its own business:
`ROLLHOOK_TEST_IMAGE` then names one with bash, coreutils and python3.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

#: what `.ci/packages` makes: a minimal Debian with procps and python3
BASE_IMAGE = "localhost/rollhook-debian:1"
_PROGRAMS = ("podman", "runc", "catatonit", "iptables")
_START_SECONDS = 60.0

_CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
lock_type = "file"
exit_command_delay = 86400
tmp_dir = "{root}/tmp"
[network]
network_backend = "netavark"
network_config_dir = "{root}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{root}/storage"
runroot = "{root}/run"
[storage.options]
additionalimagestores = ["{images}"]
"""


@dataclass
class Engine:
    """An engine for tests: its address, and an image to make containers of; `root` where it is our own."""

    host: str
    image: str
    root: Path | None = None
    service: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service (again)."""
        assert self.root is not None
        environ = {
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
            "CONTAINERS_CONF": str(self.root / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.root / "storage.conf"),
            "HOME": str(self.root),
        }
        with (self.root / "log").open("ab") as log:
            self.service = subprocess.Popen(
                ["podman", "--log-level=warn", "system", "service", "--time=0", self.host],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True,
                cwd=self.root,  # where conmon notes that memory ran out
            )  # fmt: skip
        socket = Path(self.host.removeprefix("unix://"))
        deadline = time.monotonic() + _START_SECONDS
        while not socket.is_socket():
            if self.service.poll() is not None or time.monotonic() > deadline:
                said = (self.root / "log").read_text()[-1000:]
                self.stop()
                pytest.fail(f"`podman system service` did not start: {said}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the service, by its process id; its containers go on."""
        if self.service is not None:
            self.service.send_signal(signal.SIGTERM)
            try:
                self.service.wait(10)
            except subprocess.TimeoutExpired:
                self.service.kill()
                self.service.wait()
            self.service = None
        Path(self.host.removeprefix("unix://")).unlink(missing_ok=True)

    def podman(self, *argv: str, check: bool = True) -> str:
        """Run `podman` on this engine's storage and return what it prints."""
        assert self.root is not None
        environ = {
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
            "CONTAINERS_CONF": str(self.root / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.root / "storage.conf"),
        }
        done = subprocess.run(["podman", *argv], env=environ, capture_output=True, text=True, check=check)
        return done.stdout


def base_images() -> Path | None:
    """Return the store that `.ci/packages` made in the checkout around the working directory or this file."""
    for start in (Path.cwd(), Path(__file__)):
        for directory in (start, *start.parents):
            if (directory / ".ci/images/made").is_file():
                return directory / ".ci/images/store"
    return None


def missing() -> str:
    """Return why containers cannot be tested here, or an empty string."""
    if os.environ.get("DOCKER_HOST"):
        return ""
    if os.geteuid() != 0:
        return "needs podman (its service is tested as root; or name an engine in DOCKER_HOST)"
    found = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    if absent := [name for name in _PROGRAMS if shutil.which(name, path=found) is None]:
        return f"needs podman ({', '.join(absent)} not found: apt-get install {' '.join(absent)})"
    if base_images() is None:
        return "needs podman (and a base image for it: run .ci/packages)"
    return ""


def _end_monitors(root: Path) -> None:
    """End what Podman leaves for each command: a process that waits to tidy up after it."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (process / "cmdline").read_bytes().split(b"\0")
            if argv[0].endswith(b"conmon") and any(f"{root}/".encode() in part for part in argv):
                os.kill(int(process.name), signal.SIGKILL)


@contextlib.contextmanager
def container_engine(storage_bytes: int | None = None) -> Iterator[Engine]:
    """Give an engine for the session; skips with the part that is missing, and clears up behind itself.

    With `storage_bytes` it is always one of our own, and all its containers together may hold no more.
    """
    if reason := missing():
        pytest.skip(reason)
    host = os.environ.get("DOCKER_HOST")
    if host and storage_bytes is None:
        yield Engine(host, os.environ.get("ROLLHOOK_TEST_IMAGE", "docker.io/library/python:3.12-bookworm"))
        return
    # short, as a socket's path may hold 107 characters; in memory, as Podman waits for the disk at each step
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="rollhook-podman-", dir=memory))
    for name in ("networks", "tmp", "run", "storage/overlay"):
        (root / name).mkdir(parents=True)
    if storage_bytes is not None:
        size = f"size={storage_bytes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", root / "storage/overlay"], check=True)
    (root / "containers.conf").write_text(_CONTAINERS.format(root=root))
    (root / "storage.conf").write_text(_STORAGE.format(root=root, images=base_images()))
    engine = Engine(f"unix://{root}/sock", BASE_IMAGE, root)
    try:
        engine.start()
        yield engine
    finally:
        engine.podman("rm", "--all", "--force", "--volumes", "--time=0", check=False)
        engine.stop()
        _end_monitors(root)
        for _ in range(2):  # Podman may have mounted it upon itself
            mount = root / "storage/overlay"
            subprocess.run(["umount", "--recursive", "--lazy", mount], check=False, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)
