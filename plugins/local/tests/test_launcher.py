"""Jobs on this machine: each is a session of its own, known by its process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import LauncherError
from rollhook.launcher import Handle, Resources
from rollhook.runtime.job_records import read_record
from rollhook.runtime.jobs import prepare, watch
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import SENTINEL, LauncherContract, LauncherSite, MakeLauncher
from rollhook_local import LocalLauncherConfig
from rollhook_local.launcher import LocalLauncher, _boot


def make(scratch: Path) -> LocalLauncher:
    return LocalLauncher(LocalLauncherConfig(), build_context(scratch))


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LauncherSite]:
    monkeypatch.setenv("LOCAL_LAUNCHER_SECRET", SENTINEL)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key = tmp_path / "a key"
    key.write_text(f"{SENTINEL}\n")
    root = tmp_path / "job's root"
    root.mkdir()

    async def view() -> str:
        return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

    references = {"env": "env:LOCAL_LAUNCHER_SECRET", "file": f"file:{key}"}
    kept = _Kept(make(tmp_path), root, references, unknown, view, seconds=60, gives_ray=False)
    yield kept
    for handle in kept.handles:
        await kept.launcher.stop(handle, force=True)


class _Kept(LauncherSite):
    """A site whose jobs are ended with the test."""

    handles: list[Handle]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.handles = []

    async def submit(self, job: Any) -> Handle:
        handle = await super().submit(job)
        self.handles.append(handle)
        return handle


def unknown(handle: Handle) -> Handle:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return replace(handle, data={**handle.data, "pid": ended.pid, "start": 1})


class TestLocalLauncher(LauncherContract):
    @pytest.fixture
    def make_launcher(self, tmp_path: Path) -> MakeLauncher:
        return lambda: make(tmp_path)

    @pytest.fixture
    def site(self, site: LauncherSite) -> LauncherSite:
        return site


def test_the_launcher_drives_in_process() -> None:
    assert LocalLauncher.in_process


async def test_a_job_outlives_who_started_it_and_the_hang_up_of_its_terminal(
    site: LauncherSite, tmp_path: Path
) -> None:
    """A process with a terminal of its own submits and is hung up on; the job goes on and succeeds."""
    job = site.job(
        "echo ready; until [ -e go ]; do sleep 0.05; done; echo finished".replace("go", str(tmp_path / "go"))
    )
    program = f"""
import asyncio, os, pty, sys, time
from dataclasses import asdict
from pathlib import Path
pid, terminal = pty.fork()
if pid == 0:
    from rollhook.launcher import Job
    from rollhook.rundir import RunDir
    from rollhook.runtime.jobs import submit_job
    from rollhook.testing.environment import build_context
    from rollhook_local import LocalLauncherConfig
    from rollhook_local.launcher import LocalLauncher
    job = Job({job.run_id!r}, 1, {job.directory!r}, {job.script!r})
    run = RunDir.create(Path({str(site.root)!r}), "x", run_id=job.run_id)
    launcher = LocalLauncher(LocalLauncherConfig(), build_context())
    asyncio.run(submit_job(launcher, job, run=run))
    print("submitted", flush=True)
    time.sleep(600)
seen = b""
while b"submitted" not in seen:
    seen += os.read(terminal, 1000)
os.close(terminal)   # the terminal is gone: SIGHUP to all that belongs to it
os.waitpid(pid, 0)
"""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=True, timeout=60)
    handle = read_record(Path(job.directory) / "submit.json").handle
    assert handle is not None
    await site.until_said(job, "ready")
    assert (await site.launcher.status(handle)).state == "running"
    (tmp_path / "go").touch()
    assert (await site.watch(handle)).state == "succeeded"
    assert "finished" in (Path(job.directory) / "logs/driver.log").read_text()


async def test_a_job_whose_processes_were_killed_is_lost(site: LauncherSite) -> None:
    job = site.job("echo ready; exec sleep 600")
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    pid = int(handle.data["pid"])
    os.kill(pid, signal.SIGKILL)
    assert (await site.launcher.status(handle)).state == "running"  # what it ran goes on
    said = await site.launcher.stop(handle)
    assert "asked" in said
    status = await watch(site.launcher, handle, lost_seconds=0.1, poll=0.1, timeout=60)
    assert (status.state, status.exit_code) == ("lost", None)
    assert "killed" in status.message


async def test_a_job_from_before_a_restart_of_the_machine_is_lost(site: LauncherSite) -> None:
    job = site.job("echo ready; exec sleep 600")
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    before = replace(handle, data={**handle.data, "boot": "another"})
    status = await site.launcher.status(before)
    assert status.state == "lost"
    assert "anew" in status.message
    assert "ended already" in await site.launcher.stop(before, force=True)
    assert (await site.launcher.status(handle)).state == "running"


async def test_a_process_that_has_a_jobs_number_now_is_not_taken_for_it(site: LauncherSite) -> None:
    handle = await site.submit(site.job("exit 0"))
    assert (await site.watch(handle)).state == "succeeded"
    other = replace(
        handle, directory=str(site.root / "gone"), data={**handle.data, "pid": os.getpid(), "start": 1}
    )
    assert (await site.launcher.status(other)).state == "lost"


def _recorded(site: LauncherSite, pid: object) -> Handle:
    data = {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "start": 5}
    return Handle("local", "demo-0a1b2c-a1", str(site.root / "none"), data)


_DAEMON = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(60)"


async def test_a_daemon_whose_session_has_a_jobs_number_is_not_taken_for_it(site: LauncherSite) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", _DAEMON])
    daemon.wait()
    handle = _recorded(site, daemon.pid)
    left = [
        int(each) for each in subprocess.check_output(["ps", "-o", "pid=", "-s", str(daemon.pid)]).split()
    ]
    try:
        assert (await site.launcher.status(handle)).state == "lost"
        await site.launcher.stop(handle, force=True)
        assert [Path(f"/proc/{pid}").exists() for pid in left] == [True]
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("pid", [0, 1, -1, "abc", None, True])
async def test_a_damaged_record_names_no_process(site: LauncherSite, pid: object) -> None:
    with pytest.raises(LauncherError, match="damaged"):
        await site.launcher.status(_recorded(site, pid))


async def test_a_job_of_another_machine_is_asked_there(site: LauncherSite) -> None:
    handle = await site.submit(site.job("exit 0"))
    await site.watch(handle)
    elsewhere = replace(handle, directory="/nonexistent", data={**handle.data, "host": "other"})
    with pytest.raises(LauncherError, match="started on other; ask there"):
        await site.launcher.status(elsewhere)


async def test_what_surrounds_the_submitter_as_a_job_is_not_the_jobs(
    site: LauncherSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROLLHOOK_ATTEMPT", "ROLLHOOK_JOB_DIR", "ROLLHOOK_JOB_FILES", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "7")
    job = site.job('echo "$ROLLHOOK_ATTEMPT $ROLLHOOK_JOB_DIR ${RAY_ADDRESS:-none}"')
    assert (await site.watch(await site.submit(job))).state == "succeeded"
    assert f"1 {job.directory} none" in (Path(job.directory) / "logs/driver.log").read_text()


async def test_more_than_one_node_is_refused(site: LauncherSite) -> None:
    with pytest.raises(LauncherError, match="wants 3 nodes"):
        await prepare(site.launcher, site.job("true", resources=Resources(nodes=3)))
