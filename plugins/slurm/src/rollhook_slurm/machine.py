"""A node's machine: its addresses, ports and GPUs, and programs that end with whoever started them.

Delivered to the nodes beside supervise.py, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

POLL = 0.25
#: of a node's block of ports, those before the workers'; the first is its claim
SERVICES = 20


class NodeError(Exception):
    """The node's part cannot be done; the text is one sentence."""


class Ports:
    """A block of ports that no other node of this host has, held while this process lives.

    Listening on its first port is the claim: that is exclusive where Ray's ports are, in a network namespace.
    """

    def __init__(self, first: int, last: int, width: int) -> None:
        self.first, self.width = first, width
        self.slots = (last - first + 1) // width
        self.block = 0
        self._claim: socket.socket | None = None

    def claim(self, begin: int) -> int:
        """Take a block whose services' ports are free, beginning to look at block number `begin`.

        Returns its first port. Raises NodeError when there is none.
        """
        self.release()
        for slot in range(self.slots):
            block = self.first + (begin + slot) % self.slots * self.width
            claim = socket.socket()
            try:
                claim.bind(("", block))
                claim.listen(1)
                for offset in range(1, SERVICES):
                    with contextlib.closing(socket.socket()) as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind(("", block + offset))
            except OSError:
                claim.close()
                continue
            self._claim, self.block = claim, block
            return block
        raise NodeError(
            f"all {self.slots} blocks of {self.width} ports from {self.first} are in use; "
            f"change launcher.first_port, last_port or ports_per_node"
        )

    def release(self) -> None:
        """Give the block back."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def start(
    argv: list[str], environ: dict[str, str], stdout: int | None = None, stdin: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, which ends when this process does. Raises NodeError."""
    try:
        return subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, env=environ, start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
        )  # fmt: skip
    except FileNotFoundError:
        raise NodeError(
            f"there is no `{argv[0]}` on PATH; activate its environment in launcher.setup"
        ) from None


def end(process: subprocess.Popen[bytes], seconds: float = 20.0, *, gently: bool = False) -> None:
    """End what `start` started: by the end of its input or TERM, and KILL to its group after a while."""
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        if not gently:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_gpus(wanted: int) -> None:
    """Raise NodeError where `nvidia-smi` shows fewer GPUs than the job was given."""
    if not wanted or shutil.which("nvidia-smi") is None:
        return
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    seen = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    if seen < wanted:
        raise NodeError(f"the node shows {seen} of {wanted} GPUs (nvidia-smi -L)")


def lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines of a program's output, and an empty one each quarter of a second without."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([fd], [], [], POLL)[0]:
            yield ""
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()


def reachable(address: str, port: int, seconds: float = 3.0) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return True
    except OSError:
        return False


def listens(path: Path) -> bool:
    """Whether a program listens at a socket of this machine."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def local_addresses(table: str = "/proc/net/fib_trie") -> list[str]:
    """Return the IPv4 addresses of this machine, then those that `hostname -I` adds."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        last = ""
        for line in Path(table).read_text().splitlines():
            if match := re.search(r"\|-- (\d+\.\d+\.\d+\.\d+)$", line):
                last = match[1]
            elif "/32 host LOCAL" in line and last not in found:
                found.append(last)
    with contextlib.suppress(OSError):
        said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout
        found += [each for each in said.split() if each not in found]
    return found


def outward_address() -> str:
    """Return the address that packets to other networks leave with; nothing is sent."""
    try:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def in_network(address: str, network: str) -> bool:
    """Whether an address has this prefix (`10.1.`) or is in this CIDR (`10.1.0.0/16`)."""
    if "/" not in network:
        return address.startswith(network)
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def die_with_parent() -> None:
    """Make the calling process get TERM when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
