"""A run on disk: its directory, its attempts, who owns the newest one, and the index of runs.

    <storage.root>/<run_id>/
      recipe.yaml  recipe.lock.yaml  metrics.jsonl  checkpoints/  episodes/
      attempts/<n>/  owner.json  heartbeat  status.json  journal.jsonl  logs/  [submit.json  job/]

Works on NFS: exclusive creates, atomic renames, no locks.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import orjson

from rollhook.durable import cannot_write, fsync_directory, to_json, write_all, write_atomic
from rollhook.errors import RunError
from rollhook.failpoints import fail
from rollhook.heartbeat import INTERVAL, STALE, Heartbeat, moving
from rollhook.journal import Journal

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
#: in an attempt's directory: whoever submitted it as a job has written it (`rollhook.runtime.job_records`)
SUBMITTED = "submit.json"
RUN_ID = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
Status = Literal["succeeded", "failed", "stopped"]
#: what makes a run; only the same goes on with it
Verb = Literal["run", "eval", "replay", "rescore", "tasks oracle", "tasks doctor", "tasks diff", "serve"]


def new_run_id(name: str) -> str:
    """Return a fresh run id: the recipe's name, cut and cleaned, with a short unique suffix."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].rstrip("-")
    if not stem[:1].isalpha():
        stem = f"run-{stem}"[:32].rstrip("-")
    return f"{stem}-{secrets.token_hex(3)}"


def check_run_id(run_id: str) -> str:
    """Return a run id that fits the rule; RunError otherwise."""
    if RUN_ID.fullmatch(run_id):
        return run_id
    raise RunError(
        f"{run_id!r} is no run id: 1 to 40 of a-z, 0-9 and '-', starting with a letter, not ending with '-'"
    )


def check_free(root: Path | str, run_id: str) -> Path:
    """Return where a new run of this id would be; RunError when the id is malformed or taken."""
    path = Path(root).expanduser().resolve() / check_run_id(run_id)
    known = _indexed(run_id)
    if known is not None and known != path and (known / "attempts").is_dir():
        raise RunError(f"run {run_id} exists at {known}; choose another id")
    if path.exists():
        raise RunError(f"run {run_id} exists at {path}; choose another id")
    return path


@dataclass(frozen=True)
class AttemptInfo:
    """What is on disk about an attempt, for readers; `status` is None while it runs or after a crash."""

    number: int
    path: Path
    owner: Mapping[str, Any]
    status: str | None

    @property
    def journal_path(self) -> Path:
        """The attempt's journal."""
        return self.path / "journal.jsonl"

    @property
    def heartbeat_path(self) -> Path:
        """The attempt's heartbeat."""
        return self.path / "heartbeat"

    @property
    def verb(self) -> str:
        """The verb that made it."""
        return str(self.owner.get("verb", "run"))

    def describe_owner(self) -> str:
        """Return who drives or drove it, in words."""
        return f"process {self.owner.get('pid', '?')} on {self.owner.get('host', 'an unknown host')}"

    def read_again(self) -> AttemptInfo:
        """Return what is on disk about it now."""
        return _attempt_info(self.path)

    def surely_dead(self) -> bool:
        """Return whether it has ended for certain, seen without waiting for its heartbeat.

        It left a status, or its process was on this very boot of this machine and is gone.
        """
        return self.status is not None or self._process_is_there() is False

    def surely_there(self) -> bool:
        """Return whether its process is seen here, though it may be stopped and its heartbeat with it."""
        return self.status is None and self._process_is_there() is True

    def copied(self) -> bool:
        """Return whether this is a copy of the directory that its driver writes to, or was moved."""
        inode = self.owner.get("inode")
        return inode is not None and inode != self.path.stat().st_ino

    def _process_is_there(self) -> bool | None:
        """Return whether its process goes on; None where that is not seen from here."""
        here = _process_identity(os.getpid())
        if not self.owner or any(self.owner.get(key) != here[key] for key in ("boot", "pid_namespace")):
            return None
        pid = self.owner.get("pid")
        return _start_ticks(pid) == self.owner.get("start_ticks") if isinstance(pid, int) else None


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.checkpoints = path / "checkpoints"
        self.episodes = path / "episodes"
        self.metrics_path = path / "metrics.jsonl"
        self.recipe_path = path / "recipe.yaml"
        self.lock_path = path / "recipe.lock.yaml"

    @classmethod
    def create(cls, root: Path | str, name: str, *, run_id: str | None = None) -> Self:
        """Make the directory of a new run below `root` and enter it in the index.

        `run_id` is used as given, else derived from the recipe's `name`. Raises RunError when the id is
        taken or malformed, or the directory cannot be written.
        """
        run = cls(check_free(root, run_id if run_id is not None else new_run_id(name)))
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            run.path.mkdir()
            for directory in (run.path / "attempts", run.checkpoints, run.episodes):
                directory.mkdir()
            fsync_directory(run.path.parent)
        except FileExistsError:
            raise RunError(f"run {run.run_id} exists at {run.path}; choose another id") from None
        except OSError as error:
            raise cannot_write(run.path, error) from error
        fail("rundir.before_index")
        _enter_in_index(run, name)
        return run

    @classmethod
    def settle(cls, path: Path, name: str) -> Self:
        """Return the run at `path`, a driver's own view of it: made, and indexed, where it is not yet.

        Raises RunError when its name is no run id or the directory cannot be written.
        """
        run = cls(path)
        check_run_id(run.run_id)
        try:
            for directory in (run.path / "attempts", run.checkpoints, run.episodes):
                directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(run.path.parent)
        except OSError as error:
            raise cannot_write(run.path, error) from error
        if _indexed(run.run_id) is None:
            _enter_in_index(run, name)
        return run

    @classmethod
    def find(cls, reference: str | Path) -> Self:
        """Return the run with this id (by the index of runs, or below ./runs), or at this path.

        Raises RunError with the nearest known id when there is none.
        """
        text = str(reference)
        path = Path(text).expanduser()
        if isinstance(reference, Path) or os.sep in text:
            if not os.path.isdir(path / "attempts"):
                raise RunError(f"{text} is not the directory of a run (it has no attempts/)")
            return cls(path.resolve())
        for candidate in (_indexed(text), Path("runs") / text, path):
            if candidate is not None and os.path.isdir(candidate / "attempts"):
                return cls(candidate.resolve())
        known = sorted(index())
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"give the path of its directory ({len(known)} are known)"
        )
        raise RunError(f"there is no run {text!r} on this machine; {hint}")

    def attempts(self) -> list[AttemptInfo]:
        """Return the claimed attempts, oldest first."""
        numbers = sorted(_attempt_numbers(self.path / "attempts"))
        return [_attempt_info(self.path / "attempts" / str(number)) for number in numbers]

    def newest_attempt(self) -> AttemptInfo | None:
        """Return the newest claimed attempt; None before the first."""
        number = _newest_attempt(self.path / "attempts")
        return _attempt_info(self.path / "attempts" / str(number)) if number else None

    def waiting(self) -> list[int]:
        """Return the attempts that were submitted as jobs after the newest claimed one, oldest first.

        No driver has claimed them, yet or ever: `rollhook jobs status` asks their launcher.
        """
        attempts = self.path / "attempts"
        newest = _newest_attempt(attempts)
        return sorted(number for number in _numbers(attempts, SUBMITTED) if number > newest)

    def check_verb(self, verb: Verb) -> None:
        """Raise RunError when another verb began the run."""
        newest = self.newest_attempt()
        if newest is not None and newest.verb != verb:
            raise RunError(
                f"run {self.run_id} is one of `rollhook {newest.verb}`, "
                f"so `rollhook {verb}` cannot go on with it"
            )

    def claim(
        self,
        verb: Verb = "run",
        *,
        number: int | None = None,
        interval: float = INTERVAL,
        stale: float = STALE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Attempt:
        """Become the driver of an attempt: owner file, heartbeat, journal, logs.

        It is `number`, as which the driver was submitted, unless that or a later one was claimed before, as
        when a job is queued again: then, and by default, the next that was neither claimed nor submitted.
        Blocks for up to `stale` seconds where the previous attempt ended without a word on another
        machine. Raises RunError when another verb began the run, another driver is alive or was faster, or
        the disk cannot be written.
        """
        self.check_verb(verb)
        newest = self.newest_attempt()
        if newest is not None and self._alive(newest, stale, clock, sleep):
            raise RunError(
                f"run {self.run_id} is being driven: attempt {newest.number} by {newest.describe_owner()} "
                f"is alive; stop that one first, or start a new run"
            )
        newest_number = newest.number if newest is not None else 0
        if number is None or number <= newest_number:
            number = max([newest_number, *self.waiting()]) + 1
        path = self.path / "attempts" / str(number)
        owner = _process_identity(os.getpid()) | {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "attempt": number,
            "verb": verb,
            "claimed_at": time.time(),
        }
        try:
            path.mkdir(exist_ok=True)
            owner["inode"] = path.stat().st_ino
            fail("rundir.before_owner")
            _create_exclusive(path / "owner.json", to_json(owner, indent=True) + b"\n")
            fail("rundir.after_owner")
            (path / "logs").mkdir(exist_ok=True)
            fsync_directory(path.parent)
            self._sweep()
        except FileExistsError:
            raise RunError(f"another driver has just claimed attempt {number} of run {self.run_id}") from None
        except OSError as error:
            raise cannot_write(path, error) from error
        return Attempt(self, number, interval=interval)

    def _sweep(self) -> None:
        """Remove the files that earlier attempts, which are over, did not finish writing."""
        for pattern in (".*.tmp", "episodes/.*.tmp", "attempts/*/.*.tmp"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def _alive(
        self,
        attempt: AttemptInfo,
        stale: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> bool:
        if attempt.surely_dead():
            return False
        return bool(moving([attempt.heartbeat_path], stale=stale, clock=clock, sleep=sleep))


class Attempt:
    """This process's attempt at a run, from `RunDir.claim`."""

    def __init__(self, run: RunDir, number: int, *, interval: float = INTERVAL) -> None:
        self.run = run
        self.number = number
        self.path = run.path / "attempts" / str(number)
        self.logs = self.path / "logs"
        self._heartbeat = Heartbeat(self.path / "heartbeat", interval=interval)
        self._heartbeat.start()
        self._finished = False
        try:
            self.journal = Journal(
                self.path / "journal.jsonl",
                header={"run_id": run.run_id, "attempt": number},
                guard=self.assert_newest,
            )
        except RunError:
            self._heartbeat.stop()
            raise

    def assert_newest(self) -> None:
        """Raise RunError when a newer attempt has been claimed: this driver then writes nothing more."""
        newest = _newest_attempt(self.path.parent)
        if newest > self.number:
            other = _attempt_info(self.path.parent / str(newest))
            raise RunError(
                f"attempt {newest} of run {self.run.run_id} was started by {other.describe_owner()}; "
                f"attempt {self.number} stops here and writes nothing more"
            )

    def finish(self, status: Status) -> None:
        """End the attempt: journal closed, status written, heartbeat stopped. Safe to call twice."""
        if self._finished:
            return
        self._finished = True
        try:
            self.journal.close()
            self.assert_newest()
            fail("rundir.before_status")
            record = {"schema": SCHEMA_VERSION, "status": status, "ended_at": time.time()}
            write_atomic(self.path / "status.json", to_json(record) + b"\n")
        finally:
            self._heartbeat.stop()


def index_directory() -> Path:
    """Return where the runs of this machine are listed: one file per run id."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "rollhook" / "runs"


def index() -> dict[str, Path]:
    """Return run id -> directory of the runs that were started on this machine and still exist."""
    found = {}
    for path in index_directory().glob("*.json"):
        directory = _indexed(path.stem)
        if directory is not None and (directory / "attempts").is_dir():
            found[path.stem] = directory
    return found


def _indexed(run_id: str) -> Path | None:
    if not RUN_ID.fullmatch(run_id):
        return None
    try:
        return Path(orjson.loads((index_directory() / f"{run_id}.json").read_bytes())["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _enter_in_index(run: RunDir, name: str) -> None:
    entry = {
        "schema": SCHEMA_VERSION,
        "run_id": run.run_id,
        "path": str(run.path),
        "name": name,
        "host": socket.gethostname(),
        "created_at": time.time(),
    }
    try:
        index_directory().mkdir(parents=True, exist_ok=True)
        write_atomic(index_directory() / f"{run.run_id}.json", to_json(entry) + b"\n")
    except (OSError, RunError) as error:
        logger.warning(
            "run %s is not in the index of runs (%s); name it by its path %s", run.run_id, error, run.path
        )


def _attempt_numbers(attempts: Path) -> list[int]:
    return _numbers(attempts, "owner.json")


def _numbers(attempts: Path, having: str) -> list[int]:
    try:
        names = os.listdir(attempts)
    except OSError as error:
        raise RunError(
            f"{attempts} cannot be read: {error.strerror}; the run's directory is damaged or gone"
        ) from error
    return [int(name) for name in names if name.isdecimal() and (attempts / name / having).exists()]


def _newest_attempt(attempts: Path) -> int:
    return max(_attempt_numbers(attempts), default=0)


def _attempt_info(path: Path) -> AttemptInfo:
    status = _read_json(path / "status.json").get("status")
    return AttemptInfo(int(path.name), path, _read_json(path / "owner.json"), status)


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a file; empty when it is absent or (a crash while it was made) incomplete."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _create_exclusive(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    fsync_directory(path.parent)


def _process_identity(pid: int) -> dict[str, Any]:
    """Return what tells this process from every other one, here or elsewhere."""
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "start_ticks": _start_ticks(pid),
        "boot": _read_text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _read_link("/proc/self/ns/pid"),
    }


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None for a zombie or none at all."""
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
