"""`rollhook jobs` and `rollhook debug` on real jobs of this machine: every verb takes a run's id alone."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.cli.main import main
from rollhook.launcher import Handle, Job
from rollhook.rundir import RunDir
from rollhook.runtime.job_records import Record, find_record
from rollhook.runtime.jobs import submit_job
from rollhook.testing.environment import build_context
from rollhook_local import LocalLauncherConfig
from rollhook_local.launcher import LocalLauncher

ROLLHOOK = [sys.executable, "-m", "rollhook.cli.main"]


class Jobs:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.launcher = LocalLauncher(LocalLauncherConfig(), build_context(root))
        self.handles: list[Handle] = []

    def start(self, run_id: str, script: str, **options: Any) -> Path:
        run = RunDir.create(self.root, "demo", run_id=run_id)
        job = Job(run_id, 1, str(run.path / "attempts/1"), script, **options)
        self.handles.append(asyncio.run(submit_job(self.launcher, job, run=run)))
        return Path(job.directory)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path / "runs")
    yield made
    for handle in made.handles:
        asyncio.run(made.launcher.stop(handle, force=True))


def call(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(argv)
    sys.stdout.flush()
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


def until_said(directory: Path, word: str) -> None:
    path, end = directory / "logs/driver.log", time.monotonic() + 30
    while not path.exists() or word not in path.read_text():
        assert time.monotonic() < end, f"{path} never said {word!r}"
        time.sleep(0.02)


def test_a_job_that_succeeds(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    directory = jobs.start("good", "echo first; echo second")
    code, out, err = call(capfd, "jobs", "logs", "good", "-f")
    assert (code, out) == (0, "first\nsecond\n")
    assert "Job good-a1 succeeded" in err
    assert call(capfd, "jobs", "logs", "good")[:2] == (0, "first\nsecond\n")
    assert call(capfd, "jobs", "logs", str(directory.parents[1]))[:2] == (0, "first\nsecond\n")
    code, out, _ = call(capfd, "jobs", "status", "good")
    assert code == 0
    assert out.startswith("good-a1: succeeded")
    code, out, _ = call(capfd, "jobs", "status", "good", "--json")
    shown = json.loads(out)
    assert (shown["state"], shown["exit_code"], shown["launcher"]) == ("succeeded", 0, "local")
    assert call(capfd, "jobs", "wait", "good")[0] == 0
    names = {each.name.partition("-")[2] for each in (directory / "debug").iterdir()}
    assert {"submitted", "ended"} <= names


def test_a_job_that_fails(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    jobs.start("bad", "echo whence; exit 9")
    code, out, err = call(capfd, "jobs", "wait", "bad", "--json")
    assert code == 1
    assert (json.loads(out)["status"], json.loads(out)["exit_code"]) == ("failed", 9)
    assert "exit code 9" in err
    assert call(capfd, "jobs", "status", "bad")[0] == 1
    code, out, _ = call(capfd, "jobs", "stop", "bad", "--json")
    assert code == 0, "stopping what has ended is no error"
    assert json.loads(out)["said"] == ["Job bad-a1 has ended already: failed."]


def test_a_job_that_is_stopped_is_no_success(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    directory = jobs.start("slow", "trap 'echo drained; exit 0' INT; echo ready; while :; do sleep 0.1; done")
    until_said(directory, "ready")
    assert call(capfd, "jobs", "status", "slow")[0] == 0
    code, _, err = call(capfd, "jobs", "wait", "slow", "--timeout", "0.2")
    assert code == 124
    assert "it goes on" in err
    code, _, err = call(capfd, "jobs", "stop", "slow", "--cleanup")
    assert code == 0
    assert "asked to stop" in err
    assert "There is nothing to remove." in err
    assert "drained" in (directory / "logs/driver.log").read_text()
    assert call(capfd, "jobs", "status", "slow")[0] == 3
    assert call(capfd, "jobs", "wait", "slow")[0] == 3


def test_a_job_can_be_killed(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    directory = jobs.start("deaf", "trap '' INT TERM; echo ready; while :; do sleep 0.1; done")
    until_said(directory, "ready")
    code, _, err = call(capfd, "jobs", "stop", "deaf", "--force", "--wait")
    assert code == 0
    assert "was killed" in err
    assert call(capfd, "jobs", "status", "deaf")[0] == 3


def test_interrupting_who_watches_does_not_end_the_job(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    directory = jobs.start(
        "on", "echo ready; until [ -e go ]; do sleep 0.1; done".replace("go", str(jobs.root / "go"))
    )
    watching = subprocess.Popen(
        [*ROLLHOOK, "jobs", "logs", "on", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline() == "ready\n"
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert watching.returncode == 3
    assert "Run on goes on" in err
    assert "Traceback" not in err
    assert call(capfd, "jobs", "status", "on")[0] == 0
    (jobs.root / "go").touch()
    assert call(capfd, "jobs", "wait", "on")[0] == 0
    assert directory.is_dir()


def test_jobs_are_listed(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(capfd, "jobs", "list")[:2] == (0, "")
    jobs.start("one", "true")
    jobs.start("two", "exit 3")
    for run_id in ("one", "two"):
        call(capfd, "jobs", "wait", run_id)
    broken = find_record(RunDir.find("one"))
    RunDir.create(jobs.root, "demo", run_id="gone")
    gone = Record(
        "gone", 1, "gone-a1", "nonsuch", {}, "", submitted_at=broken.submitted_at, handle=broken.handle
    )
    gone.write(RunDir.find("gone"))
    damaged = RunDir.create(jobs.root, "demo", run_id="damaged").path / "attempts/1/submit.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    code, out, err = call(capfd, "jobs", "list", "--json")
    assert str(damaged) in err
    rows = {row["run_id"]: row for row in json.loads(out)}
    assert code == 0
    assert {name: row["state"] for name, row in rows.items()} == {
        "one": "succeeded",
        "two": "failed",
        "gone": "unknown",
    }
    assert "nonsuch" in rows["gone"]["message"]
    code, out, _ = call(capfd, "jobs", "list")
    assert "one-a1" in out
    code, out, _ = call(capfd, "jobs", "list", "--no-ask")
    assert "not asked" in out


def test_other_logs_of_an_attempt(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    jobs.start("roles", 'echo of the engine > "$ROLLHOOK_JOB_DIR/logs/engine-0.log"')
    call(capfd, "jobs", "wait", "roles")
    assert call(capfd, "jobs", "logs", "roles", "--role", "engine")[:2] == (0, "of the engine\n")
    code, _, err = call(capfd, "jobs", "logs", "roles", "--role", "nonsuch")
    assert code == 1
    assert "engine-0.log" in err
    assert call(capfd, "jobs", "logs", "roles", "--role", "engine", "-f")[0] == 2


def test_a_run_that_is_not_known_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "logs", "wait", "stop"):
        code, _, err = call(capfd, "jobs", verb, "nonsuch")
        assert code == 1
        assert "there is no run 'nonsuch'" in err


def test_a_bundle_for_a_bug_report(jobs: Jobs, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    jobs.start("broken", "echo MY_API_KEY=abcdef123456; exit 1")
    call(capfd, "jobs", "wait", "broken")
    target = tmp_path / "out.tar.gz"
    assert call(capfd, "debug", "broken", "-o", str(target))[0] == 0
    with tarfile.open(target) as archive:
        member = archive.extractfile("broken/attempts/1/logs/driver.log")
        assert member is not None
        assert member.read() == b"MY_API_KEY=***\n"
        assert any("-asked/processes.txt" in name for name in archive.getnames())
