"""How a run stands, read from its directory: alive or dead, how far, what it waits for, what is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollhook import journal
from rollhook.checkpoints import CheckpointStore
from rollhook.errors import RollhookError
from rollhook.heartbeat import moving
from rollhook.journal import Entry
from rollhook.rundir import AttemptInfo, RunDir
from rollhook.runtime.live_file import read_live
from rollhook.runtime.vitals import state_of
from rollhook.sandbox.lease import LeaseState, leases

SCHEMA_VERSION = 1
#: seconds after which a driver that lives but writes no live.json counts as held up
HELD_UP = 15.0
#: verb that can be resumed -> what it wants beside the run's id
_SOURCES = {"run": "", "eval": "", "rescore": " RUN"} | dict.fromkeys(
    ("tasks oracle", "tasks doctor"), " PACK"
)


@dataclass(frozen=True)
class JournalPosition:
    """Where a journal ends; `seconds_ago` by the clocks of writer and reader."""

    seq: int
    event: str
    seconds_ago: float


@dataclass
class Diagnosis:
    """What there is to say of a run. `state` is one of `vitals.STATES`."""

    run_id: str
    state: str
    attempt: int | None = None
    owner: str = ""
    journal: JournalPosition | None = None
    committed_step: int | None = None
    weight_version: int | None = None
    episodes: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    live_seconds_ago: float | None = None
    open_leases: list[LeaseState] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    way_on: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}


def diagnose(
    run: RunDir,
    *,
    watch: Callable[..., set[Any]] = moving,
    wall: Callable[[], float] = time.time,
) -> Diagnosis:
    """Look at a run. Blocks on the disk, and for up to 20 s where another machine's heartbeat is watched."""
    attempts = run.attempts()
    newest = attempts[-1] if attempts else None
    found = Diagnosis(run.run_id, state_of(newest, watch))
    for number in run.waiting():
        found.findings.append(
            f"attempt {number} was submitted as a job, and no driver has begun it; "
            f"`rollhook jobs status {run.run_id}` says why"
        )
    if newest is None:
        found.findings = found.findings or ["no attempt was ever made at it"]
        return found
    found.attempt, found.owner = newest.number, newest.describe_owner()
    committed = CheckpointStore(run.checkpoints).newest()
    if committed is not None:
        found.committed_step, found.weight_version = committed.step, committed.version
    reaped: set[str] = set()
    for attempt in attempts:
        entries = _entries(attempt, found)
        clean = {entry.data["host"] for entry in entries if entry.event == "sandboxes_reaped"}
        found.open_leases = [lease for lease in found.open_leases if lease.host not in clean]
        reaped |= {entry.data["nonce"] for entry in entries if entry.event == "lease_reaped"}
        if attempt is newest and entries:
            last = entries[-1]
            found.journal = JournalPosition(last.seq, last.event, max(0.0, wall() - last.time))
        if attempt is not newest or found.state != "running":
            found.open_leases += [state for state in leases(entries).values() if state.open]
    found.open_leases = [lease for lease in found.open_leases if lease.nonce not in reaped]
    _read_live(found, newest, wall())
    _conclude(found, newest)
    return found


def _entries(attempt: AttemptInfo, found: Diagnosis) -> list[Entry]:
    """Return the entries of a journal up to what is damaged, and note that."""
    entries: list[Entry] = []
    try:
        for entry in journal.read(attempt.journal_path):
            entries.append(entry)  # so that what comes before damage counts
    except RollhookError as error:
        found.findings.append(str(error))
    return entries


def _read_live(found: Diagnosis, attempt: AttemptInfo, now: float) -> None:
    data = read_live(attempt.path)
    if data is None:
        return
    found.live_seconds_ago = max(0.0, now - data["written_at"])
    found.engines = data["engines"]
    found.episodes = sorted(data["episodes"], key=_urgency)


def _urgency(episode: dict[str, Any]) -> float:
    deadline = episode["deadline"]
    return float("inf") if deadline is None else float(deadline["seconds_left"])


def _conclude(found: Diagnosis, attempt: AttemptInfo) -> None:
    """Add what is wrong, and the way on."""
    ago = found.live_seconds_ago
    if found.state == "running" and ago is not None and ago > HELD_UP:
        found.findings.append(
            f"its heartbeat moves, but it said nothing of its episodes for {ago:.0f} s: its loop is held up"
        )
    for engine in found.engines if found.state == "running" else []:
        if not engine["healthy"]:
            found.findings.append(
                f"the engine at {engine['url']} is not healthy; logs: {attempt.path / 'logs'}"
            )
    if found.state == "dead":
        how = "its process is gone" if attempt.surely_dead() else "its heartbeat stands still"
        found.findings.append(f"attempt {attempt.number} ended without a word: {how}")
    if found.state in ("dead", "failed", "stopped"):
        if attempt.verb in _SOURCES:
            what = f"{attempt.verb}{_SOURCES[attempt.verb]}"
            found.way_on.append(f"rollhook {what} --resume {found.run_id}")
        if found.open_leases:
            found.way_on.append(f"rollhook sandboxes reap {found.run_id}   # if it is not resumed")
