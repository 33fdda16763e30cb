"""What `rollhook drive` does on a node before its driver runs."""

import os
from pathlib import Path

import pytest

from rollhook.errors import RunError, UsageError
from rollhook.packs import cache_directory, packs_directory
from rollhook.rundir import RunDir
from rollhook.runtime.drive import joins, settle, share_cache, wanted_attempt

LOCK = "lock: 1\nrecipe: {name: demo}\n"


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's files, where a launcher that does not share files has put them; and the job's environment."""
    directory = tmp_path / "sent"
    directory.mkdir()
    for name, text in {"recipe.lock.yaml": LOCK, "recipe.yaml": "name: demo\n", "job.sh": "true\n"}.items():
        (directory / name).write_text(text)
    (directory / "..data").mkdir()  # as Kubernetes mounts files
    monkeypatch.setenv("ROLLHOOK_JOB_FILES", str(directory))
    monkeypatch.setenv("ROLLHOOK_ATTEMPT", "1")
    return directory


def test_a_run_that_its_submitter_does_not_see_is_made_of_the_jobs_files(tmp_path: Path, sent: Path) -> None:
    (sent / "submit.json").write_text('{"schema": 1}')
    into = tmp_path / "shared" / "demo-1"
    (into / "attempts" / "1" / "logs").mkdir(parents=True)  # the job's script has made that
    run = settle(sent / "recipe.lock.yaml", into)
    assert (run.path, RunDir.find("demo-1").path) == (into, into)
    assert run.lock_path.read_text() == LOCK
    assert run.recipe_path.read_text() == "name: demo\n"
    attempt = into / "attempts" / "1"
    assert sorted(os.listdir(attempt / "job")) == ["job.sh", "recipe.lock.yaml", "recipe.yaml"]
    assert (attempt / "submit.json").read_text() == '{"schema": 1}'
    assert run.waiting() == [1]


def test_a_job_that_is_queued_again_finds_the_run_also_with_its_needs_in_the_lock(
    tmp_path: Path, sent: Path
) -> None:
    run = settle(sent / "recipe.lock.yaml", tmp_path / "demo-1")
    run.lock_path.write_text(LOCK + "# what it needed has run\n")
    settle(sent / "recipe.lock.yaml", run.path)
    assert run.lock_path.read_text().endswith("has run\n")


def test_a_run_of_the_same_id_that_is_another_is_not_gone_on_with(tmp_path: Path, sent: Path) -> None:
    run = settle(sent / "recipe.lock.yaml", tmp_path / "demo-1")
    (sent / "recipe.lock.yaml").write_text(LOCK + "versions: {}\n")
    with pytest.raises(RunError, match=r"run demo-1 exists at .* begun with another lock; choose another"):
        settle(sent / "recipe.lock.yaml", run.path)
    assert run.lock_path.read_text() == LOCK


def test_a_run_whose_directory_is_shared_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path, "demo", run_id="demo-1")
    files = run.path / "attempts" / "1" / "job"
    files.mkdir(parents=True)
    for path in (run.lock_path, files / "recipe.lock.yaml"):
        path.write_text(LOCK)
    monkeypatch.setenv("ROLLHOOK_JOB_FILES", str(files))
    assert settle(files / "recipe.lock.yaml", run.path).path == run.path
    assert os.listdir(files) == ["recipe.lock.yaml"]


@pytest.mark.parametrize("text", [None, "- a\n", "recipe: {}\n", "a: [\n"])
def test_what_is_no_lock_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "lock").write_text(text)
    with pytest.raises(UsageError, match=r"lock cannot be read as a lock: "):
        settle(tmp_path / "lock", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_packs_are_where_all_nodes_see_them_unless_somebody_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLHOOK_CACHE", "")
    assert cache_directory() == Path(os.environ["XDG_CACHE_HOME"]) / "rollhook"
    monkeypatch.delenv("ROLLHOOK_CACHE")
    share_cache(tmp_path)
    assert packs_directory() == tmp_path / ".cache/packs"
    share_cache(tmp_path / "elsewhere")
    assert cache_directory() == tmp_path / ".cache"
    monkeypatch.delenv("ROLLHOOK_CACHE")


def test_only_a_job_on_a_ray_cluster_joins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLHOOK_ATTEMPT", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("ROLLHOOK_JOB_DIR", raising=False)
    assert (joins(), wanted_attempt()) == (False, None)  # a user's own Ray is no business of a run at a desk
    monkeypatch.setenv("ROLLHOOK_JOB_DIR", "/runs/demo/attempts/4")
    monkeypatch.setenv("ROLLHOOK_ATTEMPT", "4")
    assert (joins(), wanted_attempt()) == (True, 4)
