"""`rollhook tasks` and `rollhook data` on pocket tasks, in real sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from rollhook.testing.environment import OpenBox, build_context
from rollhook.testing.parts import needs_part
from rollhook_tbench2.config import PocketConfig
from rollhook_tbench2.pocket.pack import PocketPack


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    root = tmp_path / "tasks"
    root.mkdir()
    PocketPack(PocketConfig(train_per_family=1, heldout_per_family=1), build_context()).write(root)
    (root / "sort-train-0000/task.toml").write_text("[environment]\ngpus = 1\n")
    return root


def tasks(*arguments: object) -> Result:
    from rollhook.cli.tasks import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_list_names_every_task_and_what_is_wrong_with_it(tasks_dir: Path) -> None:
    result = tasks("list", tasks_dir)
    assert result.exit_code == 1
    assert "26 tasks, 1 with problems" in result.output
    assert "PROBLEM: task.toml:2: environment.gpus: GPUs (gpus = 1): not supported" in result.output
    rows = [
        orjson.loads(line)
        for line in tasks("list", tasks_dir, "--split", "heldout", "--json").stdout.splitlines()
    ]
    assert len(rows) == 13
    assert {row["split"] for row in rows} == {"heldout"}


def test_show_prints_a_task_and_suggests_the_nearest(tasks_dir: Path) -> None:
    shown = orjson.loads(tasks("show", tasks_dir, "csv-train-0000").stdout)
    assert shown["payload"]["config"]["agent"]["timeout_sec"] == 60
    failed = tasks("show", tasks_dir, "csv-train-000")
    assert "did you mean 'csv-train-0000'?" in str(failed.exception)


def test_oracle_proves_tasks_and_resumes(tasks_dir: Path, tmp_path: Path, local_box: OpenBox) -> None:
    needs_part("rollhook_agents")
    options = ["--root", tmp_path / "runs", "--task", "*-heldout-*", "--task", "sort-*"]
    first = tasks("oracle", tasks_dir, *options, "--run-id", "proof", "--json")
    rows = {row["task_id"]: row for row in map(orjson.loads, first.stdout.splitlines())}
    assert first.exit_code == 1
    assert len(rows) == 14
    assert {name for name, row in rows.items() if not row["ok"]} == {"sort-train-0000"}
    assert rows["sort-train-0000"]["oracle"] == "ERR"
    assert "13 of 14 tasks are as they must be (1 errors)" in first.stderr

    (tasks_dir / "copy-heldout-0000/solution/solve.sh").write_text("#!/bin/sh\n")
    second = tasks("oracle", tasks_dir, *options, "--resume", "proof")
    assert second.exit_code == 1
    assert "12 tasks have been proven before" in second.stderr
    assert "[0|0] copy-heldout-0000  the solution scores 0" in second.stderr
    assert (tmp_path / "runs/proof/attempts/2/status.json").is_file()
    leases = [path.read_text() for path in (tmp_path / "runs/proof/attempts").glob("*/journal.jsonl")]
    assert sum(text.count("lease") for text in leases) > 0


def test_oracle_needs_a_task(tasks_dir: Path, tmp_path: Path, local_box: OpenBox) -> None:
    result = tasks("oracle", tasks_dir, "--root", tmp_path / "runs", "--task", "nothing")
    assert str(result.exception) == "no task matches nothing"
    result = tasks("oracle", tasks_dir, "--root", tmp_path / "runs", "--task", "copy-heldot-0000")
    assert str(result.exception) == "no task matches copy-heldot-0000, did you mean 'copy-heldout-0000'?"


def test_data_prepare_writes_a_pack_once(tmp_path: Path) -> None:
    from rollhook.cli.data import app

    options = ["prepare", "pocket", "--set", "train_per_family=1", "--set", "heldout_per_family=1", "--json"]
    first, second = (orjson.loads(CliRunner().invoke(app, options).stdout) for _ in range(2))
    assert (first["written"], second["written"]) == (True, False)
    assert first["path"] == second["path"]
    assert Path(first["path"]).is_relative_to(tmp_path / "cache")
    assert (Path(first["path"]) / "demos.jsonl").is_file()
    again = CliRunner().invoke(app, [options[0], "pack.pocket", *options[2:]])
    assert orjson.loads(again.stdout) == {**second, "seconds": orjson.loads(again.stdout)["seconds"]}


def health(root: Path, *arguments: object) -> tuple[Result, dict[str, dict[str, Any]]]:
    result = tasks("doctor", root, "--root", root.parent / "runs", "--json", *arguments)
    return result, {row["task_id"]: row for row in map(orjson.loads, result.stdout.splitlines())}


def test_doctor_examines_tasks_and_resumes(tasks_dir: Path, tmp_path: Path, local_box: OpenBox) -> None:
    needs_part("rollhook_agents")
    bad = tasks_dir / "copy-heldout-0000"
    (bad / "tests/test.sh").write_text(
        "#!/bin/sh\n# flakes: every other try\nmkdir -p /logs/verifier\n"
        "echo $(( $(date +%N | cut -c 1) % 2 * 2 )) > /logs/verifier/reward.txt\n"
    )
    leak = tasks_dir / "csv-heldout-0000"
    (leak / "environment/files").mkdir(exist_ok=True)
    (leak / "environment/files/hint").write_bytes((leak / "solution/solve.sh").read_bytes() + b"# and more")
    (leak / "solution/solve.sh").write_bytes((leak / "environment/files/hint").read_bytes())
    result, rows = health(tasks_dir, "--task", "*-heldout-*", "--task", "sort-train-*", "--run-id", "first")
    assert result.exit_code == 1
    assert len(rows) == 14
    assert sum(row["ok"] for row in rows.values()) == 11, [row["why"] for row in rows.values()]
    good = rows["grep-heldout-0000"]
    assert (good["oracle"], good["nop"], good["flakes"], good["lint"]) == ([1, 1, 1], [0, 0, 0], 0, [])
    assert "GPUs" in rows["sort-train-0000"]["why"]
    assert rows["csv-heldout-0000"]["leaks"] == ["the agent can read solution/solve.sh at /work/hint"]
    assert rows["csv-heldout-0000"]["lint"] == [
        "environment/files/hint is the same as solution/solve.sh, so the agent can read it"
    ]
    assert "ok  grep-heldout-0000  solution 1,1,1  nothing 0,0,0" in result.stderr
    assert "BAD csv-heldout-0000" in result.stderr
    assert "11 of 14 tasks are in order" in result.stderr

    again, rows = health(tasks_dir, "--task", "grep-*", "--task", "csv-heldout-*", "--resume", "first")
    assert "2 tasks have been examined before" in again.stderr
    more, rows = health(tasks_dir, "--task", "grep-heldout-*", "--resume", "first", "--repeat", "4")
    assert more.exit_code == 0
    assert rows["grep-heldout-0000"]["oracle"] == [1] * 4


def test_diff_shows_what_is_not_the_tasks(tasks_dir: Path, tmp_path: Path, local_box: OpenBox) -> None:
    needs_part("rollhook_agents", "unshare")
    test = tasks_dir / "copy-heldout-0000/tests/test.sh"
    test.write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier; ls /lo* | wc -l > /logs/verifier/reward.txt; exit 3\n"
    )
    options = ["--root", tmp_path / "runs", "--task", "copy-heldout-*", "--task", "sort-*"]
    sandboxes = ["--sandbox", "local", "--sandbox", "{use: local, mode: unshare, cpus: 1}"]
    result = tasks("diff", tasks_dir, *options, *sandboxes, "--json")
    assert "1 tasks cannot run and are left out, e.g. sort-train-0000" in result.stderr
    assert "same sort-heldout-0000" in result.stderr
    assert "2 of 2 verdicts agree" in result.stderr
    assert result.exit_code == 0
    rows = [orjson.loads(line) for line in result.stdout.splitlines()]
    assert {row["topic"] for row in rows} <= {"user", "limits", "network", "places", "system", "environment"}
    table = tasks("diff", tasks_dir, *options, *sandboxes)
    assert table.exit_code == 0
    assert "give --sandbox twice" in str(tasks("diff", tasks_dir, "--sandbox", "local").exception)
