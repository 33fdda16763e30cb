"""The launcher of this machine: the caller drives the run itself, or a job in a session of its own does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from rollhook.errors import LauncherError
from rollhook.job_script import FILES, SCRIPT, left_status, read_log, record_killed, script_files
from rollhook.launcher import ENDED, Handle, Job, JobStatus, Launcher, Plan
from rollhook_local.state import start_time

#: what the caller may be a job itself with; a Ray that runs here is not the job's either
_NOT_ITS_OWN = ("ROLLHOOK_ATTEMPT", "ROLLHOOK_JOB_DIR", "ROLLHOOK_JOB_FILES", "RAY_ADDRESS")
_OUTPUT = "logs/launcher.log"
#: what processes are given to end after KILL
_KILL_SECONDS = 10.0


class LocalLauncher(Launcher):
    """Runs the driver in process, or (detached) as a job that outlives the terminal.

    A job is a session of its own, led by the job's script; whether it lives is read from /proc.
    """

    in_process: ClassVar[bool] = True

    def plan(self, job: Job) -> Plan:
        """Return the files and the command; the driver starts a Ray of its own."""
        command = ["bash", str(Path(job.directory) / FILES / SCRIPT)]
        notes = ["without --detach the run is driven by `rollhook run` itself, and no script runs"]
        return Plan("local", job, script_files(job), [command], notes=notes)

    async def preflight(self, plan: Plan) -> Sequence[str]:
        """Return what this machine lacks."""
        return await asyncio.to_thread(_lacking, plan.job)

    async def submit(self, plan: Plan) -> Handle:
        """Start the script in a session of its own, and return its process."""
        return await asyncio.to_thread(self._start, plan)

    def _start(self, plan: Plan) -> Handle:
        job, directory = plan.job, Path(plan.job.directory)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
        # the `rollhook` that submits is the one that drives
        environ["PATH"] = os.pathsep.join(
            filter(None, [str(Path(sys.executable).parent), environ.get("PATH")])
        )
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        argv = plan.commands[0]
        try:
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, str(directory / _OUTPUT), write, 0o644),
                ],
                setsid=True,
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE],
            )
        except OSError as error:
            raise LauncherError(f"job {job.id} could not be started: {error}") from error
        data = {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "start": start_time(pid)}
        return Handle("local", job.id, job.directory, data)

    async def status(self, handle: Handle) -> JobStatus:
        """Read the exit code, else whether the process is there."""
        return await asyncio.to_thread(self._status, handle)

    def _status(self, handle: Handle) -> JobStatus:
        left = left_status(handle)
        if left is not None:
            return left
        host = str(handle.data.get("host", ""))
        if host != socket.gethostname():
            raise LauncherError(f"job {handle.job_id} was started on {host}; ask there")
        if pids := _processes(handle):
            return JobStatus("running", f"{len(pids)} processes of session {handle.data['pid']} are there")
        left = left_status(handle)  # it may have ended between the two looks
        if left is not None:
            return left
        why = "the machine has been started anew since" if handle.data.get("boot") != _boot() else "killed"
        return JobStatus("lost", f"its process is gone and left no exit code ({why})")

    def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        """Read the job's log."""

        async def over() -> bool:
            return (await self.status(handle)).state in {*ENDED, "lost"}

        return read_log(handle.directory, over, follow=follow)

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        """Interrupt the script, or kill its whole session."""
        return await asyncio.to_thread(self._stop, handle, force)

    def _stop(self, handle: Handle, force: bool) -> str:
        status = self._status(handle)
        if status.state in {*ENDED, "lost"}:
            return f"Job {handle.job_id} has ended already: {status.state}."
        if not force:
            pids, leader = _processes(handle), handle.data["pid"]
            for pid in [leader] if leader in pids else pids:  # the script tells the others
                _signal(handle, pid, signal.SIGINT)
            return f"Job {handle.job_id} was asked to stop."
        deadline = time.monotonic() + _KILL_SECONDS
        while pids := _processes(handle):
            for pid in pids:
                _signal(handle, pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LauncherError(
                    f"process {pids[0]} of job {handle.job_id} does not end, not even by KILL"
                )
            time.sleep(0.01)
        record_killed(handle.directory)
        return f"Job {handle.job_id} was killed."

    async def debug(self, handle: Handle) -> dict[str, str]:
        """Return the job's processes, and what was said before its log began."""
        return await asyncio.to_thread(self._debug, handle)

    def _debug(self, handle: Handle) -> dict[str, str]:
        lines = [f"{pid} {_command(pid)}" for pid in _processes(handle)]
        try:
            said = (Path(handle.directory) / _OUTPUT).read_text("utf-8", errors="replace")
        except OSError as error:
            said = f"{error}\n"
        return {"processes.txt": "".join(f"{line}\n" for line in lines), "launcher.log": said}


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _signal(handle: Handle, pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise LauncherError(
            f"process {pid} of job {handle.job_id} is another user's; stop the job as that one"
        ) from None


def _processes(handle: Handle) -> list[int]:
    """Return the live processes of a job's session; it may have lost its leader.

    Then a daemon may have got the leader's number as that of its own session, and have lost its leader too:
    the session is the job's if one of it has the job's directory in its environment.
    """
    leader, started = handle.data.get("pid"), handle.data.get("start")
    if type(leader) is not int or leader <= 1:
        raise LauncherError(f"the record of job {handle.job_id} is damaged: {leader!r} is no process of it")
    now = start_time(leader)
    if handle.data.get("boot") != _boot() or now not in (0, started):
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == leader:
            found.append(int(name))
    return found if now or any(_is_marked(pid, handle.directory) for pid in found) else []


def _is_marked(pid: int, directory: str) -> bool:
    try:
        return f"ROLLHOOK_JOB_DIR={directory}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
            b"\0"
        )
    except OSError:
        return False


def _lacking(job: Job) -> list[str]:
    lacking = []
    if not Path("/proc/self/stat").exists():
        lacking.append("there is no /proc, by which a job is known to live; run without --detach")
    if shutil.which("bash") is None:
        lacking.append("there is no bash; install it, or run without --detach")
    if job.resources.nodes > 1:
        lacking.append(f"the job wants {job.resources.nodes} nodes, and this is one; use another launcher")
    return lacking


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
