"""What the tests of clusters share: an sshd of their own on loopback addresses, and a launcher."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollhook.launcher import ClusterInfo, ClusterOptions
from rollhook.testing.environment import build_context
from rollhook.testing.ray_cluster import free_port
from rollhook_ray import RayLauncherConfig, clusters_node
from rollhook_ray.launcher import RayLauncher

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass(frozen=True)
class Sshd:
    """An sshd on the three addresses; `config` is for `ssh -F`, `other_key` is one that it refuses."""

    config: Path
    other_key: Path
    pid: int

    def keys(self) -> dict[str, Any]:
        return {"config": str(self.config)}


@contextlib.contextmanager
def sshd(directory: Path, state: Path) -> Iterator[Sshd]:
    """Run sshd on a high port, with keys of its own; sessions keep their state below `state`."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd: apt-get install openssh-server openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root wants it, and no boot has made it
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    (directory / "authorized").write_text((directory / "user.pub").read_text())
    port = free_port()
    host_key = " ".join((directory / "host.pub").read_text().split()[:2])
    (directory / "known").write_text("".join(f"[{each}]:{port} {host_key}\n" for each in ADDRESSES))
    (directory / "sshd_config").write_text(
        f"Port {port}\n" + "".join(f"ListenAddress {each}\n" for each in ADDRESSES)
        + f"HostKey {directory}/host\nAuthorizedKeysFile {directory}/authorized\nPidFile none\n"
        + "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        + f"MaxStartups 100\nSetEnv XDG_STATE_HOME={state}\n"
    )  # fmt: skip
    (directory / "config").write_text(
        f"Host *\nPort {port}\nUser {getpass.getuser()}\nIdentityFile {directory}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {directory}/known\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n"
    )
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([program, "-D", "-e", "-f", directory / "sshd_config"], stderr=output)
    try:
        until(lambda: "Server listening on 127.0.0.4" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield Sshd(directory / "config", directory / "other", process.pid)
    finally:
        process.terminate()
        process.wait()


@dataclass
class Site:
    """Makes launchers of one cluster, and remembers what they have said."""

    scratch: Path
    keys: dict[str, Any]
    said: list[str] = field(default_factory=list)

    def launcher(self, **keys: Any) -> RayLauncher:
        return RayLauncher(RayLauncherConfig(cluster=self.keys | keys), build_context(self.scratch))

    async def up(
        self,
        *,
        wait: bool = True,
        timeout: float = 60,
        recreate: bool = False,
        install: bool = False,
        **keys: Any,
    ) -> ClusterInfo:
        self.said.clear()
        options = ClusterOptions(wait=wait, timeout=timeout, recreate=recreate, install=install)
        (info,) = await self.launcher(**keys).cluster_up([], options, self.said.append)
        return info

    async def down(self, **keys: Any) -> list[str]:
        return list(await self.launcher(**keys).cluster_down([], ClusterOptions(), self.said.append))

    async def status(self, **keys: Any) -> ClusterInfo:
        (info,) = await self.launcher(**keys).cluster_status()
        return info


def free_ports() -> dict[str, int]:
    """Return ports of a cluster that nothing on this machine listens on."""
    taken = listening()
    starts = range(12000 + os.getpid() % 70 * 100, 27000, 200)
    start = next(n for n in starts if not taken & set(range(n, n + 4200)))
    return {"gcs": start, "dashboard": start + 1, "client": start + 2, "node": start + 100}


def listening() -> set[int]:
    from rollhook_ray import clusters_host

    return set(clusters_host._listening())


def double_python(directory: Path, **environment: str) -> str:
    """Return a Python that runs the double where Ray would be started, with DOUBLE_* variables."""
    path = directory / f"python-{len(list(directory.glob('python-*')))}"
    double = Path(__file__).with_name("ray_double.py")
    exports = "".join(f"export DOUBLE_{name}={value}\n" for name, value in environment.items())
    path.write_text(
        f'#!/bin/sh\n{exports}if [ "$1" = -m ] && [ "$2" = ray.scripts.scripts ]; then\n'
        f'  exec "{sys.executable}" "{double}" "$@"\nfi\nexec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def alive_with(text: str) -> list[int]:
    """Return the processes whose command line has a text, this one apart."""
    table = clusters_node.processes()
    return [pid for pid in table if text in clusters_node.command(pid) and pid != os.getpid()]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)
