"""Machines: a directory with a process tree, network and users of its own, made by bubblewrap.

The system directories are the host's, read-only; everything else is the machine's own. Commands go in by
nsenter. Memory and processors are not limited. Where bubblewrap cannot run, `available()` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

#: process 1 tells that it is there; with this signal ignored the kernel reaps what it inherits
_FIRST = "echo ready; trap '' CHLD; exec sleep infinity"
_GO = 'cd -- "$1" || exit 126; shift; exec "$@"'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROOT = os.geteuid() == 0
#: what root inside keeps, as under Docker
_CAPABILITIES = (
    "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+sys_chroot"
)


@cache
def available() -> str:
    """Return why machines cannot be made here; empty when they can."""
    for program in ("bwrap", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install bubblewrap util-linux)"
    argv = ["bwrap", *_namespaces(), "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"bwrap does not run here: {tried.stderr.strip()}"


def _namespaces() -> list[str]:
    user = [] if _ROOT else ["--unshare-user", "--uid", "0", "--gid", "0"]
    return [*user, "--unshare-pid", "--unshare-ipc", "--unshare-uts"]


@dataclass(frozen=True)
class Finished:
    """How a command ended; 128 + n after signal n."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """stdout as text."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(eq=False)
class Machine:
    """One machine. `env`, `workdir` and `user` are what commands get that name none."""

    id: str
    root: Path
    network: bool = True
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    pid: int = 0
    _maker: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        """Whether its process 1 is there."""
        return self._maker is not None and self._maker.returncode is None

    async def start(self) -> None:
        """Start it over its directory, as it is."""
        info, theirs = os.pipe()
        try:
            self._maker = await asyncio.create_subprocess_exec(
                *self._argv(theirs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={"PATH": _PATH},
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        assert self._maker.stdout is not None
        said = await self._maker.stdout.readline()
        with os.fdopen(info, "rb", buffering=0) as told:
            if said != b"ready\n":
                raise RuntimeError(f"bubblewrap made no machine {self.id}")
            self.pid = json.loads(told.read(4096))["child-pid"]

    def _argv(self, info: int) -> list[str]:
        argv = ["bwrap", *_namespaces(), *([] if self.network else ["--unshare-net"])]
        argv += ["--as-pid-1", "--die-with-parent", "--hostname", "machine", "--info-fd", str(info)]
        argv += ["--bind", str(self.root), "/"]
        for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64"):
            if Path("/", name).is_dir() and not Path("/", name).is_symlink():
                argv += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in ("alternatives", "ssl"):  # hundreds of links, which would make copying slow
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        return [*argv, "--chdir", "/", "/bin/sh", "-c", _FIRST]

    def account(self, user: str) -> tuple[int, int, str] | None:
        """Return uid, gid and home of a user as the machine's /etc/passwd has it; None for an unknown one."""
        try:
            fd = os.open(self.root / "etc/passwd", os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return (0, 0, "/root") if user in ("root", "0") else None
        with os.fdopen(fd, errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) > 5 and user in (fields[0], fields[2]):
                    return int(fields[2]), int(fields[3]), fields[5]
        return None

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        merged: bool = False,
    ) -> asyncio.subprocess.Process:
        """Start a command inside; exit code 126 when its directory is not there.

        LookupError for an unknown user, ProcessLookupError when the machine is down.
        """
        name = user or self.user
        account = self.account(name)
        if account is None:
            raise LookupError(f"unable to find user {name}")
        if not self.alive:
            raise ProcessLookupError(f"machine {self.id} is down")
        uid, gid, home = account
        into = ["/usr/bin/nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--uts"]
        ids = ["--reuid", str(uid), "--regid", str(gid), "--init-groups"] if _ROOT and uid else []
        if not _ROOT:
            into += ["--user", "--preserve-credentials"]
        drop = ["/usr/bin/setpriv", "--bounding-set", f"-all,{_CAPABILITIES}", "--inh-caps", "-all", *ids]
        base = {"PATH": _PATH, "HOME": home, "USER": name, "LOGNAME": name, "LANG": "C.UTF-8"}
        return await asyncio.create_subprocess_exec(
            *into,
            *drop,
            "/bin/sh",
            "-c",
            _GO,
            "sh",
            cwd or self.workdir,
            *argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            env={**base, **self.env, **(env or {})},
            cwd="/",
            start_new_session=True,
            limit=1 << 20,
        )

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        merged: bool = False,
    ) -> Finished:
        """Run a command to its end."""
        process = await self.spawn(argv, env=env, cwd=cwd, user=user, stdin=stdin is not None, merged=merged)
        out, err = await process.communicate(stdin)
        code = process.returncode or 0
        return Finished(code if code >= 0 else 128 - code, out or b"", err or b"")

    @staticmethod
    def inside(process: asyncio.subprocess.Process) -> tuple[int, int] | None:
        """Return the pid of a spawned command, outside and inside; None once it has ended."""
        try:
            outer = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            status = Path(f"/proc/{outer[0]}/status").read_text()
        except (OSError, IndexError):
            return None
        inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
        return int(outer[0]), int(inner)

    @classmethod
    def kill(cls, process: asyncio.subprocess.Process, number: int = signal.SIGKILL) -> None:
        """Send a signal to the command itself, not to what it has started."""
        if (pids := cls.inside(process)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], number)

    @staticmethod
    async def ended(process: asyncio.subprocess.Process) -> int:
        """Return the exit code once the command itself has ended, even if a child holds its output open."""
        while process.returncode is None:
            await asyncio.sleep(0.005)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def pause(self, paused: bool = True) -> None:
        """Stop or continue every process inside."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns/pid") == namespace:
                        os.kill(int(entry.name), signal.SIGSTOP if paused else signal.SIGCONT)

    async def stop(self) -> None:
        """End it and all that runs in it; its files stay."""
        if self._maker is None:
            return
        if self._maker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        await self._maker.wait()


class Machines:
    """The machines of a run, each in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._machines: dict[str, Machine] = {}

    def ids(self) -> list[str]:
        """Return the ids of those that are up."""
        return [machine.id for machine in self._machines.values() if machine.alive]

    def get(self, machine_id: str) -> Machine:
        """Return a machine; KeyError when it was deleted."""
        return self._machines[machine_id]

    async def create(
        self,
        template: Path,
        *,
        machine_id: str | None = None,
        network: bool = True,
        env: Mapping[str, str] | None = None,
        workdir: str = "/",
        user: str = "root",
    ) -> Machine:
        """Copy a template and start a machine over it."""
        name = machine_id or secrets.token_hex(8)
        root = self._directory / name
        root.parent.mkdir(parents=True, exist_ok=True)
        copy = await asyncio.create_subprocess_exec("cp", "-a", "--reflink=auto", str(template), str(root))
        if await copy.wait() != 0:
            raise RuntimeError(f"could not copy {template}")
        machine = Machine(name, root, network, dict(env or {}), workdir, user)
        self._machines[name] = machine
        await machine.start()
        return machine

    async def delete(self, machine_id: str) -> None:
        """End a machine and remove its directory; one that is not there is a success."""
        machine = self._machines.pop(machine_id, None)
        if machine is not None:
            await machine.stop()
            await asyncio.to_thread(shutil.rmtree, machine.root, ignore_errors=True)

    async def aclose(self) -> None:
        """Delete all."""
        await asyncio.gather(*(self.delete(name) for name in list(self._machines)))
