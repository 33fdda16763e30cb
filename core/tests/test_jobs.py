"""Jobs as the core sees them, with a launcher whose scheduler is a list of what to answer."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import Config
from rollhook.errors import LauncherError, RunError, Unsupported
from rollhook.launcher import Handle, Job, JobStatus, Launcher, Plan, Probe
from rollhook.rundir import RunDir
from rollhook.runtime.debug_bundle import masked, write_bundle
from rollhook.runtime.job_records import Record, find_record, next_attempt, read_record, records
from rollhook.runtime.jobs import collect, job_status, prepare, submit_job, wait, watch
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import LauncherPlanContract, MakeLauncher

HANDLE = Handle("scripted", "demo-a1", "/nowhere")


class Scripted(Launcher):
    """Answers in order, the last one again and again; an exception is raised."""

    def __init__(self, answers: Sequence[JobStatus | Exception] = (), **options: Any) -> None:
        super().__init__(Config(), build_context())
        self.answers = list(answers)
        self.log: list[bytes | Exception] = options.get("log", [])
        self.problems: Sequence[str] = options.get("problems", ())
        self.refuses: BaseException | None = options.get("refuses")
        self.shared: bool = options.get("shared", True)
        self.seen_record: bytes | None = None
        self.debugged: Mapping[str, str] | Exception = options.get("debugged", {"view.txt": "fine"})

    @property
    def shares_files(self) -> bool:
        return self.shared

    def plan(self, job: Job) -> Plan:
        from rollhook.job_script import script_files

        return Plan("scripted", job, files=script_files(job))

    async def preflight(self, plan: Plan) -> Sequence[str]:
        return self.problems

    async def submit(self, plan: Plan) -> Handle:
        self.seen_record = (Path(plan.job.directory) / "submit.json").read_bytes()
        if self.refuses is not None:
            raise self.refuses
        return Handle("scripted", plan.job.id, plan.job.directory, {"number": 7})

    async def status(self, handle: Handle) -> JobStatus:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        for data in self.log:
            if isinstance(data, Exception):
                self.log = [each for each in self.log if not isinstance(each, Exception)]
                raise data
            yield data

    async def debug(self, handle: Handle) -> Mapping[str, str]:
        if isinstance(self.debugged, Exception):
            raise self.debugged
        return self.debugged


def said(state: Any, code: int | None = None) -> JobStatus:
    return JobStatus(state, "", code)


def begin(tmp_path: Path) -> tuple[RunDir, Job]:
    run = RunDir.create(tmp_path, "demo", run_id="demo")
    return run, Job("demo", 1, str(run.path / "attempts/1"), "true\n", stopped_code=3)


class TestScripted(LauncherPlanContract):
    @pytest.fixture
    def make_launcher(self) -> MakeLauncher:
        return Scripted


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["pending", "running", "succeeded"], 0),
        (["running", "failed"], 1),
        (["pending", "stopped"], 3),
        (["running", "lost"], 1),
    ],
)
async def test_waiting_gives_the_exit_code_of_how_it_ended(states: list[Any], code: int) -> None:
    launcher = Scripted([said(state) for state in states])
    assert await wait(launcher, HANDLE, poll=0, lost_seconds=0.01) == code


async def test_waiting_too_long_is_told_from_an_end() -> None:
    assert await wait(Scripted([said("running")]), HANDLE, timeout=0.05, poll=0.01) == 124


async def test_a_job_that_is_lost_for_a_moment_is_waited_for() -> None:
    trouble = LauncherError("the scheduler does not answer")
    states = [said("running"), said("lost"), trouble, said("running"), said("lost"), said("succeeded", 0)]
    times = iter(range(0, 1000, 20))
    end = await watch(Scripted(states), HANDLE, poll=0, lost_seconds=60, clock=lambda: next(times))
    assert end.state == "succeeded"


async def test_a_scheduler_that_never_answers_is_said() -> None:
    launcher = Scripted([LauncherError("nobody answers at host:1")])
    with pytest.raises(LauncherError, match="nobody answers"):
        await watch(launcher, HANDLE, poll=0, lost_seconds=0.01)


async def test_states_are_told_as_they_change() -> None:
    told: list[str] = []

    async def changed(status: JobStatus) -> None:
        told.append(status.state)

    states = [said(each) for each in ("pending", "pending", "running", "running", "succeeded")]
    await watch(Scripted(states), HANDLE, poll=0, changed=changed)
    assert told == ["pending", "running", "succeeded"]


async def test_a_log_that_breaks_off_is_taken_up_where_it_was() -> None:
    log: list[bytes | Exception] = [
        b"one\n",
        b"tw",
        LauncherError("the connection was dropped"),
        b"o\nthree\n",
    ]
    launcher = Scripted([*[said("running")] * 20, said("succeeded")], log=log)
    written: list[bytes] = []
    await watch(launcher, HANDLE, follow=written.append, poll=0.001)
    assert b"".join(written) == b"one\ntwo\nthree\n"


async def test_a_log_that_is_not_there_yet_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Later(Scripted):
        async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
            raise LauncherError("no pod yet")
            yield b""

    launcher = Later([*[said("pending")] * 20, said("failed")])
    options: dict[str, Any] = {"poll": 0.001, "timeout": 60, "drain_seconds": 0.1}
    assert (await watch(launcher, HANDLE, follow=lambda data: None, **options)).state == "failed"
    assert caplog.text.count("no pod yet") == 1


async def test_preflight_names_all_problems_before_anything_is_written(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    launcher = Scripted(problems=["there is no queue gpu", "the image is absent"])
    with pytest.raises(LauncherError) as caught:
        await submit_job(launcher, job, run=run)
    assert "no queue gpu" in str(caught.value)
    assert "image is absent" in str(caught.value)
    assert records(run) == []
    assert not Path(job.directory).exists()


async def test_the_record_is_there_before_the_launcher_is_asked(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    launcher = Scripted()
    handle = await submit_job(launcher, job, run=run, keys={"queue": "a"})
    assert launcher.seen_record is not None
    before = json.loads(launcher.seen_record)
    assert (before["handle"], before["error"]) == (None, None)
    assert before["plan_digest"]
    record = find_record(run)
    assert record.handle == handle
    assert (handle.data, handle.stopped_code) == ({"number": 7}, 3)
    assert (record.job_id, record.launcher, record.keys) == ("demo-a1", "scripted", {"queue": "a"})
    assert (Path(job.directory) / "job/entry.sh").read_text() == "true\n"
    (debug,) = (Path(job.directory) / "debug").iterdir()
    assert debug.name.endswith("Z-submitted")
    assert (debug / "view.txt").read_text() == "fine"


async def test_why_a_submission_failed_is_kept(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    launcher = Scripted(refuses=LauncherError("the queue is closed"))
    with pytest.raises(LauncherError, match="queue is closed"):
        await submit_job(launcher, job, run=run)
    record = find_record(run)
    assert (record.handle, record.error) == (None, "the queue is closed")
    status = await job_status(launcher, record)
    assert status.state == "failed"
    assert "the queue is closed" in status.message
    assert next_attempt(run) == 2, "its record would be overwritten"


async def test_of_two_who_submit_an_attempt_at_once_one_does(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    launchers = [Scripted(), Scripted()]
    done = await asyncio.gather(
        *(submit_job(each, job, run=run) for each in launchers), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in done) == ["Handle", "RunError"]
    assert sum(each.seen_record is not None for each in launchers) == 1
    assert find_record(run).handle is not None
    assert not list((run.path / "attempts/1").glob(".*"))


async def test_a_job_whose_record_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = begin(tmp_path)

    def full(*_: Any) -> None:
        raise RunError("no space is left")

    monkeypatch.setattr(Record, "submitted", full)
    with pytest.raises(RunError, match=r"demo-a1 was submitted and goes on.*no space.*'number': 7"):
        await submit_job(Scripted(), job, run=run)
    monkeypatch.setattr(Record, "failed", full)
    with pytest.raises(LauncherError, match="queue is closed"):
        await submit_job(Scripted(refuses=LauncherError("queue is closed")), replace(job, attempt=2), run=run)


async def test_a_submission_that_was_interrupted_is_lost(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    launcher = Scripted(refuses=asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await submit_job(launcher, job, run=run)
    record = find_record(run)
    assert (record.handle, record.error) == (None, None)
    status = await job_status(launcher, record)
    assert status.state == "lost"
    assert "interrupted" in status.message


async def test_attempts_are_counted_over_claims_and_submissions(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    assert next_attempt(run) == 1
    await submit_job(Scripted(), job, run=run)
    assert next_attempt(run) == 2
    assert find_record(run, 1).attempt == 1
    with pytest.raises(RunError, match=r"has no job as attempt 2; its jobs are attempts 1$"):
        find_record(run, 2)


async def test_a_run_without_a_job_says_who_drives_it(tmp_path: Path) -> None:
    run, _ = begin(tmp_path)
    run.claim(interval=0.01).finish("stopped")
    with pytest.raises(RunError, match=r"has no job; it was driven by process \d+"):
        find_record(run)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "submit.json"
    path.write_text("{")
    with pytest.raises(RunError, match="cannot be read as the record of a job"):
        read_record(path)


@pytest.mark.parametrize(
    "change",
    [{"submitted_at": "yesterday"}, {"keys": []}, {"job_id": None}, {"schema": 2}, {"schema": "1"},
     {"handle": {"launcher": "x", "job_id": "y", "directory": 3}}, {"handle": []}],
)  # fmt: skip
async def test_a_record_of_other_types_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    run, job = begin(tmp_path)
    await submit_job(Scripted(), job, run=run)
    path = run.path / "attempts/1/submit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunError, match=r"cannot be read as the record|has schema 2"):
        records(run)


async def test_collecting_never_fails(tmp_path: Path) -> None:
    launcher = Scripted(debugged=ValueError("no such thing"))
    where = await collect(launcher, HANDLE, tmp_path, "asked")
    assert (where / "error.txt").read_text() == "ValueError: no such thing\n"
    (tmp_path / "file").write_text("")
    await collect(Scripted(), HANDLE, tmp_path / "file", "asked")


async def test_files_are_not_delivered_where_they_are_not_seen(tmp_path: Path) -> None:
    run, job = begin(tmp_path)
    await submit_job(Scripted(shared=False), job, run=run)
    assert not (Path(job.directory) / "job").exists()


async def test_a_launcher_that_submits_nothing_says_so() -> None:
    class Bare(Launcher):
        def plan(self, job: Job) -> Plan:
            return Plan("bare", job)

    bare = Bare(Config(), build_context())
    plan = await prepare(bare, Job("demo", 1, "/x", "true"))
    with pytest.raises(Unsupported, match="launcher bare does not submit jobs"):
        await bare.submit(plan)
    with pytest.raises(Unsupported):
        bare.logs(HANDLE)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("API_KEY=abcd1234 rest", "API_KEY=*** rest"),
        ('{"wandb_token": "abcd1234"}', '{"wandb_token": "***"}'),
        ("Authorization: Bearer abcd.efgh-1234", "Authorization: Bearer ***"),
        ("token: env:HF_TOKEN", "token: env:HF_TOKEN"),
        ('"api_key": "env:HF_TOKEN"', '"api_key": "env:HF_TOKEN"'),
        ('X_TOKEN="a b" c', 'X_TOKEN="***" c'),
        ("--api-key=abcd1234", "--api-key=***"),
        ("proxy https://me:pw@host/x", "proxy https://***@host/x"),
        ("API_KEY=$OTHER", "API_KEY=$OTHER"),
        ("'wandb_api_key': None", "'wandb_api_key': None"),
        ("token: null", "token: null"),
        ("export PASSWORD=hunter2x", "export PASSWORD=***"),
        ("a value s3cr3t-value here", "a value *** here"),
        ("tokens: 15, max_tokens=20", "tokens: 15, max_tokens=20"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, left: str) -> None:
    assert masked(text, ["s3cr3t-value"]) == left


async def test_a_bundle_has_what_helps_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUNDLE_SECRET_HERE", "sentinel-4410aa")
    run, job = begin(tmp_path)
    job = Job(
        **{**job.__dict__, "secrets": {"KEY": "env:BUNDLE_SECRET_HERE"}, "probes": [Probe("p", "true")]}
    )
    await submit_job(Scripted(), job, run=run, keys={"secrets": {"KEY": "env:BUNDLE_SECRET_HERE"}})
    directory = Path(job.directory)
    (directory / "logs").mkdir()
    (directory / "logs/driver.log").write_text("the key is sentinel-4410aa, and MY_TOKEN=abcdef12\n" * 2)
    (run.path / "episodes/part.jsonl").write_text("a user's text\n")
    (tmp_path / "elsewhere").write_text("sentinel of another file\n")
    (directory / "logs/link").symlink_to(tmp_path / "elsewhere")
    target = tmp_path / "bundle.tar.gz"
    names = write_bundle(run, target)
    assert {
        "about.json",
        "attempts/1/submit.json",
        "attempts/1/logs/driver.log",
        "attempts/1/job/job.sh",
    } <= {*names}
    with tarfile.open(target) as archive:
        texts = {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    assert set(texts) == {f"demo/{name}" for name in names}
    assert "the key is ***, and MY_TOKEN=***" in texts["demo/attempts/1/logs/driver.log"]
    assert not [name for name, text in texts.items() if "sentinel" in text or "user's" in text]
    assert json.loads(texts["demo/about.json"])["run_id"] == "demo"


async def test_watching_can_be_cancelled_while_a_log_is_followed() -> None:
    launcher = Scripted([said("running")], log=[b"x"])
    task = asyncio.create_task(watch(launcher, HANDLE, follow=lambda data: None, poll=0.01))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
