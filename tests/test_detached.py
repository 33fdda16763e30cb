"""A run as a job of this machine: it is stopped, it is gone on with, and its directory is that of any run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollhook.errors import RunError
from rollhook.job_script import LOG, read_exit_code
from rollhook.rundir import RunDir
from rollhook.runtime.job_records import records
from rollhook.runtime.native_job import submit_resumed
from rollhook.runtime.results import read_result

pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

pytestmark = pytest.mark.timeout(600)

ROLLHOOK = [sys.executable, "-m", "rollhook.cli.main"]
SECONDS = 240


def call(*argv: str, code: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*ROLLHOOK, *argv], cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def until_said(path: Path, word: str) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists() or word not in path.read_text():
        assert time.monotonic() < end, path.read_text() if path.exists() else f"no {path}"
        assert read_exit_code(path.parents[1]) is None, path.read_text()
        time.sleep(0.1)


def test_a_detached_run_is_stopped_and_gone_on_with(tmp_path: Path) -> None:
    try:
        _stopped_and_gone_on_with(tmp_path)
    finally:
        subprocess.run([*ROLLHOOK, "jobs", "stop", "far", "--force"], cwd=tmp_path, check=False, timeout=60)


def _stopped_and_gone_on_with(tmp_path: Path) -> None:
    steps = 80
    done = call(
        "run",
        "quickstart-sft",
        f"steps={steps}",
        "--detach",
        "--run-id",
        "far",
        "--json",
        code=0,
        cwd=tmp_path,
    )
    said = json.loads(done.stdout)
    assert (said["run_id"], said["job_id"], said["launcher"]) == ("far", "far-a1", "local")
    run = RunDir.find("far")
    assert run.path == tmp_path / "runs/far"
    attempt = Path(said["directory"])
    until_said(attempt / LOG, "| loss")
    with pytest.raises(RunError, match="job far-a1, which is running"):
        asyncio.run(submit_resumed(run))

    call("jobs", "stop", "far", "--wait", "--timeout", "120", code=0, cwd=tmp_path)
    call("jobs", "status", "far", code=3, cwd=tmp_path)
    assert read_exit_code(attempt) == 3
    stopped = read_result(run.path)
    assert stopped is not None
    assert stopped.status == "stopped"
    assert 2 <= stopped.steps < steps

    call("run", "--resume", "far", "--detach", code=0, cwd=tmp_path)
    call("jobs", "wait", "far", "--timeout", str(SECONDS), code=0, cwd=tmp_path)
    result = read_result(run.path)
    assert result is not None
    assert (result.status, result.steps) == ("succeeded", steps)
    assert [(each.number, each.status) for each in run.attempts()] == [(1, "stopped"), (2, "succeeded")]
    assert [record.job_id for record in records(run)] == ["far-a1", "far-a2"]
    log = (run.path / "attempts/2" / LOG).read_text()
    assert f"step {stopped.steps}/" not in log
    assert f"step {steps}/{steps}" in log
