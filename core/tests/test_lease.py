"""Leases on disk and on labels, and the rule by which a sandbox may be reaped."""

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook import journal
from rollhook.rundir import Attempt, RunDir
from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.lease import Lease, leases
from rollhook.sandbox.pool import SandboxPool
from rollhook.sandbox.reap import ReapReport, reap, survey
from rollhook.testing.scripted import ListJournal, ScriptedBackend

SPEC = SandboxSpec(lifetime_seconds=100.0)


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", run_id="demo")


async def with_sandbox(attempt: Attempt, backend: ScriptedBackend, **lease: Any) -> str:
    """Make one sandbox under this attempt, as its pool would, and forget about it."""
    pool = SandboxPool(
        backend,
        run_id=attempt.run.run_id,
        attempt=attempt.number,
        journal=attempt.journal,
        wall=lambda: 5000.0,
    )
    sandbox = await pool.acquire(SPEC, episode_id="e1")
    await attempt.journal.commit()
    return sandbox.id


def abandon(attempt: Attempt) -> None:
    """Let an attempt look like one of another machine that said nothing at its end."""
    attempt.journal.close()
    attempt._heartbeat.stop()
    owner = attempt.path / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"host": "elsewhere", "boot": "other"}))


def still(paths: Iterable[Path]) -> set[Path]:
    return set()


def beating(paths: Iterable[Path]) -> set[Path]:
    return set(paths)


async def reaped(backend: ScriptedBackend, now: float = 5000.0, **options: Any) -> ReapReport:
    return await reap(backend, wall=lambda: now, **options)


@settings(deadline=None)
@given(
    st.builds(
        Lease,
        run_id=st.just("demo"),
        attempt=st.integers(1, 99),
        host=st.text("abc.-", max_size=5),
        expiry=st.integers(0, 2**40).map(float),
        nonce=st.just("00ff"),
        episode=st.text("abc", max_size=3),
        box=st.text("abc", max_size=3),
    )
)
def test_a_lease_survives_its_labels(lease: Lease) -> None:
    assert Lease.from_labels({**lease.labels(), "other": "x"}) == lease


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"rollhook.run": "demo"},
        {"rollhook.run": "demo", "rollhook.attempt": "x"},
        {"rollhook.run": "demo", "rollhook.attempt": None},
    ],
)
def test_labels_that_are_not_ours_are_no_lease(labels: dict[str, Any]) -> None:
    assert Lease.from_labels(labels) is None


async def test_the_state_of_leases_is_read_from_a_journal(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    pool = SandboxPool(backend, run_id="demo", attempt=1, journal=attempt.journal, warm=1)
    first = await pool.acquire(SPEC, episode_id="e1", box="main")
    await pool.release(first)
    second = await pool.acquire(SPEC, episode_id="e2", box="verify")
    await attempt.journal.commit()
    found = {state.episode: state for state in leases(journal.read(attempt.path / "journal.jsonl")).values()}
    assert (found["e1"].open, found["e1"].sandbox_id) == (False, first.id)
    assert (found["e2"].open, found["e2"].sandbox_id, found["e2"].box) == (True, second.id, "verify")
    await pool.aclose()
    attempt.finish("stopped")
    assert not any(state.open for state in leases(journal.read(attempt.path / "journal.jsonl")).values())


async def test_a_live_attempt_is_never_reaped(run: RunDir) -> None:
    """Invariant 4: before its attempt's heartbeat has expired, nobody may; not even after its expiry."""
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    for now in (5000.0, 9e9):
        report = await reaped(backend, now, watch=beating)
        assert report.deleted == {}
        assert report.kept == {sandbox: "attempt 1 is alive"}
    assert list(backend.live) == [sandbox]
    attempt.finish("stopped")


async def test_a_heartbeat_that_stands_still_frees_the_lease(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    abandon(attempt)
    report = await reaped(backend, watch=still)
    assert report.deleted == {sandbox: "its attempt's heartbeat stands still"}
    assert backend.live == {}


async def test_a_newer_attempt_frees_the_lease_at_once(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    abandon(attempt)
    (run.path / "attempts" / "1" / "status.json").unlink(missing_ok=True)
    newer = await asyncio.to_thread(
        lambda: run.claim(sleep=lambda _: None, clock=iter(range(0, 900, 30)).__next__)
    )
    mine = await with_sandbox(newer, backend)
    report = await reaped(backend, watch=beating, find={"demo": run}.get, record=newer.journal)
    assert report.deleted == {sandbox: "attempt 2 of its run has started"}
    assert report.kept == {mine: "attempt 2 is alive"}
    await newer.journal.commit()
    events = [entry.event for entry in journal.read(newer.path / "journal.jsonl")]
    assert events[-1] == "lease_reaped"
    newer.finish("stopped")


BACKEND_ON_DISK = """
import asyncio, json, logging, sys
from pathlib import Path
from rollhook.component import BuildContext
from rollhook.sandbox.backend import SandboxBackend, SandboxInfo
from rollhook.testing.scripted import ScriptedRaw

class OnDisk(SandboxBackend):
    # a provider that outlives its clients: a sandbox is a file with its labels; every third reply gets lost
    def __init__(self, directory):
        super().__init__(None, BuildContext(logging.getLogger(), scratch=directory, cache=directory))
        self.directory, self.made = directory, 0

    async def create(self, spec):
        self.made += 1
        path = self.directory / f"s{self.made}"
        path.write_text(json.dumps(dict(spec.labels)))
        if self.made % 3 == 0:
            await asyncio.Event().wait()
        return ScriptedRaw(path.name, spec)

    async def list(self, labels):
        found = [(path.name, json.loads(path.read_text())) for path in sorted(self.directory.iterdir())]
        return [SandboxInfo(name, got) for name, got in found if labels.items() <= got.items()]

    async def delete(self, sandbox_id):
        (self.directory / sandbox_id).unlink(missing_ok=True)
"""

DRIVER = """
import asyncio, sys
from pathlib import Path
from backend_on_disk import OnDisk
from rollhook.rundir import RunDir
from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.pool import SandboxPool

async def main():
    attempt = RunDir.find(Path(sys.argv[1])).claim()
    provider = Path(sys.argv[2])
    pool = SandboxPool(
        OnDisk(provider), run_id="demo", attempt=1, journal=attempt.journal, create_concurrency=9, warm=2
    )
    makers = [asyncio.create_task(pool.acquire(SandboxSpec(), episode_id=f"e{n}")) for n in range(9)]
    while sum(maker.done() for maker in makers) < 6 or len(list(provider.iterdir())) < 11:
        await asyncio.sleep(0)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_no_sandbox_outlives_its_lease(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4, with a real kill -9: whatever the dead driver had asked for, the next attempt reaps."""
    site, provider = tmp_path / "site", tmp_path / "provider"
    site.mkdir()
    provider.mkdir()
    (site / "backend_on_disk.py").write_text(BACKEND_ON_DISK)
    monkeypatch.syspath_prepend(str(site))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run.path), str(provider)],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    process.stdout.close()
    left = {path.name: json.loads(path.read_text()) for path in provider.iterdir()}
    assert len(left) >= 11

    attempt = run.claim()
    on_disk = importlib.import_module("backend_on_disk").OnDisk(provider)
    journalled = leases(journal.read(run.path / "attempts" / "1" / "journal.jsonl"))
    assert {labels["rollhook.nonce"] for labels in left.values()} <= journalled.keys()
    report = await reap(on_disk, labels={"rollhook.run": "demo"}, record=attempt.journal)
    assert report.deleted.keys() == left.keys()
    assert list(provider.iterdir()) == []
    attempt.finish("stopped")


async def test_an_attempt_that_ended_frees_its_leases(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    attempt.finish("failed")
    assert (await reaped(backend, watch=beating)).deleted == {sandbox: "its attempt ended (failed)"}


@pytest.mark.parametrize(("now", "gone"), [(5399.0, False), (5401.0, True)])
async def test_who_cannot_read_the_journal_waits_for_the_expiry(run: RunDir, now: float, gone: bool) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    report = await reaped(backend, now, find=lambda run_id: None, watch=still)
    assert (sandbox in report.deleted) is gone
    if not gone:
        assert report.kept[sandbox].startswith("whether run demo is over is not known here")
    attempt.finish("stopped")


async def test_a_run_of_the_same_name_elsewhere_is_not_taken_for_ours(run: RunDir) -> None:
    """Another machine's run `demo` is alive; ours has ended. The nonce tells the two apart."""
    run.claim().finish("succeeded")
    backend = ScriptedBackend()
    pool = SandboxPool(backend, run_id="demo", attempt=1, journal=ListJournal(), wall=lambda: 5000.0)
    sandbox = await pool.acquire(SPEC, episode_id="e1")
    assert (await reaped(backend, watch=still)).kept.keys() == {sandbox.id}
    assert sandbox.id in backend.live
    await pool.aclose()


async def test_a_copy_of_a_runs_directory_does_not_show_that_it_is_over(run: RunDir, tmp_path: Path) -> None:
    """What was fetched to read it: the run goes on elsewhere, and no heartbeat moves in the copy."""
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    abandon(attempt)
    copy = RunDir(tmp_path / "copies" / "demo")
    shutil.copytree(run.path, copy.path)
    report = await reaped(backend, find=lambda _: copy, watch=still)
    assert report.deleted == {}
    assert report.kept[sandbox].startswith("whether run demo is over is not known here")
    assert sandbox in (await reaped(backend, find=lambda _: copy, now=5401.0, watch=still)).deleted


async def test_an_attempt_that_is_begun_in_a_copy_does_not_end_the_original(
    run: RunDir, tmp_path: Path
) -> None:
    """Someone resumes a copy of a run that goes on elsewhere; only the labels' expiry frees its sandboxes."""
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    abandon(attempt)
    copy = RunDir(tmp_path / "copies" / "demo")
    shutil.copytree(run.path, copy.path)
    resumed = copy.claim(sleep=lambda _: None, clock=iter(range(0, 900, 30)).__next__)
    assert resumed.number == 2
    assert (await reaped(backend, find=lambda _: copy, watch=still)).deleted == {}
    assert sandbox in (await reaped(backend, find=lambda _: copy, now=5401.0, watch=still)).deleted
    resumed.finish("stopped")


async def test_a_driver_that_is_stopped_and_there_keeps_its_sandboxes(run: RunDir) -> None:
    """Ctrl-Z stops the heartbeat with all else; the run goes on with fg."""
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    report = await reaped(backend, watch=still)
    assert report.kept == {sandbox: "attempt 1 is alive"}
    attempt.finish("stopped")


async def test_sandboxes_without_a_lease_are_left_alone(run: RunDir) -> None:
    backend = ScriptedBackend()
    await backend.create(SandboxSpec(labels={"somebody": "else"}))
    report = await reaped(backend, 9e9, watch=still)
    assert (report.deleted, report.kept) == ({}, {})
    assert len(backend.live) == 1


async def test_the_provider_is_asked_twice_and_only_what_was_there_both_times_goes(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    first = await with_sandbox(attempt, backend)
    abandon(attempt)
    looks = 0

    def watch(paths: Iterable[Path]) -> set[Path]:
        nonlocal looks
        looks += 1
        return set()

    later = SandboxSpec(labels={**backend.specs[0].labels})
    original = backend.list

    async def list_and_change(labels: Any) -> Any:
        seen = await original(labels)
        if backend.lists == 1:
            backend.make(later)
        return seen

    backend.list = list_and_change  # type: ignore[method-assign]
    report = await reaped(backend, watch=watch)
    assert backend.lists == looks == 2
    assert list(report.deleted) == [first]
    assert len(backend.live) == 1


async def test_an_attempt_that_comes_back_between_the_looks_keeps_its_sandboxes(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    sandbox = await with_sandbox(attempt, backend)
    abandon(attempt)
    answers = iter([still, beating])

    def watch(paths: Iterable[Path]) -> set[Path]:
        return next(answers)(paths)

    report = await reaped(backend, watch=watch)
    assert report.kept == {sandbox: "attempt 1 is alive"}


async def test_one_that_cannot_be_deleted_does_not_stop_the_others(run: RunDir) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    first = await with_sandbox(attempt, backend)
    second = await with_sandbox(attempt, backend)
    attempt.finish("stopped")
    backend.delete_errors = [OSError("unreachable")]
    report = await reaped(backend)
    assert report.failed == {first: "OSError: unreachable"}
    assert list(report.deleted) == [second]


async def test_a_damaged_journal_still_frees_what_it_names(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    attempt, backend = run.claim(), ScriptedBackend()
    first = await with_sandbox(attempt, backend)
    second = await with_sandbox(attempt, backend)
    attempt.finish("stopped")
    path = attempt.path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[4:]]))
    findings = {finding.sandbox.id: finding.reap for finding in await survey(backend, wall=lambda: 5000.0)}
    assert findings == {first: True, second: False}
    assert "line 4: the checksum does not fit" in caplog.text
