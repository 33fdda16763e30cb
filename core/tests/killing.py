"""The processes of a run under test, found by where their output goes and what their command line says."""

import os
import time
from pathlib import Path


def processes_of(root, victim):
    """Return the processes whose output goes to the log of an engine, the trainer or a rollout worker."""
    found = []
    for pid, log, command in _with_logs(root):
        is_of = {
            "engine": "rollhook_torch.server" in command,
            "trainer": log.name == "trainer.log",
            "worker": log.name.startswith("rollout-worker-") and command.startswith("ray::"),
        }
        if is_of[victim]:
            found.append(pid)
    return found


def wait_until_gone(root, seconds=20):
    """Return the processes that still speak of a run's directory, or write there, after a while."""
    deadline = time.monotonic() + seconds
    while (left := _left(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _left(root):
    found = {pid: command for pid, command in _commands() if str(root) in command}
    found |= {pid: command for pid, _, command in _with_logs(root)}
    found.pop(os.getpid(), None)
    return list(found.values())


def _with_logs(root):
    """Yield (pid, file, command line) of the processes whose output goes to a file under `root`."""
    for pid, command in _commands():
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
        except OSError:
            continue
        if log.is_relative_to(root):
            yield pid, log, command


def _commands():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
