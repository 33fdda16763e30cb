"""The backend: how a cell is made, listed and ended."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from acme_cells import CellsConfig, records
from acme_cells.cell import Cell
from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec

#: process 1 waits until its maker has written down where it is, and ends if that maker is gone; with this
#: signal ignored the kernel reaps what it inherits
_FIRST = "echo ready; read -r go && trap '' CHLD && exec sleep infinity"
_PRIVATE = {"/tmp": "1777", "/root": "0700", "/run": "0755", "/tests": "0755", "/logs": "0755"}


class Cells(SandboxBackend):
    """Cells on this machine."""

    config: CellsConfig
    capabilities = frozenset({"isolation", "network_off", "separate_streams", "disk_limit"})

    async def start(self) -> None:
        """Make a cell for a try."""
        missing = [name for name in ("bwrap", "nsenter", "setpriv") if shutil.which(name) is None]
        if missing:
            raise SandboxError(f"cells need {' and '.join(missing)}, which is not installed", kind="user")
        await self.delete((await self.create(SandboxSpec())).id)

    async def create(self, spec: SandboxSpec) -> Cell:
        """Make a cell on a thread; a call that is cancelled waits for it and ends it."""
        self.refuse(spec)
        making = asyncio.ensure_future(asyncio.to_thread(self._make, spec))
        try:
            return Cell(await asyncio.shield(making), spec)
        except asyncio.CancelledError:
            making.add_done_callback(_undo)
            raise

    def _make(self, spec: SandboxSpec) -> records.Record:
        """Start bubblewrap, apart from this process, and write down the cell's first process."""
        info, theirs = os.pipe()
        try:
            maker = subprocess.Popen(
                self._argv(spec, theirs),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        with maker, os.fdopen(info, "rb", buffering=0) as told:
            assert maker.stdin and maker.stdout and maker.stderr  # noqa: PT018
            if maker.stdout.readline() != b"ready\n":
                raise SandboxError(f"bubblewrap made no cell: {maker.stderr.read().decode().strip()}")
            pid = json.loads(told.read(4096))["child-pid"]
            name = f"cell-{secrets.token_hex(8)}"
            record = records.Record(name, pid, records.started(pid), dict(spec.labels), time.time())
            records.write(record)
            maker.stdin.write(b"go\n")
            return record

    def _argv(self, spec: SandboxSpec, info: int) -> list[str]:
        argv = ["setsid", "--fork", "timeout", "--signal=KILL", str(spec.lifetime_seconds or 0), "bwrap"]
        argv += ["--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-net"]
        argv += ["--unshare-ipc", "--unshare-uts"]
        argv += ["--as-pid-1", "--die-with-parent", "--info-fd", str(info)]
        argv += ["--size", str(spec.disk_bytes or self.config.disk_bytes), "--tmpfs", "/"]
        for path in ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64"):
            argv += ["--ro-bind-try", path, path]
        argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        argv += ["--ro-bind-try", "/proc/sysrq-trigger", "/proc/sysrq-trigger"]
        for path, mode in (_PRIVATE | {spec.workdir: "0755"}).items():
            argv += ["--perms", mode, "--dir", path]
        return [*argv, "/bin/sh", "-c", _FIRST]

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the cells that carry all these labels."""
        found = await asyncio.to_thread(lambda: list(records.living()))
        wanted = labels.items()
        return [SandboxInfo(r.id, r.labels, r.created_at) for r in found if wanted <= r.labels.items()]

    async def delete(self, sandbox_id: str) -> None:
        """End a cell; the kernel ends all that runs in it."""
        if not await asyncio.to_thread(records.end, sandbox_id):
            raise SandboxError(f"cell {sandbox_id} does not end", kind="retryable")


def _undo(making: asyncio.Future[records.Record]) -> None:
    """End what a cancelled call has made after all."""
    if not making.cancelled() and making.exception() is None:
        records.end(making.result().id)
