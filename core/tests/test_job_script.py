from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import UsageError
from rollhook.job_script import (
    EXIT_CODE,
    LOG,
    ended_state,
    read_exit_code,
    script_files,
    signalled,
)
from rollhook.launcher import Code, Job, Probe
from rollhook.testing.ray_cluster import processes_below

SENTINEL = "sentinel-91c4f7-do-not-print"


class Site:
    """Where a job's files are and its script is run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: list[subprocess.Popen[bytes]] = []

    def job(self, script: str, **options: Any) -> Job:
        return Job("demo-0a1b2c", 1, str(self.directory), script, **options)

    def start(self, job: Job, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        for name, text in script_files(job).items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        child = subprocess.Popen(
            ["bash", str(self.directory / "job/job.sh")],
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        self.children.append(child)
        return child

    def run(self, job: Job, env: dict[str, str] | None = None) -> tuple[int, str]:
        child = self.start(job, env)
        output, _ = child.communicate(timeout=60)
        return child.returncode, output.decode()

    @property
    def log(self) -> str:
        path = self.directory / LOG
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Site]:
    made = Site(directory)
    yield made
    for child in made.children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture(params=["plain", 'it\'s "a b" $HOME'])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with opened(tmp_path / request.param / "attempts/1") as made:
        yield made


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Site]:
    with opened(tmp_path / "attempts/1") as made:
        yield made


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.02)


def test_a_job_runs_where_it_is_told_with_its_variables_and_files(site: Site) -> None:
    job = site.job(
        'cat "$ROLLHOOK_JOB_FILES/a.txt"; echo "$GREETING|$ROLLHOOK_RUN_ID|$ROLLHOOK_ATTEMPT"\n'
        'echo "$ROLLHOOK_JOB_DIR"',
        env={"GREETING": 'it\'s "$HOME"\nthere'},
        files={"a.txt": "delivered\n"},
    )
    code, output = site.run(job)
    assert code == 0
    assert output == f'delivered\nit\'s "$HOME"\nthere|demo-0a1b2c|1\n{site.directory}\n'
    assert site.log == output
    assert read_exit_code(site.directory) == 0
    assert signalled(site.directory) == ""


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 7", 7), ("set -e\nfalse\necho never", 1), ("kill -9 $$", 137), ("true", 0), ("nonsuch", 127)],
)
def test_the_exit_code_is_kept(plain: Site, script: str, code: int) -> None:
    returned, _ = plain.run(plain.job(script))
    assert (returned, read_exit_code(plain.directory)) == (code, code)
    assert "never" not in plain.log


def test_the_log_is_whole_when_the_exit_code_is_there(plain: Site) -> None:
    child = plain.start(plain.job("for i in $(seq 20000); do echo line $i; done; echo late >&2; exit 4"))
    assert child.stdout is not None
    child.stdout.close()  # who reads the output has gone: the job goes on
    until(lambda: read_exit_code(plain.directory) is not None)
    lines = plain.log.splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {i}" for i in range(1, 20001)]
    assert "late" in lines
    assert child.wait(10) == 4


def test_what_an_earlier_try_left_is_not_taken_for_this_ones(plain: Site) -> None:
    plain.run(plain.job("echo first; exit 9"))
    (plain.directory / "signalled").write_text("INT\n")
    child = plain.start(plain.job("echo second; read -r < fifo || sleep 60"))
    until(lambda: "second" in plain.log)
    assert read_exit_code(plain.directory) is None
    assert signalled(plain.directory) == ""
    assert plain.log.startswith("first\n")
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) != 0


@pytest.mark.parametrize(
    ("sent", "received"), [(signal.SIGINT, "INT"), (signal.SIGUSR1, "INT"), (signal.SIGTERM, "TERM")]
)
def test_a_signal_reaches_all_of_the_job_which_may_drain(
    plain: Site, sent: signal.Signals, received: str
) -> None:
    script = """
trap 'echo "shell got INT"; code=3' INT; trap 'echo "shell got TERM"; code=3' TERM
python3 -c '
import signal, sys, time
def got(number, frame):
    print("program got", signal.Signals(number).name, flush=True)
    time.sleep(0.5)
    print("drained", flush=True)
    sys.exit(3)
for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, got)
print("ready", flush=True)
while True: time.sleep(60)'
code=$?
exit $code
"""
    child = plain.start(plain.job(script, stopped_code=3))
    until(lambda: "ready" in plain.log)
    child.send_signal(sent)
    assert child.wait(20) == 3
    assert f"program got SIG{received}" in plain.log
    assert f"shell got {received}" in plain.log
    assert "drained" in plain.log
    assert read_exit_code(plain.directory) == 3
    assert signalled(plain.directory) == sent.name.removeprefix("SIG")


def test_a_job_whose_scheduler_tells_every_process_is_told_once(plain: Site) -> None:
    script = """exec python3 -c '
import signal, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.05)
time.sleep(0.5)
print("told", len(told), flush=True)'"""
    child = plain.start(plain.job(script), {"ROLLHOOK_TELLS_ALL": "1"})
    until(lambda: "ready" in plain.log)
    for each in set(processes_below(child.pid)) - {child.pid}:  # as Ray's stop does, though not so slowly
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGINT)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(20) == 0
    assert "told 1\n" in plain.log
    assert signalled(plain.directory) == "INT"


def test_a_signal_sent_to_the_whole_group_costs_no_line_of_the_log(plain: Site) -> None:
    script = "trap 'echo drained; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    child = plain.start(plain.job(script))
    until(lambda: "ready" in plain.log)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(20) == 3
    assert "drained" in plain.log


def test_a_job_that_was_started_with_interrupts_ignored_can_be_interrupted(plain: Site) -> None:
    script = "trap 'echo drained; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    child = plain.start(plain.job(script), preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
    until(lambda: "ready" in plain.log)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 3


def test_a_job_that_does_not_stop_is_ended_after_its_grace(plain: Site) -> None:
    script = "trap '' INT\npython3 -c '\nimport time\nprint(\"ready\", flush=True)\ntime.sleep(600)'\n"
    child = plain.start(plain.job(script, stop_grace_seconds=0.5))
    until(lambda: "ready" in plain.log)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 143
    assert read_exit_code(plain.directory) == 143


def test_what_a_job_leaves_running_ends_with_it(plain: Site) -> None:
    code, _ = plain.run(plain.job("sleep 600 & echo pid $!"))
    pid = int(plain.log.split()[-1])
    assert code == 0
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_stop_during_a_probe_starts_nothing_more(plain: Site) -> None:
    job = plain.job("echo never", probes=[Probe("slow", "echo probing; sleep 600")])
    child = plain.start(job)
    until(lambda: "probing" in plain.log)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) != 0
    assert "never" not in plain.log
    assert read_exit_code(plain.directory) not in (None, 0)


def test_a_probe_that_fails_fails_the_job_with_its_output(plain: Site) -> None:
    probes = [Probe("good", "echo fine"), Probe("it's bad", "echo 'no disk'; exit 5"), Probe("x", "echo x")]
    code, output = plain.run(plain.job("echo never", probes=probes))
    assert code == 1
    assert "fine" in output
    assert "no disk" in output
    assert "the probe it's bad failed" in output
    assert "never" not in output
    assert read_exit_code(plain.directory) == 1


def test_the_setup_changes_the_environment_of_probes_and_script(plain: Site) -> None:
    job = plain.job('echo "[$FOUND]"', setup="export FOUND=x$UNSET", probes=[Probe("p", 'echo "{$FOUND}"')])
    code, output = plain.run(job)
    assert code == 0
    assert "[x]" in output
    assert "{x}" in output


@pytest.mark.parametrize(
    ("env", "setup"),
    [
        ({"told": "INT", "child": "999999", "tee": "1", "doing": "x", "all": "1", "i": "50"}, ""),
        ({}, "run() { echo mine; }\nfail() { :; }\nfinish() { :; }\ntell() { :; }\nchild=1 told=INT"),
        ({}, "trap 'echo bye' EXIT\ntrap '' TERM INT"),
    ],
)
def test_names_of_the_environment_and_the_setup_are_not_the_scripts(
    plain: Site, env: dict[str, str], setup: str
) -> None:
    code, output = plain.run(plain.job("echo the job; exit 4", env=env, setup=setup))
    assert code == 4
    assert "the job\n" in output
    assert read_exit_code(plain.directory) == 4


def test_a_variable_of_the_job_ends_no_foreign_process(plain: Site) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert plain.run(plain.job("true", env={"watchdog": str(stranger.pid)}))[0] == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_setup_that_fails_fails_the_job(plain: Site) -> None:
    code, output = plain.run(plain.job("echo never", setup="echo preparing\n( exit 6 )\necho on"))
    assert code == 6
    assert "the job ended in its setup, with exit code 6" in output
    assert "never" not in output
    assert "on\n" not in output.replace("preparing", "")
    assert read_exit_code(plain.directory) == 6


def test_code_by_path_goes_before_what_is_there(plain: Site) -> None:
    job = plain.job('echo "$PYTHONPATH"', code=Code("path", "/shared/my code"), env={"PYTHONPATH": "/old"})
    assert plain.run(job)[1] == "/shared/my code:/old\n"
    job = replace(job, env={})
    assert plain.run(job)[1] == "/shared/my code\n"


def test_secrets_reach_the_script_and_no_file(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "it's a key"
    key.write_text(f"{SENTINEL}-file\n")
    job = site.job(
        'for value in "$A" "$B"; do printf %s "$value" | sha256sum; done; env | grep -c "^[AB]="',
        secrets={"A": "env:SITE_A", "B": f"file:{key}"},
    )
    code, output = site.run(job, {"SITE_A": f"{SENTINEL}-env"})
    digests = [hashlib.sha256(f"{SENTINEL}-{kind}".encode()).hexdigest() for kind in ("env", "file")]
    assert (code, output.split()) == (0, [digests[0], "-", digests[1], "-", "2"])
    for path in site.directory.rglob("*"):
        assert path.is_dir() or SENTINEL not in path.read_text(), path


@pytest.mark.parametrize("reference", ["env:NOT_THERE", "file:/nonexistent/it's", "file:empty", "k8s:a/b"])
def test_a_secret_that_is_absent_fails_the_job_and_is_named(
    plain: Site, tmp_path: Path, reference: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    reference = reference.replace("empty", str(tmp_path / "empty"))
    code, output = plain.run(plain.job("echo never", secrets={"KEY": reference}))
    assert code == 1
    assert f"the secret {reference} of KEY is not there" in output
    assert "never" not in output


def test_a_secret_file_below_the_home_is_found(plain: Site, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    job = plain.job('[ "$KEY" = t0ken ] && echo same', secrets={"KEY": "file:~/token"})
    assert plain.run(job, {"HOME": str(tmp_path)}) == (0, "same\n")


def test_a_directory_that_cannot_be_written_is_named(plain: Site) -> None:
    plain.directory.parent.mkdir(parents=True)
    child = plain.start(plain.job("true"))
    child.wait()
    elsewhere = plain.directory.parent / "file"
    elsewhere.write_text("")
    code, output = plain.run(plain.job("echo never"), {"ROLLHOOK_JOB_DIR": str(elsewhere)})
    assert code == 1
    assert f"{elsewhere} cannot be written" in output


def test_a_variable_must_have_the_name_of_one() -> None:
    with pytest.raises(UsageError, match="'A-B' is no name"):
        script_files(Job("demo", 1, "/x", "true", env={"A-B": "1"}))


@pytest.mark.parametrize(
    ("code", "stopped_code", "asked", "state"),
    [
        (0, None, False, "succeeded"),
        (0, None, True, "stopped"),
        (143, None, True, "stopped"),
        (143, None, False, "failed"),
        (3, 3, False, "stopped"),
        (0, 3, True, "succeeded"),
        (1, 3, True, "failed"),
        (137, 3, True, "stopped"),
    ],
)
def test_a_stopped_job_is_no_success_and_a_failed_one_not_stopped(
    code: int, stopped_code: int | None, asked: bool, state: str
) -> None:
    assert ended_state(code, stopped_code=stopped_code, asked=asked) == state


def test_the_script_is_the_same_each_time_and_is_bash(plain: Site) -> None:
    job = plain.job("exit 0", probes=[Probe("a", "b")], setup="true", secrets={"A": "env:B"})
    assert script_files(job) == script_files(job)
    text = script_files(job)["job/job.sh"]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert EXIT_CODE in text
