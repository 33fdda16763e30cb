"""`rollhook data prepare tbench2`: the split is stable, and others can read what it writes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from rollhook.errors import UsageError
from rollhook.testing.environment import build_context
from rollhook_tbench2.config import SplitConfig, TBench2Config
from rollhook_tbench2.environment import SYSTEM_PROMPT, TBench2
from rollhook_tbench2.split import SplitPack, is_held_out


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    root = tmp_path / "terminal-bench-2"
    for number in range(89):
        task = root / f"task-{number}"
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text("[metadata]\ncategory = 'x'\n")
        (task / "instruction.md").write_text(f"Do {number}.")
        (task / "tests/test.sh").write_text("#!/bin/sh\n")
    (root / "task-0/task.toml").write_text("[environment]\ngpus = 8\n")
    return root


def prepare(*arguments: object) -> Path:
    from rollhook.cli.data import app

    options = [part for argument in arguments for part in ("--set", str(argument))]
    result = CliRunner().invoke(app, ["prepare", "tbench2", "--json", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Path(orjson.loads(result.stdout)["path"])


def ids(path: Path) -> list[str]:
    return [orjson.loads(line)["metadata"]["task_id"] for line in path.read_text().splitlines()]


def test_the_split_is_by_hash_and_stays_when_tasks_come_and_go(tasks_dir: Path) -> None:
    first = prepare(f"tasks_dir={tasks_dir}")
    train, heldout = ids(first / "train.jsonl"), ids(first / "heldout.jsonl")
    assert len(train) + len(heldout) == 88
    assert 12 <= len(heldout) <= 30
    assert "task-0" not in train + heldout
    row = orjson.loads((first / "train.jsonl").read_text().splitlines()[0])
    assert row == {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}],
        "metadata": {"task_id": train[0]},
    }
    for name in ("task-3", "task-40"):
        (tasks_dir / name).rename(tasks_dir / f"new-{name}")
    second = prepare(f"tasks_dir={tasks_dir}")
    assert second != first
    kept = set(ids(second / "heldout.jsonl")) & {f"task-{n}" for n in range(89)}
    assert kept == set(heldout) - {"task-3", "task-40"}
    assert [is_held_out(f"task-{n}", 20 / 89) for n in range(8)] == [
        f"task-{n}" in heldout or (n == 0 and is_held_out("task-0", 20 / 89)) for n in range(8)
    ]


def test_a_list_decides_and_the_environment_reads_the_pack(tasks_dir: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "heldout20.txt"
    chosen.write_text("# the 20\n" + "".join(f"task-{n}\n" for n in range(69, 89)))
    pack = prepare(f"tasks_dir={tasks_dir}", f"heldout={chosen}")
    assert ids(pack / "heldout.jsonl") == sorted(f"task-{n}" for n in range(69, 89))
    environment = TBench2(TBench2Config(tasks_dir=str(pack)), build_context())
    assert len(environment.tasks("train")) == 68
    assert [task.id for task in environment.tasks("heldout")] == ids(pack / "heldout.jsonl")
    assert all(task.problem is None for task in environment.tasks())
    with pytest.raises(UsageError, match=r"heldout names 1 tasks that .* does not hold: nobody"):
        SplitPack(SplitConfig(tasks_dir=str(tasks_dir), heldout=("nobody",)), build_context()).digest()


def test_the_digest_follows_the_tasks_content(tasks_dir: Path) -> None:
    def digest(**keys: object) -> str:
        return SplitPack(SplitConfig(tasks_dir=str(tasks_dir), **keys), build_context()).digest()  # type: ignore[arg-type]

    before = digest()
    assert digest() == before
    assert digest(system_prompt="Else.") != before
    (tasks_dir / "task-5/tests/test.sh").write_text("#!/bin/sh\nexit 1\n")
    assert digest() != before
