"""Pocket tasks in real sandboxes: solutions score 1, nothing and plausible mistakes score 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollhook.environment import Environment, EpisodeContext, Task, Transcript
from rollhook.sandbox import Sandbox
from rollhook.testing.environment import OpenBox, build_context
from rollhook_tbench2.config import PocketConfig, TBench2Config
from rollhook_tbench2.environment import TBench2
from rollhook_tbench2.pocket.demos import observation_message
from rollhook_tbench2.pocket.families import FAMILIES
from rollhook_tbench2.pocket.pack import PocketPack
from rollhook_tbench2.pocket.tasks import PocketTask, draw_tasks

#: what a model sees of one command: its reward, exit code and output
Seen = tuple[float | None, int | None, str]

nightly = pytest.mark.skipif(not os.environ.get("ROLLHOOK_NIGHTLY"), reason="nightly: set ROLLHOOK_NIGHTLY=1")


def environment(root: Path, config: PocketConfig) -> TBench2:
    PocketPack(config, build_context()).write(root)
    made = TBench2(TBench2Config(tasks_dir=str(root)), build_context())
    assert made.problems(frozenset({"isolation", "network_off"})) == []
    return made


async def judge(made: Environment, task: Task, command: str | None, local_box: OpenBox) -> Seen:
    """Run one command (None: the task's own solution) and verify."""
    boxes: dict[str, Sandbox] = {}
    episode = made.episode(task, EpisodeContext("e", 0, boxes, build_context()))
    async with local_box(episode.boxes["main"].spec) as box:
        boxes["main"] = box
        async with episode:
            async for phase in episode.phases():
                code, output = None, ""
                if command is None:
                    await phase.solve()
                else:
                    result = await box.exec(["bash", "-c", command], timeout=20)
                    code, output = result.exit_code, (result.text + result.error_text).rstrip("\n")
                reward = (await phase.verify(Transcript([], "done"))).reward
    return reward, code, output


async def judge_all(
    made: Environment, work: Sequence[tuple[str, str | None]], local_box: OpenBox, at_once: int = 4
) -> list[Seen]:
    tasks = {task.id: task for task in made.tasks()}
    places = asyncio.Semaphore(at_once)

    async def one(task: str, command: str | None) -> Seen:
        async with places:
            return await judge(made, tasks[task], command, local_box)

    return list(await asyncio.gather(*(one(task, command) for task, command in work)))


def drawn(config: PocketConfig) -> list[PocketTask]:
    return list(draw_tasks(config.seed, config.train_per_family, config.heldout_per_family))


async def test_solutions_score_one_and_doing_nothing_scores_zero_on_the_sample(
    tmp_path: Path, local_box: OpenBox
) -> None:
    config = PocketConfig(train_per_family=2, heldout_per_family=2)
    made = environment(tmp_path / "tasks", config)
    ids = [task.id for task in drawn(config)]
    solved = await judge_all(made, [(name, None) for name in ids], local_box)
    idle = await judge_all(made, [(name, "true") for name in ids], local_box)
    assert {name: seen[0] for name, seen in zip(ids, solved, strict=True)} == dict.fromkeys(ids, 1.0)
    assert {name: seen[0] for name, seen in zip(ids, idle, strict=True)} == dict.fromkeys(ids, 0.0)


async def test_plausible_wrong_commands_fail_and_are_demonstrated_as_they_are(
    tmp_path: Path, local_box: OpenBox
) -> None:
    config = PocketConfig(train_per_family=1, heldout_per_family=1)
    made = environment(tmp_path / "tasks", config)
    tasks = drawn(config)
    work = [(task.id, command) for task in tasks for command in task.work.wrong]
    seen = dict(zip(work, await judge_all(made, work, local_box), strict=True))
    assert {key: reward for key, (reward, _, _) in seen.items()} == dict.fromkeys(work, 0.0)
    for task in tasks:
        _, code, output = seen[task.id, task.work.wrong[0]]
        assert code is not None
        assert observation_message(code, output) == observation_message(*task.work.shown)


async def test_the_right_command_says_nothing(tmp_path: Path, local_box: OpenBox) -> None:
    config = PocketConfig(train_per_family=1, heldout_per_family=1)
    made = environment(tmp_path / "tasks", config)
    work = [(task.id, task.work.command) for task in drawn(config)]
    assert set(await judge_all(made, work, local_box)) == {(1.0, 0, "")}


@pytest.fixture(scope="module")
def full_pack(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment(tmp_path_factory.mktemp("pocket"), PocketConfig())


@pytest.mark.nightly
@nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
async def test_every_task_of_the_full_pack_tells_right_from_wrong(
    full_pack: Environment, local_box: OpenBox, family: str
) -> None:
    """Every solution and doing nothing; every mistake on held-out tasks, one in turn on the others."""
    tasks = [task for task in drawn(PocketConfig()) if task.family.name == family]
    right = [(task.id, None) for task in tasks]
    wrong = [(task.id, "true") for task in tasks]
    for number, task in enumerate(tasks):
        mistakes = task.work.wrong
        turn = number % len(mistakes)
        chosen = mistakes if task.split == "heldout" else mistakes[turn : turn + 1]
        wrong += [(task.id, command) for command in chosen]
    assert {seen[0] for seen in await judge_all(full_pack, right, local_box)} == {1.0}
    seen = await judge_all(full_pack, wrong, local_box)
    assert [work for work, (reward, _, _) in zip(wrong, seen, strict=True) if reward != 0.0] == []
