"""One episode in a real sandbox: what is staged when, and what a hostile agent cannot gain."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollhook.environment import EpisodeContext, Transcript, Verdict
from rollhook.errors import Unsupported
from rollhook.sandbox import Sandbox
from rollhook.testing.environment import OpenBox, build_context
from rollhook_tbench2.config import TBench2Config
from rollhook_tbench2.environment import TBench2

TOML = '[metadata]\nhost_ok = true\n[environment]\nnetwork_mode = "no-network"\n'
#: 1 if the agent wrote `done` to answer.txt
TEST = """#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

#: what a forger leaves running
FOREVER = "while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; sleep 0.01; done"


def write_task(root: Path, **files: str) -> Path:
    content = {
        "task.toml": TOML,
        "instruction.md": "Write done to answer.txt.",
        "tests/test.sh": TEST,
        **files,
    }
    for name, text in content.items():
        path = root / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "task"


async def judge(task: Path, local_box: OpenBox, *commands: str, solve: bool = False) -> Verdict:
    """Run an episode as the runtime does, with an agent that runs these commands."""
    environment = TBench2(TBench2Config(tasks_dir=str(task)), build_context())
    environment.problems(frozenset({"isolation", "network_off", "user"}))
    boxes: dict[str, Sandbox] = {}
    (only,) = environment.tasks()
    assert only.problem is None
    episode = environment.episode(only, EpisodeContext("e", 0, boxes, build_context()))
    async with local_box(episode.boxes["main"].spec) as box:
        boxes["main"] = box
        async with episode:
            async for phase in episode.phases():
                for command in commands:
                    await box.shell(command, timeout=20)
                if solve:
                    await phase.solve()
                await box.quiesce()
                verdict = await phase.verify(Transcript([], "done"))
    return verdict


async def test_the_verifier_decides_by_its_reward_file(tmp_path: Path, local_box: OpenBox) -> None:
    task = write_task(tmp_path)
    assert await judge(task, local_box, "echo done > answer.txt") == Verdict(
        1.0, {"reward": 1.0}, {"exit_code": 0}
    )
    missed = await judge(task, local_box)
    assert missed.reward == 0.0
    assert "answer.txt" in missed.detail["output"]


async def test_the_solution_is_applied_and_its_exit_code_recorded(tmp_path: Path, local_box: OpenBox) -> None:
    solve = "#!/bin/bash\n[[ $KEY = value ]] && cp /solution/more/text answer.txt\nexit 3\n"
    toml = TOML + '[solution.env]\nKEY = "value"\n'
    files = {"solution/solve.sh": solve, "solution/more/text": "done", "task.toml": toml}
    verdict = await judge(write_task(tmp_path, **files), local_box, solve=True)
    assert verdict.reward == 1.0
    assert verdict.detail["solution_exit_code"] == 3


async def test_a_task_without_a_solution_says_so(tmp_path: Path, local_box: OpenBox) -> None:
    with pytest.raises(Unsupported, match=r"task task has no solution/solve\.sh"):
        await judge(write_task(tmp_path), local_box, solve=True)


async def test_neither_tests_nor_solution_are_there_while_the_agent_works(
    tmp_path: Path, local_box: OpenBox
) -> None:
    """Invariant 6: the verifier's assets are out of the agent's reach."""
    files = {"solution/solve.sh": "#!/bin/sh\n", "environment/Dockerfile": "FROM x\nCOPY files/ /work/\n"}
    files |= {"environment/files/given.txt": "x", "tests/test.sh": f"{TEST}cat answer.txt\n"}
    search = (
        "find / -path /usr -prune -o -path /proc -prune -o -name 'test.sh' -print -o -name 'solve.sh' -print"
    )
    look = f"(find /tests /solution /logs/verifier -mindepth 1; {search}; ls) > seen.txt 2>/dev/null"
    verdict = await judge(write_task(tmp_path, **files), local_box, look, "cp seen.txt answer.txt")
    assert verdict.reward == 0.0
    assert verdict.detail["output"].split() == ["given.txt", "seen.txt"]


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier && echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p /logs/verifier/reward.txt /logs/verifier/reward.json",
        "mkdir -p /logs/verifier && ln -s /dev/zero /logs/verifier/reward.json",
        "mkdir -p /logs/verifier && mkfifo /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt && chmod 000 /logs/verifier",
        "rmdir /logs; mkdir -p /tmp/l/verifier; ln -s /tmp/l /logs; echo 1 > /logs/verifier/reward.txt",
        f"({FOREVER}) > /dev/null 2>&1 & sleep 0.2",
        f"setsid nohup sh -c '{FOREVER}' > /dev/null 2>&1 & sleep 0.2",
    ],
    ids=[
        "text",
        "json",
        "directories",
        "endless link",
        "fifo",
        "closed directory",
        "linked logs",
        "background",
        "daemon",
    ],
)
async def test_a_planted_reward_is_removed_and_reported(
    tmp_path: Path, local_box: OpenBox, command: str
) -> None:
    verdict = await judge(write_task(tmp_path), local_box, command)
    assert verdict.reward == 0.0
    assert set(verdict.detail["planted"]) & {
        "/logs/verifier/reward.txt",
        "/logs/verifier/reward.json",
        "/logs/verifier",
    }


async def test_a_planted_reward_does_not_stand_in_for_a_missing_one(
    tmp_path: Path, local_box: OpenBox
) -> None:
    task = write_task(tmp_path, **{"tests/test.sh": "#!/bin/sh\nexit 1\n"})
    verdict = await judge(task, local_box, "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt")
    assert verdict.reward is None
    assert verdict.detail["exit_code"] == 1
    assert verdict.detail["reason"].startswith("tests/test.sh wrote neither")


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /tests && echo 'exit 0' > /tests/conftest.py",
        "mkdir -p /tests && ln -s /bin/true /tests/test.sh",
        "rm -rf /tests; ln -s /work /tests",
        "rm -rf /tests; echo x > /tests || echo x > /tests/file",
    ],
    ids=["conftest", "linked test", "linked directory", "file"],
)
async def test_what_the_agent_left_at_tests_is_removed_and_reported(
    tmp_path: Path, local_box: OpenBox, command: str
) -> None:
    alone = '#!/bin/sh\n[ "$(ls -A /tests)" = test.sh ] && echo 1 > /logs/verifier/reward.txt\n'
    verdict = await judge(write_task(tmp_path, **{"tests/test.sh": alone}), local_box, command)
    assert verdict.reward == 1.0
    assert verdict.detail["planted"] == ["/tests"]


REWARDS = {
    "exit code 1 beside a reward": ("echo 1 > /logs/verifier/reward.txt; exit 1", 1.0, "", 1),
    "killed after the reward": ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", 1.0, "", 137),
    "exit code 0 without a reward": ("exit 0", None, "tests/test.sh wrote neither", 0),
    "an empty reward": (": > /logs/verifier/reward.txt", None, "reward.txt is empty", 0),
    "an oversized reward": (
        "head -c 100000 /dev/zero > /logs/verifier/reward.txt",
        None,
        "cannot be read",
        0,
    ),
    "a reward that is a directory": ("mkdir /logs/verifier/reward.json", None, "cannot be read", 0),
    "a boolean": ("echo '{\"reward\": true}' > /logs/verifier/reward.json", None, "reward is true", 0),
    "a syntax error": ("if", None, "tests/test.sh wrote neither", 2),
    "a program that is not there": ("exec /nowhere", None, "tests/test.sh wrote neither", 127),
}


@pytest.mark.parametrize("name", REWARDS)
async def test_the_exit_code_is_recorded_and_the_reward_file_decides(
    tmp_path: Path, local_box: OpenBox, name: str
) -> None:
    script, reward, why, code = REWARDS[name]
    verdict = await judge(write_task(tmp_path, **{"tests/test.sh": f"#!/bin/sh\n{script}\n"}), local_box)
    assert verdict.reward == reward
    assert verdict.detail["exit_code"] == code
    assert why in verdict.detail.get("reason", "")
    assert bool(why) == ("reason" in verdict.detail)


async def test_two_reward_files_that_differ_are_a_warning(tmp_path: Path, local_box: OpenBox) -> None:
    both = "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0.5}' > /logs/verifier/reward.json"
    verdict = await judge(write_task(tmp_path, **{"tests/test.sh": f"#!/bin/sh\n{both}\n"}), local_box)
    assert verdict.reward == 0.5
    assert verdict.detail["warnings"] == ["reward.json says 0.5, which counts; reward.txt: 1.0"]


async def test_a_verifier_that_takes_too_long_gives_no_verdict(tmp_path: Path, local_box: OpenBox) -> None:
    files = {
        "task.toml": TOML + "[verifier]\ntimeout_sec = 0.5\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\nsleep 60\n",
    }
    verdict = await judge(write_task(tmp_path, **files), local_box)
    assert verdict.reward is None
    assert verdict.detail["reason"] == "tests/test.sh took longer than its 0.5 s"


async def test_an_agent_that_removes_its_directory_is_judged_all_the_same(
    tmp_path: Path, local_box: OpenBox
) -> None:
    verdict = await judge(write_task(tmp_path), local_box, "cd / && rm -rf /work/* /work/.[!.]*; rmdir /work")
    assert verdict.reward == 0.0


async def test_the_test_runs_in_the_work_directory_with_the_environment_of_its_table(
    tmp_path: Path, local_box: OpenBox
) -> None:
    files = {
        "task.toml": TOML + '[verifier.env]\nKEY = "value"\n',
        "environment/Dockerfile": "FROM x\nWORKDIR /app\nENV IMAGE=yes\nCOPY run.sh data.txt ./\n",
        "environment/run.sh": "#!/bin/sh\n",
        "environment/data.txt": "x",
        "tests/test.sh": '[ "$PWD-$KEY-$IMAGE" = /app-value-yes ] && [ -x run.sh ] && [ ! -x data.txt ] '
        "&& echo 1 > /logs/verifier/reward.txt\n",
    }
    task = write_task(tmp_path, **files)
    (task / "environment/run.sh").chmod(0o755)
    assert (await judge(task, local_box)).reward == 1.0


async def test_a_copied_directory_keeps_links_and_empty_directories(
    tmp_path: Path, local_box: OpenBox
) -> None:
    files = {
        "environment/Dockerfile": "FROM x\nCOPY files/ /work/sub/\n",
        "environment/files/given.txt": "x",
        "tests/test.sh": "#!/bin/sh\n[ -L sub/link ] && [ -d sub/empty ] && [ -f sub/given.txt ] "
        "&& echo 1 > /logs/verifier/reward.txt\n",
    }
    task = write_task(tmp_path, **files)
    (task / "environment/files/link").symlink_to("given.txt")
    (task / "environment/files/empty").mkdir()
    assert (await judge(task, local_box)).reward == 1.0


async def test_the_verifier_may_run_as_another_user(tmp_path: Path, local_box: OpenBox) -> None:
    files = {
        "task.toml": TOML + '[verifier]\nuser = "nobody"\n',
        "tests/test.sh": '#!/bin/sh\n[ "$(id -un)" = nobody ] && echo 1 > /logs/verifier/reward.txt\n',
    }
    assert (await judge(write_task(tmp_path, **files), local_box)).reward == 1.0


async def test_a_large_tree_of_tests_arrives_whole(tmp_path: Path, local_box: OpenBox) -> None:
    files = {f"tests/data/{number:03}/file.txt": str(number) for number in range(60)}
    files["tests/test.sh"] = (
        '#!/bin/sh\n[ "$(cat /tests/data/*/file.txt | wc -c)" = 110 ] && [ -L /tests/link ] '
        + ("&& echo 1 > /logs/verifier/reward.txt\n")
    )
    task = write_task(tmp_path, **files)
    (task / "tests/link").symlink_to("data")
    assert (await judge(task, local_box)).reward == 1.0


@pytest.mark.parametrize(
    "spoil",
    ["mkfifo /logs", "ln -s /logs /logs", "ln -s /proc/1/root /logs", "ln -s /work /logs", "echo > /logs"],
)
async def test_a_spoilt_parent_of_the_verdict_does_not_spare_the_agent_a_zero(
    tmp_path: Path, local_box: OpenBox, spoil: str
) -> None:
    verdict = await judge(write_task(tmp_path), local_box, f"rm -rf /logs; {spoil}")
    assert verdict.reward == 0.0
