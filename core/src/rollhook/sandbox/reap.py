"""Reaping: deleting sandboxes whose attempt is over, and only those.

A sandbox may be reaped when the journal that holds its lease can be read here and its attempt is over (it
ended, its heartbeat stands still, or a newer attempt exists); where that journal cannot be read, only after
the expiry that its label names. The provider is asked twice, and only what was found both times is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollhook import journal
from rollhook.errors import RollhookError, RunError
from rollhook.heartbeat import moving
from rollhook.rundir import AttemptInfo, RunDir
from rollhook.sandbox.backend import SandboxBackend, SandboxInfo
from rollhook.sandbox.lease import Lease, LeaseJournal, LeaseState, leases

logger = logging.getLogger(__name__)

FindRun = Callable[[str], RunDir | None]


@dataclass(frozen=True)
class Finding:
    """A sandbox that carries a lease; `reason` says why it may (`reap`) or may not be deleted.

    `age` is in seconds, since the provider made it or else since its lease; None where neither is known here.
    `price` is that of a second, from the lease's journal; None where it is not known.
    """

    sandbox: SandboxInfo
    lease: Lease
    reap: bool
    reason: str
    age: float | None = None
    price: float | None = None

    @property
    def cost(self) -> float | None:
        """What it has cost so far; None where that is not known."""
        return None if self.age is None or self.price is None else self.age * self.price


@dataclass
class ReapReport:
    """What became of the sandboxes that carry a lease, by id, each with the reason.

    After a dry run `deleted` holds those that would have been.
    """

    deleted: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def find_run(run_id: str) -> RunDir | None:
    """Return the run with this id on this machine; None when it is unknown here."""
    try:
        return RunDir.find(run_id)
    except RunError:
        return None


async def survey(
    backend: SandboxBackend,
    *,
    labels: Mapping[str, str] | None = None,
    older_than: float | None = None,
    find: FindRun = find_run,
    wall: Callable[[], float] = time.time,
    watch: Callable[..., set[Any]] = moving,
) -> list[Finding]:
    """List the sandboxes that carry these labels and a lease, and judge each.

    `older_than` is an age in seconds: younger ones, and those whose age is not known, are left out. Takes up
    to `heartbeat.STALE` seconds where an attempt neither ended nor shows a sign of life.
    """
    found = []
    for info in await backend.list(labels or {}):
        lease = Lease.from_labels(info.labels)
        if lease is not None:
            found.append((info, lease))
    over = await asyncio.to_thread(_attempts_over, [lease for _, lease in found], find, watch)
    judged = [_judge(info, lease, over.get(lease.nonce), wall()) for info, lease in found]
    return [each for each in judged if older_than is None or (each.age or 0.0) >= older_than]


async def reap(
    backend: SandboxBackend,
    *,
    labels: Mapping[str, str] | None = None,
    older_than: float | None = None,
    dry_run: bool = False,
    find: FindRun = find_run,
    record: LeaseJournal | None = None,
    wall: Callable[[], float] = time.time,
    watch: Callable[..., set[Any]] = moving,
) -> ReapReport:
    """Delete the sandboxes whose attempt is over, among those that `survey` finds.

    With `dry_run` nothing is deleted, only reported. `record` takes a `lease_reaped` entry for each, where
    the caller drives a run itself, and `sandboxes_reaped` once none is left.
    """
    report = ReapReport()

    async def look() -> list[Finding]:
        return await survey(backend, labels=labels, older_than=older_than, find=find, wall=wall, watch=watch)

    first = await look()
    candidates = {finding.sandbox.id for finding in first if finding.reap}
    for finding in await look() if candidates else first:
        if not finding.reap or finding.sandbox.id not in candidates:
            report.kept[finding.sandbox.id] = finding.reason
        elif dry_run:
            report.deleted[finding.sandbox.id] = finding.reason
        else:
            await _delete(backend, finding, report, record)
    if record is not None and not (report.kept or report.failed):
        record.append("sandboxes_reaped", host=socket.gethostname())
    return report


async def _delete(
    backend: SandboxBackend, finding: Finding, report: ReapReport, record: LeaseJournal | None
) -> None:
    sandbox_id, nonce = finding.sandbox.id, finding.lease.nonce
    try:
        await backend.delete(sandbox_id)
    except Exception as error:  # noqa: BLE001 - reported; the others are still deleted
        logger.warning("sandbox %s could not be reaped: %s", sandbox_id, error)
        report.failed[sandbox_id] = f"{type(error).__name__}: {error}"
        return
    report.deleted[sandbox_id] = finding.reason
    if record is not None:
        record.append("lease_reaped", nonce=nonce, sandbox_id=sandbox_id, reason=finding.reason)


def _judge(info: SandboxInfo, lease: Lease, known: _Known | None, now: float) -> Finding:
    since = info.created_at if info.created_at is not None or known is None else known.taken_at
    age = None if since is None else now - since
    if known is not None:
        return Finding(info, lease, known.over, known.reason, age, known.price)
    if now > lease.expiry:
        return Finding(info, lease, True, f"its lease expired {now - lease.expiry:.0f} s ago", age)
    return Finding(
        info,
        lease,
        False,
        f"whether run {lease.run_id} is over is not known here; it may be reaped in "
        f"{lease.expiry - now:.0f} s, or from host {lease.host}",
        age,
    )


@dataclass(frozen=True)
class _Known:
    """What a journal tells of a lease: when it was taken, and whether its attempt is over."""

    taken_at: float
    over: bool
    reason: str
    price: float | None


def _attempts_over(
    wanted: Iterable[Lease], find: FindRun, watch: Callable[..., set[Any]]
) -> dict[str, _Known]:
    """Return by nonce what is known of the leases whose journal is readable here."""
    by_attempt: dict[tuple[str, int], list[str]] = {}
    for lease in wanted:
        by_attempt.setdefault((lease.run_id, lease.attempt), []).append(lease.nonce)
    known: dict[str, _Known] = {}
    unsure: list[tuple[AttemptInfo, list[LeaseState]]] = []
    for (run_id, number), nonces in by_attempt.items():
        run = find(run_id)
        attempts = {attempt.number: attempt for attempt in run.attempts()} if run else {}
        if number not in attempts:
            continue
        held = read_leases(attempts[number])
        ours = [held[nonce] for nonce in nonces if nonce in held]
        reason = surely_over(attempts[number], attempts.values())
        if reason is None and attempts[number].surely_there():
            words = f"attempt {number} is alive"
            known |= {lease.nonce: _Known(lease.taken_at, False, words, lease.price) for lease in ours}
        elif reason is None:
            # nothing moves in a copy, however alive the run is that it was made of
            unsure += [] if attempts[number].copied() else [(attempts[number], ours)]
        else:
            known |= {lease.nonce: _Known(lease.taken_at, True, reason, lease.price) for lease in ours}
    alive = watch([attempt.heartbeat_path for attempt, _ in unsure]) if unsure else set()
    for attempt, ours in unsure:
        lives = attempt.heartbeat_path in alive
        reason = f"attempt {attempt.number} is alive" if lives else "its attempt's heartbeat stands still"
        known |= {lease.nonce: _Known(lease.taken_at, not lives, reason, lease.price) for lease in ours}
    return known


def surely_over(attempt: AttemptInfo, attempts: Iterable[AttemptInfo]) -> str | None:
    """Return why one of a run's `attempts` is over for certain; None when it may go on."""
    # one that was begun in a copy of a run's directory says nothing about the original
    copied = attempt.copied()
    later = [each for each in attempts if each.number > attempt.number and (each.copied() or not copied)]
    if later:
        return f"attempt {max(each.number for each in later)} of its run has started"
    if attempt.status is not None:
        return f"its attempt ended ({attempt.status})"
    return "its attempt's process is gone" if attempt.surely_dead() else None


def read_leases(attempt: AttemptInfo) -> dict[str, LeaseState]:
    """Return the leases in an attempt's journal by nonce: a run of the same name elsewhere has others."""
    entries: list[journal.Entry] = []
    try:
        for entry in journal.read(attempt.journal_path):
            entries.append(entry)  # so that what comes before damage counts
    except RollhookError as error:
        logger.warning("the leases of attempt %d are not all known: %s", attempt.number, error)
    return leases(entries)
