"""Which local sandboxes there are, for every process of this user: one small file each."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollhook.errors import SandboxError


@dataclass
class Record:
    """A sandbox on file. `pid` and `start` are those of its process 1 on the host, 0 while it is made.

    `keeper` and `keeper_start` are those of the process that makes it; `groups` its control groups;
    `directory` what a sandbox without isolation lives in.
    """

    id: str
    labels: dict[str, str]
    created_at: float
    keeper: int
    keeper_start: int
    pid: int = 0
    start: int = 0
    groups: list[str] = field(default_factory=list)
    directory: str = ""


def directory() -> Path:
    """Return the directory of records, made with mode 0700; SandboxError if another user may write it.

    In memory where there is a place for it: two files per sandbox on a disk cost more than the sandbox.
    """
    uid = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    if os.path.isdir(runtime) and os.stat(runtime).st_uid == uid:
        path = Path(runtime) / "rollhook-local"
    else:
        path = _shared_directory() / f"rollhook-local-{uid}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or info.st_mode & 0o022:
        raise SandboxError(
            f"{path} should be a directory that only this user can write; remove it", kind="user"
        )
    return path


def _shared_directory() -> Path:
    memory = Path("/dev/shm")  # noqa: S108 - what is made there is checked
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def write(root: Path, record: Record) -> None:
    """Write or replace a record."""
    path = root / f"{record.id}.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(vars(record)))
    temporary.rename(path)


def read(root: Path, sandbox_id: str) -> Record | None:
    """Return a record, or None."""
    try:
        return Record(**json.loads((root / f"{sandbox_id}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def matching(root: Path, labels: Mapping[str, str]) -> list[Record]:
    """Return the records that carry all these labels."""
    records = (read(root, path.stem) for path in sorted(root.glob("*.json")))
    wanted = labels.items()
    return [record for record in records if record is not None and wanted <= record.labels.items()]


def remove(root: Path, sandbox_id: str) -> None:
    """Drop a record."""
    (root / f"{sandbox_id}.json").unlink(missing_ok=True)


def start_time(pid: int) -> int:
    """Return when a living process started, in ticks since boot, or 0: pids are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = text[text.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def pid_of(pidfd: int) -> int:
    """Return the pid that a pidfd has here; -1 when it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line[4:])
    raise OSError(f"descriptor {pidfd} is not a pidfd")


def end(pid: int, started: int, seconds: float) -> bool:
    """Kill a process if it is still the one that started then; return whether it is gone. Blocks."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(pid) != started:
            return True
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        while start_time(pid) == started:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)
    return True


def end_marked(directory: str) -> None:
    """Kill the processes whose environment says that they live in `directory`; those that hide it stay."""
    mark = f"TMPDIR={directory}/tmp".encode()  # noqa: S108 - its own
    for _ in range(20):
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdecimal() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        found = [pid for pid in found if start_time(pid)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
