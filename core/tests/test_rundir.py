"""Run directories: ids, attempts that exclude each other, heartbeats, the index."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook import rundir
from rollhook.errors import RunError
from rollhook.heartbeat import Heartbeat, moving, read_counter
from rollhook.rundir import RunDir, check_free


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Time:
    """A clock that passes only while somebody sleeps; `during` happens in each sleep."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.during = during

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


def silent_attempt(run: RunDir, number: int = 1, **owner: object) -> Path:
    """An attempt that was claimed elsewhere and left no word."""
    path = run.path / "attempts" / str(number)
    path.mkdir()
    (path / "owner.json").write_text(json.dumps({"host": "elsewhere", "pid": 7, "boot": "other", **owner}))
    (path / "heartbeat").write_text("00000000000000000041\n")
    return path


@settings(deadline=None)
@given(st.text(max_size=80))
def test_a_new_run_id_always_fits_the_rule(name: str) -> None:
    assert rundir.RUN_ID.fullmatch(rundir.new_run_id(name))


def test_run_ids_are_unique_and_start_with_the_name() -> None:
    ids = {rundir.new_run_id("glm5.2-tbench2-daytona") for _ in range(50)}
    assert len(ids) > 45
    assert all(re.fullmatch(r"glm5-2-tbench2-daytona-[0-9a-f]{6}", run_id) for run_id in ids)


@pytest.mark.parametrize("run_id", ["", "A", "1a", "a-", "a_b", "a" * 41, "../x", "a\n"])
def test_a_malformed_run_id_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunError, match="is no run id"):
        RunDir.create(tmp_path, "demo", run_id=run_id)


def test_a_run_id_never_starts_a_second_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "one", "demo", run_id="demo")
    with pytest.raises(RunError, match=r"run demo exists at.*; choose another id"):
        RunDir.create(tmp_path / "one", "demo", run_id="demo")
    with pytest.raises(RunError, match=f"run demo exists at {tmp_path}/one/demo"):
        RunDir.create(tmp_path / "two", "demo", run_id="demo")


def test_an_id_can_be_checked_before_there_is_a_run(tmp_path: Path) -> None:
    assert check_free(tmp_path, "mine") == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()
    RunDir.create(tmp_path, "name", run_id="mine")
    for root in (tmp_path, tmp_path / "elsewhere"):
        with pytest.raises(RunError, match=r"run mine exists at .*; choose another id"):
            check_free(root, "mine")
    with pytest.raises(RunError, match="is no run id"):
        check_free(tmp_path, "../x")


def test_a_run_is_found_by_id_and_by_path(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "demo")
    assert RunDir.find(run.run_id).path == run.path
    assert RunDir.find(run.path).run_id == run.run_id
    assert RunDir.find(str(run.path)).run_id == run.run_id
    assert list(rundir.index()) == [run.run_id]


def test_a_directory_of_the_same_name_does_not_hide_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "elsewhere", "demo", run_id="demo")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert RunDir.find("demo").path == run.path
    monkeypatch.chdir(run.path.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert RunDir.find("demo").path == run.path


def test_an_unknown_run_names_the_nearest(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", run_id="quickstart-abc123")
    with pytest.raises(RunError, match=r"no run 'quickstrat-abc123' .*did you mean 'quickstart-abc123'"):
        RunDir.find("quickstrat-abc123")
    with pytest.raises(RunError, match="not the directory of a run"):
        RunDir.find(tmp_path)


def test_a_run_without_an_index_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = RunDir.create(tmp_path, "demo")
    assert RunDir.find(run.path).path == run.path


def test_attempts_count_up_and_keep_their_own_files(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    first = run.claim()
    assert (first.number, first.path) == (1, run.path / "attempts" / "1")
    assert read_counter(first.path / "heartbeat") == 1
    first.journal.append("hello")
    first.finish("failed")
    first.finish("failed")
    second = run.claim()
    second.finish("succeeded")
    assert [(a.number, a.status) for a in run.attempts()] == [(1, "failed"), (2, "succeeded")]
    newest = run.newest_attempt()
    assert newest is not None
    assert newest.owner["pid"] == os.getpid()
    assert json.loads((first.path / "journal.jsonl").read_text().splitlines()[0])["data"] == {
        "schema": 1,
        "run_id": run.run_id,
        "attempt": 1,
    }


def test_a_second_driver_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    attempt = run.claim(interval=0.05)
    with pytest.raises(RunError, match=r"attempt 1 by process \d+ on .* is alive"):
        RunDir.find(run.path).claim()
    attempt.finish("stopped")


def test_a_live_driver_elsewhere_is_seen_by_its_counter(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    beat = silent_attempt(run) / "heartbeat"

    def later() -> None:
        if time.now > 15:
            beat.write_text("00000000000000000042\n")

    time = Time(later)
    with pytest.raises(RunError, match="attempt 1 by process 7 on elsewhere is alive"):
        run.claim(clock=time.clock, sleep=time.sleep)
    assert 15 < time.now < 16


def test_a_silent_driver_elsewhere_is_succeeded_once_its_counter_stood_still(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    silent_attempt(run)
    time = Time()
    attempt = run.claim(clock=time.clock, sleep=time.sleep)
    assert attempt.number == 2
    assert time.now >= 20
    attempt.finish("stopped")


def test_the_wall_clock_has_no_say(tmp_path: Path) -> None:
    """A heartbeat file that looks hours old is alive as long as it moves."""
    run = RunDir.create(tmp_path, "demo")
    beat = silent_attempt(run) / "heartbeat"

    def tick() -> None:
        beat.write_text("00000000000000000042\n")
        os.utime(beat, (1, 1))

    time = Time(tick)
    assert moving([beat], clock=time.clock, sleep=time.sleep)


def test_a_dead_process_of_this_machine_needs_no_wait(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    code = (
        "import sys, os; from pathlib import Path; from rollhook.rundir import RunDir\n"
        "RunDir.find(Path(sys.argv[1])).claim(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run.path)], check=False).returncode == 9

    def no_wait(seconds: float) -> None:
        raise AssertionError("waited")

    attempt = run.claim(sleep=no_wait)
    assert attempt.number == 2
    attempt.finish("stopped")


def test_a_crash_while_claiming_does_not_block_the_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    (run.path / "attempts" / "1").mkdir()
    assert run.newest_attempt() is None
    (run.path / "attempts" / "1" / "owner.json").write_text("")
    time = Time()
    attempt = run.claim(clock=time.clock, sleep=time.sleep)
    assert attempt.number == 2
    attempt.finish("stopped")


def submitted(run: RunDir, number: int) -> Path:
    """An attempt that was submitted as a job, and whose script has begun; no driver has claimed it."""
    path = run.path / "attempts" / str(number)
    (path / "logs").mkdir(parents=True)
    (path / "submit.json").write_text("{}")
    return path


def test_a_driver_claims_the_attempt_as_which_it_was_submitted(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    path = submitted(run, 1)
    assert (run.newest_attempt(), run.attempts(), run.waiting()) == (None, [], [1])
    attempt = run.claim(number=1)
    assert (attempt.number, attempt.path, run.waiting()) == (1, path, [])
    attempt.finish("failed")


def test_a_job_that_is_queued_again_takes_a_number_that_nobody_else_was_given(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    submitted(run, 1)
    run.claim(number=1).finish("stopped")
    submitted(run, 2)  # by somebody who was faster
    again = run.claim(number=1)
    assert (again.number, run.waiting()) == (3, [])
    again.finish("stopped")
    late = run.claim(number=2)
    assert late.number == 4
    late.finish("stopped")
    assert [each.number for each in run.attempts()] == [1, 3, 4]


def test_a_driver_of_its_own_leaves_submitted_attempts_alone(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    submitted(run, 1)
    attempt = run.claim()
    assert attempt.number == 2
    with pytest.raises(RunError, match="is being driven: attempt 2"):
        run.claim(number=1)
    attempt.finish("stopped")


def test_a_driver_makes_the_run_that_its_submitter_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "far-away"
    (path / "attempts" / "1" / "logs").mkdir(parents=True)
    run = RunDir.settle(path, "demo")
    assert RunDir.find("far-away").path == path
    assert run.checkpoints.is_dir()
    assert RunDir.settle(path, "demo").claim(number=1).finish("stopped") is None
    with pytest.raises(RunError, match="is no run id"):
        RunDir.settle(tmp_path / "Not One", "demo")


def test_of_two_claims_at_once_one_wins(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    silent_attempt(run)
    others: list[rundir.Attempt] = []

    def rival() -> None:
        if not others:
            quick = Time()
            others.append(RunDir.find(run.path).claim(clock=quick.clock, sleep=quick.sleep))

    time = Time(rival)
    with pytest.raises(RunError, match="another driver has just claimed attempt 2"):
        run.claim(clock=time.clock, sleep=time.sleep)
    assert others[0].number == 2
    others[0].finish("stopped")


async def test_a_driver_that_was_succeeded_writes_nothing_more(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo")
    old = run.claim()
    await old.journal.append_durable("mine")
    before = (old.path / "journal.jsonl").read_bytes()
    silent_attempt(run, 2)
    with pytest.raises(RunError, match=r"attempt 2 of .* was started by process 7 on elsewhere"):
        old.assert_newest()
    with pytest.raises(RunError, match="attempt 1 stops here and writes nothing more"):
        await old.journal.append_durable("too late")
    with pytest.raises(RunError):
        old.finish("succeeded")
    assert (old.path / "journal.jsonl").read_bytes() == before
    assert not (old.path / "status.json").exists()


def test_a_read_only_directory_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be written: .*then run again"):
        RunDir.create(tmp_path / "file" / "runs", "demo")


def test_a_heartbeat_beats_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat", interval=0.01)
    heartbeat.start()
    assert moving([tmp_path / "heartbeat"], sleep=lambda _: None)
    heartbeat.stop()
    heartbeat.stop()
    count = read_counter(tmp_path / "heartbeat")
    time = Time()
    assert not moving([tmp_path / "heartbeat"], clock=time.clock, sleep=time.sleep)
    assert read_counter(tmp_path / "heartbeat") == count
    lost = Heartbeat(tmp_path / "absent" / "heartbeat")
    lost.beat()
    lost.beat()
    assert caplog.text.count("the heartbeat cannot be written") == 1


def test_only_the_verb_that_began_a_run_goes_on_with_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo", run_id="demo")
    run.claim("eval").finish("stopped")
    with pytest.raises(RunError, match="run demo is one of `rollhook eval`, so `rollhook run` cannot go on"):
        run.claim()
    assert [attempt.verb for attempt in run.attempts()] == ["eval"]
    assert run.claim("eval").number == 2
