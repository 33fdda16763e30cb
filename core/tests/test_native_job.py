"""From a recipe to a job: what it is made of, where the submitter's half is, and going on with it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollhook.cli.main import main
from rollhook.errors import LauncherError, RunError
from rollhook.recipe.check import compose
from rollhook.recipe.load import read_recipe
from rollhook.rundir import RunDir, index_directory
from rollhook.runtime.job_records import find_record, records
from rollhook.runtime.native_job import Native, plan_of, submit_new, submit_resumed

FAR = ["launcher={use: afar, nodes: 2, gpus_per_node: 4, env: {A: b}, secrets: {KEY: 'env:THERE'}}"]
FAR += ["+storage.root=/shared/runs"]


def native(*overrides: str) -> Native:
    return Native.of(*compose("base.yaml", [*(overrides or FAR)], site="none"))


def afar() -> Any:
    return sys.modules["rollhook_toy"].Afar


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_job_is_the_driver_beside_the_lock(toys: Path) -> None:
    job = native().job("demo", 3)
    assert job.directory == "/shared/runs/demo/attempts/3"
    assert (
        job.script == 'exec rollhook drive "$ROLLHOOK_JOB_FILES/recipe.lock.yaml" --into /shared/runs/demo\n'
    )
    assert (job.id, job.stop_signal, job.stopped_code) == ("demo-a3", "INT", 3)
    assert (job.env, job.secrets) == ({"A": "b"}, {"KEY": "env:THERE"})
    assert (job.resources.nodes, job.resources.gpus_per_node) == (2, 4)
    assert "env:THERE" in job.references
    assert "--site here --strict" in job.probes[0].script
    (toys / "lock.yaml").write_text(job.files["recipe.lock.yaml"])
    assert read_recipe("lock.yaml").recipe.launcher.use == "afar"


def test_where_files_are_shared_the_job_begins_where_it_was_submitted(toys: Path) -> None:
    job = native("launcher=here").job("demo", 1)
    assert job.directory == str(toys / "runs/demo/attempts/1")
    assert job.script.startswith(f"cd -- {toys} ")


def test_a_frozen_plan_is_the_same_wherever_it_is_made(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    for overrides in (FAR, ["launcher=here"]):
        made = native(*overrides)
        first = plan_of(made, frozen=True).to_data()
        with monkeypatch.context() as moved:
            moved.chdir(tmp_path / "other")
            assert plan_of(made, frozen=True).to_data() == first
        assert str(tmp_path) not in json.dumps(first)
        assert plan_of(made).job.run_id != plan_of(made).job.run_id


async def test_what_the_submitter_does_not_see_is_kept_in_the_index(toys: Path) -> None:
    done = await submit_new(native(), "demo")
    run = RunDir.find("demo")
    assert run.path == done.run.path == index_directory() / "demo"
    assert run.lock_path.is_file()
    assert run.recipe_path.is_file()
    (plan,) = afar().plans
    assert plan.job.id == "demo-a1"
    assert find_record(run).handle == done.handle
    assert done.handle.stopped_code == 3
    assert not Path("/shared").exists()
    with pytest.raises(RunError, match="run demo exists"):
        await submit_new(native(), "demo")


async def test_what_the_site_lacks_is_said_before_a_run_begins(toys: Path) -> None:
    made = native()
    afar().lacking[:] = ["the queue is closed", "the disk is full"]
    with pytest.raises(LauncherError, match=r"(?s)the queue is closed.*the disk is full"):
        await submit_new(made, "demo")
    assert not (index_directory() / "demo").exists()


async def test_a_run_is_gone_on_with_when_its_job_has_ended(toys: Path) -> None:
    await submit_new(native(), "demo")
    run = RunDir.find("demo")
    with pytest.raises(RunError, match="job demo-a1, which is running"):
        await submit_resumed(run)
    afar().states["demo-a1"] = "stopped"
    done = await submit_resumed(run)
    assert (done.attempt, done.handle.job_id) == (2, "demo-a2")
    first, second = afar().plans
    assert second.job.directory == "/shared/runs/demo/attempts/2"
    assert first.job.files == second.job.files
    assert [record.attempt for record in records(run)] == [1, 2]
    afar().states["demo-a2"] = "lost"
    assert (await submit_resumed(run)).attempt == 3


async def test_a_run_that_was_moved_is_gone_on_with_where_it_is(toys: Path, tmp_path: Path) -> None:
    made = native("launcher=here")
    run = RunDir.create(tmp_path / "moved here", "demo", run_id="demo")
    files = made.job("demo", 1).files
    run.lock_path.write_text(files["recipe.lock.yaml"])
    run.recipe_path.write_text(files["recipe.yaml"])
    with pytest.raises(Exception, match="launcher here does not submit jobs"):
        await submit_resumed(run)
    assert (run.path / "attempts/1/submit.json").exists()
    script = (run.path / "attempts/1/job/entry.sh").read_text()
    assert f"--into '{run.path}'" in script


def test_run_submits_shows_the_log_and_exits_as_the_job(
    toys: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    native()  # the toys are loaded
    code, out, err = call(capfd, "run", "base.yaml", *FAR, "--run-id", "demo", "--detach", "--json")
    assert code == 0
    assert json.loads(out)["job_id"] == "demo-a1"
    assert "Run demo is job demo-a1 of launcher afar." in err
    assert call(capfd, "run", "--resume", "demo")[0] == 1
    assert call(capfd, "jobs", "wait", "demo", "--timeout", "0.1")[0] == 124
    assert call(capfd, "jobs", "stop", "demo")[0] == 0
    code, out, err = call(capfd, "jobs", "logs", "demo", "-f")
    assert (code, out) == (3, "from afar\n")
    assert call(capfd, "jobs", "logs", "demo", "--role", "engine")[0] == 2


def test_wrong_usage_of_run_is_said(toys: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "run", "base.yaml", "--detach", "--timeout", "3")
    assert (code, "--detach does not wait" in err) == (2, True)
    code, _, err = call(capfd, "run", "base.yaml", "--timeout", "3", "model.path=.")
    assert (code, "--timeout is for jobs" in err) == (2, True)
    code, _, err = call(capfd, "cluster", "up", "base.yaml")
    assert (code, "launcher here keeps no clusters" in err) == (2, True)


def test_a_plan_is_shown_and_written_and_nothing_is_begun(
    toys: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capfd, "plan", "base.yaml", *FAR)
    assert code == 0
    assert "# file job/job.sh" in out
    code, out, _ = call(capfd, "plan", "base.yaml", *FAR, "--json", "--frozen")
    assert json.loads(out)["job"]["id"] == "base-000000-a1"
    assert call(capfd, "plan", "base.yaml", *FAR, "-o", str(tmp_path / "plan"))[0] == 0
    assert (tmp_path / "plan/files/job/entry.sh").read_text().startswith("exec rollhook drive")
    assert asyncio.run(_nothing_was_begun())
    assert call(capfd, "plan", "base.yaml", "launcher=nonsuch")[0] == 2


async def _nothing_was_begun() -> bool:
    return not list(index_directory().glob("*")) and not Path("runs").exists() and not afar().plans
