"""Reaping: deleting sandboxes whose attempt is over, and only those.

A sandbox may be reaped when the journal that holds its lease can be read here and its attempt is over (it
ended, its heartbeat stands still, or a newer attempt exists); where that journal cannot be read, only after
the expiry that its label names. The provider is asked twice, and only what was found both times is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollhook import journal
from rollhook.errors import RollhookError, RunError
from rollhook.heartbeat import moving
from rollhook.rundir import AttemptInfo, RunDir
from rollhook.sandbox.backend import SandboxBackend, SandboxInfo
from rollhook.sandbox.lease import Lease, LeaseJournal, leases

logger = logging.getLogger(__name__)

FindRun = Callable[[str], RunDir | None]


@dataclass(frozen=True)
class Finding:
    """A sandbox that carries a lease; `reason` says why it may (`reap`) or may not be deleted."""

    sandbox: SandboxInfo
    lease: Lease
    reap: bool
    reason: str


@dataclass
class ReapReport:
    """What became of the sandboxes that carry a lease, by id, each with the reason."""

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
    find: FindRun = find_run,
    wall: Callable[[], float] = time.time,
    watch: Callable[..., set[Any]] = moving,
) -> list[Finding]:
    """List the sandboxes that carry these labels and a lease, and judge each.

    Takes up to `heartbeat.STALE` seconds where an attempt neither ended nor shows a sign of life.
    """
    found = []
    for info in await backend.list(labels or {}):
        lease = Lease.from_labels(info.labels)
        if lease is not None:
            found.append((info, lease))
    over = await asyncio.to_thread(_attempts_over, [lease for _, lease in found], find, watch)
    return [_judge(info, lease, over.get(lease.nonce), wall()) for info, lease in found]


async def reap(
    backend: SandboxBackend,
    *,
    labels: Mapping[str, str] | None = None,
    find: FindRun = find_run,
    record: LeaseJournal | None = None,
    wall: Callable[[], float] = time.time,
    watch: Callable[..., set[Any]] = moving,
) -> ReapReport:
    """Delete the sandboxes whose attempt is over, among those that carry these labels.

    `record` takes a `lease_reaped` entry for each, where the caller drives a run itself.
    """
    report = ReapReport()
    first = await survey(backend, labels=labels, find=find, wall=wall, watch=watch)
    candidates = {finding.sandbox.id for finding in first if finding.reap}
    second = await survey(backend, labels=labels, find=find, wall=wall, watch=watch) if candidates else first
    for finding in second:
        if finding.reap and finding.sandbox.id in candidates:
            await _delete(backend, finding, report, record)
        else:
            report.kept[finding.sandbox.id] = finding.reason
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


def _judge(info: SandboxInfo, lease: Lease, over: tuple[bool, str] | None, now: float) -> Finding:
    if over is not None:
        return Finding(info, lease, *over)
    if now > lease.expiry:
        return Finding(info, lease, True, f"its lease expired {now - lease.expiry:.0f} s ago")
    return Finding(
        info,
        lease,
        False,
        f"the journal of run {lease.run_id} is not readable here; it may be reaped in "
        f"{lease.expiry - now:.0f} s, or from host {lease.host}",
    )


def _attempts_over(
    wanted: Iterable[Lease], find: FindRun, watch: Callable[..., set[Any]]
) -> dict[str, tuple[bool, str]]:
    """Return, by nonce, whether the attempt of each lease whose journal is readable here is over, and why."""
    by_attempt: dict[tuple[str, int], list[str]] = {}
    for lease in wanted:
        by_attempt.setdefault((lease.run_id, lease.attempt), []).append(lease.nonce)
    verdicts: dict[str, tuple[bool, str]] = {}
    unsure: list[tuple[AttemptInfo, list[str]]] = []
    for (run_id, number), nonces in by_attempt.items():
        run = find(run_id)
        attempts = {attempt.number: attempt for attempt in run.attempts()} if run else {}
        if number not in attempts:
            continue
        ours = [nonce for nonce in nonces if nonce in _nonces(attempts[number])]
        reason = _surely_over(attempts[number], max(attempts))
        if reason is None:
            unsure.append((attempts[number], ours))
        else:
            verdicts |= dict.fromkeys(ours, (True, reason))
    alive = watch([attempt.heartbeat_path for attempt, _ in unsure]) if unsure else set()
    for attempt, ours in unsure:
        lives = attempt.heartbeat_path in alive
        reason = f"attempt {attempt.number} is alive" if lives else "its attempt's heartbeat stands still"
        verdicts |= dict.fromkeys(ours, (not lives, reason))
    return verdicts


def _surely_over(attempt: AttemptInfo, newest: int) -> str | None:
    if newest > attempt.number:
        return f"attempt {newest} of its run has started"
    if attempt.status is not None:
        return f"its attempt ended ({attempt.status})"
    return "its attempt's process is gone" if attempt.surely_dead() else None


def _nonces(attempt: AttemptInfo) -> frozenset[str]:
    """Return the nonces that an attempt's journal holds: a run of the same name elsewhere has others."""
    entries: list[journal.Entry] = []
    try:
        for entry in journal.read(attempt.journal_path):
            entries.append(entry)  # so that what comes before damage counts
    except RollhookError as error:
        logger.warning("the leases of attempt %d are not all known: %s", attempt.number, error)
    return frozenset(leases(entries))
