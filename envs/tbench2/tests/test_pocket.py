"""The pocket pack: deterministic, fairly split, honestly demonstrated, and the same as its sample."""

from __future__ import annotations

import filecmp
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollhook.testing.environment import build_context
from rollhook_tbench2.config import PocketConfig, TBench2Config
from rollhook_tbench2.environment import TBench2
from rollhook_tbench2.pocket import sample
from rollhook_tbench2.pocket.demos import SYSTEM_PROMPT, demonstration, observation_message
from rollhook_tbench2.pocket.families import FAMILIES, WORDS
from rollhook_tbench2.pocket.pack import PocketPack
from rollhook_tbench2.pocket.stream import Stream
from rollhook_tbench2.pocket.tasks import PocketTask, draw_tasks, task_files

SAMPLE = Path(__file__).parents[3] / "recipes" / "packs" / "pocket"


@pytest.fixture(scope="module")
def tasks() -> list[PocketTask]:
    config = PocketConfig()
    return list(draw_tasks(config.seed, config.train_per_family, config.heldout_per_family))


@pytest.fixture(scope="module")
def demos(tasks: list[PocketTask]) -> list[dict[str, Any]]:
    return [demonstration(task, 0, 0.7, ()) for task in tasks if task.split == "train"]


def pack(**keys: Any) -> PocketPack:
    return PocketPack(PocketConfig(**keys), build_context())


def test_the_default_pack_has_thousands_of_tasks_in_thirteen_families(tasks: list[PocketTask]) -> None:
    counts = Counter((task.family.name, task.split) for task in tasks)
    assert len(counts) == 26
    assert {count for (_, split), count in counts.items() if split == "train"} == {200}
    assert sum(count for (_, split), count in counts.items() if split == "heldout") >= 400


def test_nothing_held_out_occurs_in_training_tasks_or_demonstrations(
    tasks: list[PocketTask], demos: list[dict[str, Any]]
) -> None:
    train = [task for task in tasks if task.split == "train"]
    heldout = [task for task in tasks if task.split == "heldout"]
    shown = {message["content"] for demo in demos for message in demo["messages"]}
    shown_text = "\n".join(shown)
    for kind in (
        lambda task: task.instruction,
        lambda task: (task.family.name, task.args),
        lambda task: task.work.command,
    ):
        assert not {kind(task) for task in heldout} & {kind(task) for task in train}
    for task in heldout:
        assert not set(task.work.phrasings) & shown
        assert f"\n{task.work.command}\n" not in shown_text


def test_every_held_out_word_occurs_in_training(tasks: list[PocketTask], demos: list[dict[str, Any]]) -> None:
    shown = " ".join(message["content"] for demo in demos for message in demo["messages"])
    assert all(word in shown for word in WORDS)


def test_no_word_is_part_of_another_and_all_are_different() -> None:
    assert len(set(WORDS)) == 48
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]


def test_tasks_differ_and_a_smaller_pack_is_the_beginning_of_a_larger(tasks: list[PocketTask]) -> None:
    assert len({task.instruction for task in tasks}) == len(tasks)
    assert len({task.id for task in tasks}) == len(tasks)
    smaller = list(draw_tasks(0, 5, 2))
    by_id = {task.id: task for task in tasks}
    assert all(task_files(by_id[task.id]) == task_files(task) for task in smaller)


def test_another_seed_gives_other_tasks_with_the_same_split(tasks: list[PocketTask]) -> None:
    split_of = {(task.family.name, task.args): task.split for task in tasks}
    other = list(draw_tasks(1, 200, 32))
    assert [task.args for task in other] != [task.args for task in tasks]
    both = [task for task in other if (task.family.name, task.args) in split_of]
    assert both
    assert all(split_of[task.family.name, task.args] == task.split for task in both)


def test_the_noise_is_as_stated(demos: list[dict[str, Any]]) -> None:
    for family in FAMILIES:
        correct = [demo["correct"] for demo in demos if demo["family"] == family.name]
        if family.noisy:
            assert 0.28 < sum(correct) / len(correct) < 0.52
        else:
            assert all(correct)
    assert sum(family.noisy for family in FAMILIES) == 8


def test_a_demonstration_is_the_conversation_that_the_shell_agent_records() -> None:
    task = next(task for task in draw_tasks(0, 1, 0) if task.family.name == "mkdir")
    row = demonstration(task, 0, 1.0, ())
    path = task.args[0]
    said = f"mkdir: cannot create directory '{path}': No such file or directory"
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", SYSTEM_PROMPT),
        ("user", task.instruction),
        ("assistant", f"```bash\nmkdir {path}\n```"),
        ("user", f"exit code 1\n{said[:30]}[{len(said) - 60} characters cut]{said[-30:]}"),
        ("assistant", "TASK_COMPLETE"),
    ]
    assert not row["correct"]
    assert observation_message(0, "") == "exit code 0\n"


def test_noise_is_a_key_and_families_can_be_left_undemonstrated() -> None:
    train = [task for task in draw_tasks(0, 20, 0) if task.split == "train"]
    assert all(demonstration(task, 0, 0.0, ())["correct"] for task in train)
    for task in train:
        row = demonstration(task, 0, 0.0, ("copy",))
        assert row["correct"] == (task.family.name != "copy")
    with pytest.raises(ValueError, match="'cpoy' is not a family; families: create"):
        PocketConfig(undemonstrated=("cpoy",))


def test_the_same_keys_give_the_same_bytes_and_other_keys_another_digest(tmp_path: Path) -> None:
    keys = {"train_per_family": 3, "heldout_per_family": 1}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pack(**keys).write(tmp_path / name)
    assert differences(tmp_path / "a", tmp_path / "b") == []
    digests = {pack(**more).digest() for more in ({}, {"seed": 1}, {"noise": 0.5}, keys)}
    assert len(digests) == 4
    assert pack().digest() == pack(seed=0).digest()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen = []
    pack(train_per_family=1, heldout_per_family=1).write(
        tmp_path, lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (26, 26)


def test_the_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        pack(train_per_family=1, heldout_per_family=1).write(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "copy-train-0000/tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "copy-train-0000/instruction.md").stat().st_mode & 0o777 == 0o644


def test_the_sample_in_the_repository_is_what_the_generator_writes(tmp_path: Path) -> None:
    if not SAMPLE.is_dir():
        pytest.skip("recipes/packs/pocket is only in a checkout")
    sample.write_sample(tmp_path / "pocket")
    assert differences(SAMPLE, tmp_path / "pocket") == [], (
        "write it again: python -m rollhook_tbench2.pocket.sample recipes/packs/pocket"
    )
    assert len(json.loads((SAMPLE / "splits.json").read_text())["train"]) >= 24


def test_the_written_pack_is_read_without_a_problem_and_describes_itself(tmp_path: Path) -> None:
    pack(train_per_family=2, heldout_per_family=1).write(tmp_path)
    environment = TBench2(TBench2Config(tasks_dir=str(tmp_path)), build_context())
    assert [task.problem for task in environment.tasks()] == [None] * 39
    assert {task.family for task in environment.tasks("train")} == {family.name for family in FAMILIES}
    assert environment.problems(frozenset({"network_off"})) == []
    said = environment.describe()
    assert said["tasks"] == "39 (train 26, heldout 13), 0 with problems"
    assert said["demonstrations"].endswith("are correct (noise 0.7 in 8 families)")
    assert "70% of them show a plausible wrong command" in (tmp_path / "README.md").read_text()


def test_draws_are_the_same_everywhere() -> None:
    stream = Stream("a", 1)
    assert [stream.below(1000) for _ in range(4)] == [533, 613, 518, 243]


def differences(left: Path, right: Path) -> list[str]:
    """Return the files that differ in name, bytes or exec bit."""
    names = {p.relative_to(root).as_posix() for root in (left, right) for p in root.rglob("*") if p.is_file()}
    return sorted(name for name in names if not _same(left / name, right / name))


def _same(left: Path, right: Path) -> bool:
    if not left.is_file() or not right.is_file() or not filecmp.cmp(left, right, shallow=False):
        return False
    return (left.stat().st_mode & 0o100) == (right.stat().st_mode & 0o100)
