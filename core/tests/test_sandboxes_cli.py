"""`rollhook sandboxes`: seen through the command line, with a backend installed as a stranger's would be."""

import asyncio
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook import journal
from rollhook.cli.main import main
from rollhook.rundir import RunDir
from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.lease import Lease, leases
from rollhook.sandbox.pool import SandboxPool
from rollhook.testing.distributions import write_distribution

MODULE = """
    from rollhook import Component, Config, hookimpl
    from rollhook.testing.scripted import ScriptedBackend

    live = {}

    class RememberingConfig(Config):
        note: int = 0

    class Remembering(ScriptedBackend):
        gaps = {"test_a_pipe_stays_open": "the service closes it"}

        def __init__(self, config, context):
            super().__init__()
            self.live = live
            self.note = getattr(config, "note", 0)

        async def list(self, labels):
            if self.note == 13:
                raise ConnectionResetError("the line is down")
            return await super().list(labels)

        def price_per_second(self, spec):
            return spec.cpus

    @hookimpl
    def rollhook_sandboxes():
        return [Component("remembering", RememberingConfig, "remembering_sandboxes:Remembering", "a test")]
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    write_distribution(
        site,
        "remembering-sandboxes",
        entry_points={"sandbox.remembering": "remembering_sandboxes"},
        modules={"remembering_sandboxes": textwrap.dedent(MODULE)},
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("remembering_sandboxes", None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "runs", "demo", run_id="demo")
    run.lock_path.write_text("name: demo\nsandbox: remembering\n")
    return run


def leave_one(run: RunDir, *, status: Any = "failed", episode: str = "e1", cpus: float | None = None) -> str:
    """Leave a sandbox behind in an attempt that ended so (None: it goes on)."""
    import remembering_sandboxes  # type: ignore[import-not-found]

    attempt = run.claim()

    async def acquire() -> str:
        backend = remembering_sandboxes.Remembering(None, None)
        pool = SandboxPool(backend, run_id=run.run_id, attempt=attempt.number, journal=attempt.journal)
        sandbox = await pool.acquire(SandboxSpec(lifetime_seconds=1000.0, cpus=cpus), episode_id=episode)
        await attempt.journal.commit()
        return sandbox.id

    made = asyncio.run(acquire())
    if status is not None:
        attempt.finish(status)
    return made


def rollhook(*argv: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code


def test_list_says_whose_each_is_and_whether_it_may_go(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "list")
    out, err = capsys.readouterr()
    assert f"remembering  {sandbox}" in out
    assert "demo/1" in out
    assert "yes: its attempt ended (failed)" in out
    assert err == "1 sandboxes\n"
    rollhook("sandboxes", "list", "demo", "--json")
    (row,) = json.loads(capsys.readouterr().out)["sandboxes"]
    assert row["sandbox"]["id"] == sandbox
    assert (row["lease"]["episode"], row["reap"]) == ("e1", True)


def test_show_says_what_a_backend_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    rollhook("show", "sandbox.remembering")
    assert "  cannot:\n    a_pipe_stays_open  the service closes it\n" in capsys.readouterr().out


def test_list_tells_what_they_cost_as_far_as_it_is_known(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_one(run, cpus=2.0)
    leave_one(run)
    for attempt in (1, 2):
        age(run.path / "attempts" / str(attempt) / "journal.jsonl", 100.0)
    rollhook("sandboxes", "list", "--json")
    priced, unpriced = json.loads(capsys.readouterr().out)["sandboxes"]
    assert priced["cost"] == pytest.approx(200.0, abs=20.0)
    assert unpriced["cost"] is None
    rollhook("sandboxes", "list")
    out, err = capsys.readouterr()
    assert [line.split()[6] == "-" for line in out.splitlines()[1:]] == [False, True]
    assert "2 sandboxes, cost so far 20" in err
    assert "7200 an hour, without 1 of unknown price" in err


def test_what_two_backends_reach_is_listed_once(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = leave_one(run)
    other = RunDir.create(tmp_path / "runs", "other", run_id="other")
    other.lock_path.write_text("name: other\nsandbox: {use: remembering, note: 1}\n")
    rollhook("sandboxes", "list")
    assert capsys.readouterr().out.count(sandbox) == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [("remembered", "remembered could not be asked: "), ("{use: remembering, note: 13}", "the line is down")],
)
def test_a_backend_that_cannot_be_asked_does_not_stop_the_others(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str, said: str
) -> None:
    # its run comes first
    RunDir.create(tmp_path / "runs", "absent", run_id="absent").lock_path.write_text(
        f"name: absent\nsandbox: {other}\n"
    )
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", code=1)
    out, err = capsys.readouterr()
    assert sandbox in out
    assert said in err


def test_reap_deletes_what_has_ended(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", "demo", "--json")
    assert json.loads(capsys.readouterr().out)["deleted"] == {sandbox: "its attempt ended (failed)"}
    rollhook("sandboxes", "list", "--json")
    listed = json.loads(capsys.readouterr().out)
    assert listed["sandboxes"] == []
    (lease,) = listed["open_leases_without_a_sandbox"]
    assert (lease["run_id"], lease["episode"], lease["sandbox_id"]) == ("demo", "e1", sandbox)
    rollhook("sandboxes", "list")
    assert capsys.readouterr().err == (
        "0 sandboxes\n1 leases were left open by attempts that are over; their sandboxes are gone, "
        "so nothing is left to delete\n"
    )


def test_a_lease_of_a_live_attempt_without_a_sandbox_is_under_way(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = run.claim()
    lease = Lease.new(run_id="demo", attempt=1, now=0.0, lifetime=None)
    attempt.journal.append("lease", **lease.data())
    attempt.journal.flush()
    rollhook("sandboxes", "list")
    assert "1 open leases have no sandbox now: it is being made or deleted" in capsys.readouterr().err
    attempt.finish("stopped")


def ids(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [row["sandbox"]["id"] for row in json.loads(capsys.readouterr().out)["sandboxes"]]


def age(path: Path, seconds: float) -> None:
    """Let a journal's entries be older."""
    entries = [dataclasses.replace(entry, time=entry.time - seconds) for entry in journal.read(path)]
    path.write_bytes(b"".join(map(journal.encode, entries)))


def test_they_are_chosen_by_lease_label_and_age(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    old = leave_one(run)
    age(run.attempts()[0].journal_path, 7200.0)
    new = leave_one(run, episode="e2")
    rollhook("sandboxes", "list", "--json")
    assert sorted(ids(capsys)) == sorted([old, new])
    rollhook("sandboxes", "list", "--older-than", "1.5h", "--json")
    assert ids(capsys) == [old]
    for wrong in ("2", "2 h", "h", "-1h"):
        rollhook("sandboxes", "list", f"--older-than={wrong}", code=2)
    assert "write a number with its unit, e.g. 90s" in capsys.readouterr().err
    rollhook("sandboxes", "list", "--label", "rollhook.episode=e2", "--label", "rollhook.attempt=2", "--json")
    assert ids(capsys) == [new]
    rollhook("sandboxes", "list", "--label", "nothing", code=2)
    assert "--label nothing: write KEY=VALUE" in capsys.readouterr().err
    nonce = next(iter(leases(journal.read(run.attempts()[0].journal_path))))
    rollhook("sandboxes", "reap", "--lease", nonce)
    assert capsys.readouterr().out.startswith(f"deleted  {old}")
    rollhook("sandboxes", "list", "--json")
    assert ids(capsys) == [new]


def test_a_dry_run_deletes_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", "--dry-run")
    out, err = capsys.readouterr()
    assert out == f"would be deleted  {sandbox}  its attempt ended (failed)\n"
    assert err == "1 would be deleted, 0 kept, 0 failed\n"
    rollhook("sandboxes", "reap", "--dry-run", "--json")
    assert json.loads(capsys.readouterr().out)["would_be_deleted"].keys() == {sandbox}
    rollhook("sandboxes", "list", "--json")
    assert ids(capsys) == [sandbox]


def test_a_backend_can_be_asked_without_a_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", "--backend", "remembering")
    assert f"deleted  {sandbox}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--backend", "remembering", "--set", "warm=-1"],
            "sandbox.warm: -1 should be greater than or equal",
        ),
        (["--backend", "remembering", "--set", "create_rate=x"], "sandbox.create_rate: 'x' is not a mapping"),
        (["--set", "warm=1"], "--set warm=1: is a key of --backend, which is not given"),
        (["--lease", ""], "--lease is empty"),
        (["--label", "=x"], "--label =x: write KEY=VALUE"),
    ],
)
def test_what_is_asked_wrongly_is_told(
    run: RunDir, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", *options, code=2)
    assert said in capsys.readouterr().err
    rollhook("sandboxes", "list")
    assert sandbox in capsys.readouterr().out


def test_an_unknown_run_and_no_runs_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    rollhook("sandboxes", "reap", "absent", code=1)
    assert "there is no run 'absent' on this machine" in capsys.readouterr().err
    rollhook("sandboxes", "list")
    assert "0 sandboxes" in capsys.readouterr().err
