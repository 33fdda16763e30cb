"""What ends and removes a job that was started by exec: that job, and nothing else of the pod."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from rollhook.errors import LauncherError
from rollhook.job_script import EXIT_CODE, SIGNALLED
from rollhook.launcher import Handle
from rollhook_kuberay import standing
from rollhook_kuberay.port import Port


class Refusing:
    async def exec(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"nothing is to be run: {arguments}")


def probe(directory: Path) -> str:
    quoted = shlex.quote(str(directory))
    text = standing._PROBE.format(job=quoted, directory=quoted, code=EXIT_CODE, signalled=SIGNALLED)
    return subprocess.check_output(["sh", "-c", text], text=True).strip()


def end(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", standing._END, str(directory / "pid")], check=True, timeout=60)


def test_a_process_that_has_a_jobs_number_now_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "pid").write_text(f"{stranger.pid}\n")
        assert probe(tmp_path) == "gone"
        end(tmp_path)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_job_itself_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("trap '' TERM; while :; do sleep 1; done\n")
    job = subprocess.Popen(["bash", str(script)], start_new_session=True)
    (tmp_path / "pid").write_text(f"{job.pid}\n")
    assert probe(tmp_path) == "running"
    ending = subprocess.Popen([sys.executable, "-c", standing._END, str(tmp_path / "pid")])
    assert job.wait(30) == -9
    assert ending.wait(30) == 0
    assert probe(tmp_path) == "gone"


@pytest.mark.parametrize(
    "directory", ["/", "/tmp", "/tmp/rollhook-demo-a2", "/a/../rollhook-demo-a1", "", "~"]
)
async def test_what_is_no_directory_of_the_job_is_not_removed(directory: str) -> None:
    handle = Handle("kuberay", "demo-a1", "/runs/demo/attempts/1", {"pod": "head", "scratch": directory})
    with pytest.raises(LauncherError, match="not removed"):
        await standing.cleanup(handle, cast("Port", Refusing()))
