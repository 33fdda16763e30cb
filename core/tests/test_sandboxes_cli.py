"""`rollhook sandboxes`: seen through the command line, with a backend installed as a stranger's would be."""

import asyncio
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.cli.main import main
from rollhook.rundir import RunDir
from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.pool import SandboxPool
from rollhook.testing.distributions import write_distribution

MODULE = """
    from rollhook import Component, Config, hookimpl
    from rollhook.testing.scripted import ScriptedBackend

    live = {}

    class Remembering(ScriptedBackend):
        def __init__(self, config, context):
            super().__init__()
            self.live = live

    @hookimpl
    def rollhook_sandboxes():
        return [Component("remembering", Config, "remembering_sandboxes:Remembering", "for a test")]
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


def leave_one(run: RunDir, *, status: Any = "failed") -> str:
    """Leave a sandbox behind in an attempt that ended so (None: it goes on)."""
    import remembering_sandboxes  # type: ignore[import-not-found]

    attempt = run.claim()

    async def acquire() -> str:
        backend = remembering_sandboxes.Remembering(None, None)
        pool = SandboxPool(backend, run_id=run.run_id, attempt=attempt.number, journal=attempt.journal)
        sandbox = await pool.acquire(SandboxSpec(lifetime_seconds=1000.0), episode_id="e1")
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
    assert "1 sandboxes; 0 open leases have none" in err
    rollhook("sandboxes", "list", "demo", "--json")
    (row,) = json.loads(capsys.readouterr().out)["sandboxes"]
    assert row["sandbox"]["id"] == sandbox
    assert (row["lease"]["episode"], row["reap"]) == ("e1", True)


def test_reap_deletes_what_has_ended(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", "demo", "--json")
    assert json.loads(capsys.readouterr().out)["deleted"] == {sandbox: "its attempt ended (failed)"}
    rollhook("sandboxes", "list", "--json")
    listed = json.loads(capsys.readouterr().out)
    assert listed["sandboxes"] == []
    assert len(listed["open_leases_without_a_sandbox"]) == 1


def test_a_backend_can_be_asked_without_a_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = leave_one(run)
    rollhook("sandboxes", "reap", "--backend", "remembering")
    assert f"deleted  {sandbox}" in capsys.readouterr().out


def test_an_unknown_run_and_no_runs_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    rollhook("sandboxes", "reap", "absent", code=1)
    assert "there is no run 'absent' on this machine" in capsys.readouterr().err
    rollhook("sandboxes", "list")
    assert "0 sandboxes" in capsys.readouterr().err
