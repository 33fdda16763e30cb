"""Programs that run on a cluster: each is owned by an actor, and dies with it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.errors import RollhookError

if TYPE_CHECKING:
    from rollhook.cluster import Cluster, Remote

STOP_GRACE_SECONDS = 5.0
#: where a server listens when all that asks it is on its machine, and when it is not: at its node's address
LOOPBACK, NODE = "127.0.0.1", "{host}"
_LIBC = ctypes.CDLL(None)  # here, because nothing may be imported between fork and exec


class ProcessDiedError(RollhookError):
    """The process behind a Remote is gone."""

    boundary = "cluster"


class ClusterPlacement:
    """`rollhook.engine.Placement` on a cluster: every process is owned by an actor and dies with it."""

    def __init__(self, cluster: Cluster, address: str = LOOPBACK) -> None:
        self._cluster = cluster
        self.address = address
        self._ports: set[int] = set()

    async def start_process(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        gpus: float = 0,
        node: str | None = None,
    ) -> RemoteProcess:
        """Start a program, its output appended to `log`."""
        process = RemoteProcess(self._cluster, name, list(argv), dict(env), log, gpus, node)
        await process.restart()
        return process

    def free_port(self) -> int:
        """Return a port that is free on this machine, if not on others, and was not returned before."""
        while True:
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                port: int = probe.getsockname()[1]
            if port not in self._ports:
                self._ports.add(port)
                return port


class RemoteProcess:
    """`rollhook.engine.base.Process` behind an actor."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        gpus: float,
        node: str | None,
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._place = (name, argv, env, log, gpus)
        self._remote: Remote | None = None

    async def restart(self) -> None:
        """Kill it if it lives and start it anew on its node, also where its actor has died."""
        await self.stop()
        name, argv, env, log, gpus = self._place
        self._remote = await self._cluster.place(
            "rollhook.processes:ChildProcess", argv, env, str(log), name=name, gpus=gpus, node=self._node
        )
        if self._cluster.attached:
            self._node = self._remote.host

    async def stop(self) -> None:
        """Terminate, then kill after five seconds; safe to call twice."""
        remote, self._remote = self._remote, None
        if remote is None:
            return
        await remote.release()
        await remote.stop()

    async def alive(self) -> bool:
        """Return whether the program runs."""
        if self._remote is None:
            return False
        try:
            return bool(await self._remote.call("alive"))
        except ProcessDiedError:
            return False

    async def pid(self) -> int:
        """Return its process id."""
        return int(await self._ask("pid"))

    async def host(self) -> str:
        """Return the address of its node."""
        return str(await self._ask("host"))

    async def _ask(self, method: str) -> Any:
        if self._remote is None:
            raise RollhookError(f"{self._place[0]} was stopped")
        return await self._remote.call(method)


class ChildProcess:
    """A program in a session of its own that dies with this process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        from rollhook.cluster import node_address

        Path(log).parent.mkdir(parents=True, exist_ok=True)
        self._host = node_address()
        with open(log, "ab") as output:
            self._child = subprocess.Popen(
                [argument.replace("{host}", self._host) for argument in argv],
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the kernel offers no other way
            )

    def pid(self) -> int:
        """Return its process id."""
        return self._child.pid

    def host(self) -> str:
        """Return the address of this node."""
        return self._host

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._child.poll() is None

    def close(self) -> None:
        """Terminate its session, then kill what is left."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._child.pid, sig)
                self._child.wait(STOP_GRACE_SECONDS)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


def _die_with_parent() -> None:
    """In the child, before exec: be killed when the parent dies; undo the signal mask that Ray set."""
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
