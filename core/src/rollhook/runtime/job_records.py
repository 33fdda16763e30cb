"""The submitter's record of a job, `attempts/<n>/submit.json` in the run's directory.

Where the submitter does not see the directory that the nodes write to, the run has a second one, below the
index of runs: this record and what the submitter collected are there.
"""

from __future__ import annotations

import errno
import getpass
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Self

import orjson

from rollhook.durable import cannot_write, check_schema, fsync_directory, to_json, write_atomic
from rollhook.errors import RunError
from rollhook.launcher import Handle, Plan
from rollhook.recipe.digests import digest_of
from rollhook.rundir import RunDir

SCHEMA_VERSION = 1
NAME = "submit.json"
#: of a record and its handle: what their fields hold
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "job_id", "launcher", "plan_digest", "user", "host", "directory"), (str,)),
    **dict.fromkeys(("keys", "data"), (dict,)),
    "attempt": (int,),
    "submitted_at": (int, float),
    "error": (str, NoneType),
    "stopped_code": (int, NoneType),
}


@dataclass(frozen=True)
class Record:
    """Who submitted what, when and by which launcher; without `handle` and `error` it was interrupted."""

    run_id: str
    attempt: int
    job_id: str
    launcher: str
    keys: Mapping[str, Any]
    plan_digest: str
    user: str = ""
    host: str = ""
    submitted_at: float = 0.0
    handle: Handle | None = None
    error: str | None = None
    schema: int = field(default=SCHEMA_VERSION)

    @classmethod
    def of(cls, plan: Plan, keys: Mapping[str, Any], launcher: str = "") -> Self:
        """Return the record of a plan that is about to be submitted from here, by the launcher of a name."""
        job = plan.job
        digest = digest_of(plan.to_data())
        who = {"user": _user(), "host": socket.gethostname(), "submitted_at": time.time()}
        return cls(job.run_id, job.attempt, job.id, launcher or plan.launcher, dict(keys), digest, **who)  # type: ignore[arg-type]

    def write(self, run: RunDir) -> Self:
        """Write it, durably, and return it. Raises RunError when the disk is full or not writable."""
        directory = attempt_directory(run, self.attempt)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{directory} cannot be made: {error.strerror}") from error
        write_atomic(directory / NAME, to_json(asdict(self), indent=True) + b"\n")
        return self

    def begin(self, run: RunDir) -> Self:
        """Write it as `write` does. Raises RunError where the attempt has a record: another submits it."""
        directory = attempt_directory(run, self.attempt)
        mine = directory / f".{NAME}.{secrets.token_hex(4)}.tmp"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomic(mine, to_json(asdict(self), indent=True) + b"\n")
            _place(mine, directory / NAME)
            fsync_directory(directory)
        except FileExistsError:
            raise RunError(
                f"attempt {self.attempt} of run {run.run_id} was submitted already; "
                f"`rollhook jobs status {run.run_id}` says how it stands"
            ) from None
        except OSError as error:
            raise cannot_write(directory / NAME, error) from error
        finally:
            mine.unlink(missing_ok=True)
        return self

    def submitted(self, run: RunDir, handle: Handle) -> Self:
        """Write down that the launcher has taken it."""
        return replace(self, handle=handle).write(run)

    def failed(self, run: RunDir, error: str) -> Self:
        """Write down why it could not be submitted."""
        return replace(self, error=error).write(run)


def _place(path: Path, target: Path) -> None:
    """Give a file its name. Raises FileExistsError where there is one."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))  # a file system without links
        os.replace(path, target)


def attempt_directory(run: RunDir, attempt: int) -> Path:
    """Return where an attempt's files are."""
    return run.path / "attempts" / str(attempt)


def read_record(path: Path) -> Record:
    """Return the record in a file. Raises RunError when it is damaged, or of a later schema."""
    try:
        data = orjson.loads(path.read_bytes())
        check_schema(data["schema"], SCHEMA_VERSION, path)
        handle = data.pop("handle")
        record = Record(**data, handle=None if handle is None else Handle(**handle))
        _check_types(record)
        return record
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} cannot be read as the record of a job: {error}") from error


def _check_types(record: Record) -> None:
    for holder in (record, record.handle):
        for name, value in vars(holder).items() if holder is not None else ():
            wanted = _TYPES.get(name)
            if wanted is not None and not isinstance(value, wanted):
                raise TypeError(f"{name} is {value!r}")


def records(run: RunDir) -> list[Record]:
    """Return the records of a run's jobs, oldest first."""
    found = [path for path in (run.path / "attempts").glob(f"*/{NAME}") if path.parent.name.isdecimal()]
    return [read_record(path) for path in sorted(found, key=lambda path: int(path.parent.name))]


def find_record(run: RunDir, attempt: int | None = None) -> Record:
    """Return the record of a run's newest job, or of that attempt's. Raises RunError when there is none."""
    kept = records(run)
    found = [each for each in kept if attempt in (None, each.attempt)]
    if found:
        return found[-1]
    if kept:
        known = ", ".join(str(each.attempt) for each in kept)
        raise RunError(f"run {run.run_id} has no job as attempt {attempt}; its jobs are attempts {known}")
    which = "no job" if attempt is None else f"no job as attempt {attempt}"
    newest = run.newest_attempt()
    driven = f"was driven by {newest.describe_owner()}" if newest is not None else "was never begun"
    raise RunError(
        f"run {run.run_id} has {which}; it {driven}: Ctrl-C there stops it, and "
        f"`rollhook doctor {run.run_id}` says how it stands"
    )


def next_attempt(run: RunDir) -> int:
    """Return the number of the next attempt: after all that were claimed or given to a launcher."""
    claimed = [each.number for each in run.attempts()]
    submitted = [each.attempt for each in records(run)]
    return max([*claimed, *submitted], default=0) + 1


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""
