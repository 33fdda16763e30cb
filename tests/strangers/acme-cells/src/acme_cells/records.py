"""Which cells there are: a small file for each, so that any process of this user finds them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_EXITING = 4  # PF_EXITING


@dataclass(frozen=True)
class Record:
    """A cell: its first process, told from a later one of that number by when it started."""

    id: str
    pid: int
    started: str
    labels: dict[str, str]
    created_at: float

    def lives(self) -> bool:
        """Return whether the cell is there."""
        return started(self.pid) == self.started


def directory() -> Path:
    """Return where the files are."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "acme-cells"


def started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" when it has ended or is about to."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" or int(fields[6]) & _EXITING else fields[19]


def write(record: Record) -> None:
    """Keep a record."""
    directory().mkdir(parents=True, exist_ok=True)
    new = directory() / f"{record.id}.new"
    new.write_text(json.dumps(asdict(record)))
    new.replace(directory() / f"{record.id}.json")


def living() -> Iterator[Record]:
    """Yield the cells that are there, and forget the others."""
    for path in sorted(directory().glob("*.json")):
        try:
            record = Record(**json.loads(path.read_text()))
        except FileNotFoundError:  # another process has just deleted it
            continue
        if record.lives():
            yield record
        else:
            path.unlink(missing_ok=True)


def end(cell_id: str) -> bool:
    """End a cell and wait until it is gone; return False when it does not go."""
    path = directory() / f"{cell_id}.json"
    try:
        record = Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return True
    deadline = time.monotonic() + 10
    while record.lives() and time.monotonic() < deadline:
        os.kill(record.pid, signal.SIGKILL)
        time.sleep(0.002)
    if not record.lives():
        path.unlink(missing_ok=True)
    return not path.exists()
