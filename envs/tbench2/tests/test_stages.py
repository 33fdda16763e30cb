"""Health checks, artifacts, separate verifiers and steps, in real sandboxes and with the runtime's runner."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tb2_attempts import TOML, Attempts, write_task

from rollhook.errors import TaskError
from rollhook.sandbox import ExecResult, Sandbox, SandboxSpec
from rollhook_tbench2.health import wait_until_healthy
from rollhook_tbench2.task_toml import HealthCheck


class Clocked:
    """A box whose checks end as they are told to, on a clock that sleeping moves on."""

    spec = SandboxSpec()

    def __init__(self, codes: list[int | None], seconds: float = 0.0) -> None:
        self.codes, self.seconds, self.time = codes, seconds, 0.0
        self.limits: list[float] = []

    async def shell(self, text: str, *, timeout: float, **_: object) -> ExecResult:
        self.time += self.seconds
        self.limits.append(timeout)
        code = self.codes.pop(0)
        return ExecResult(b"", b"not yet", code, code is None, False, 0.0, 0, 0)

    async def sleep(self, seconds: float) -> None:
        self.time += seconds

    def now(self) -> float:
        return self.time


async def healthy(box: Clocked, **keys: float) -> int:
    check = HealthCheck(command="ready", **keys)  # type: ignore[arg-type]
    return await wait_until_healthy(box, check, sleep=box.sleep, now=box.now)  # type: ignore[arg-type]


async def test_a_health_check_is_tried_until_it_succeeds() -> None:
    box = Clocked([1, 1, 0])
    assert await healthy(box, interval_sec=7) == 3
    assert (box.time, box.limits) == (14, [30, 30, 30])


async def test_a_box_that_does_not_get_ready_says_why() -> None:
    box = Clocked([1, 1, None])
    with pytest.raises(
        TaskError, match=r"'ready' failed 3 times in a row; the last one took longer than 30 s"
    ):
        await healthy(box)
    assert box.time == 10  # no wait after the last try


async def test_failures_of_the_start_do_not_count() -> None:
    box = Clocked([1, 1, 1, 1, 0])
    assert await healthy(box, start_period_sec=5, start_interval_sec=2, retries=2) == 5
    box = Clocked([1, 1, 1, 1])
    with pytest.raises(TaskError, match="failed 1 times in a row; the last one ended with 1: not yet"):
        await healthy(box, start_period_sec=5, start_interval_sec=2, retries=1)
    assert box.time == 6


async def test_the_agent_begins_when_the_box_is_healthy(tmp_path: Path, attempts: Attempts) -> None:
    check = "[environment.healthcheck]\ninterval_sec = 0.0\n"
    check += "command = '[ -e ready ] || { touch ready; exit 1; }'\n"
    record = await attempts.run(
        write_task(tmp_path, **{"task.toml": TOML + check}), ["ls", "echo done > answer.txt"]
    )
    assert (record.reward, attempts.agent.printed[0]) == (1.0, "ready\n")
    check = "[environment.healthcheck]\ncommand = 'echo no >&2; false'\nretries = 1\n"
    failed = await attempts.run(write_task(tmp_path / "2", **{"task.toml": TOML + check}))
    assert (failed.outcome.kind, failed.outcome.boundary) == ("infra_error", "environment")
    assert "failed 1 times in a row; the last one ended with 1: no" in str(failed.outcome.cause)


ARTIFACTS = """\
artifacts = [
  "/work/out",
  {source = "report.txt", destination = "reports/r.txt"},
  {source = "/work/out/deep", destination = "again"},
  "/work/missing",
]
"""


async def test_artifacts_are_kept_below_the_attempt(tmp_path: Path, attempts: Attempts) -> None:
    task = write_task(tmp_path, **{"task.toml": ARTIFACTS + TOML})
    record = await attempts.run(
        task,
        [
            "echo done > answer.txt; mkdir -p out/deep /logs/artifacts; echo x > out/deep/x",
            "echo r > report.txt; echo p > /logs/artifacts/p; chmod 755 out/deep/x",
        ],
    )
    kept = attempts.scratch / "artifacts/e"
    assert record.reward == 1.0
    assert (kept / "work/out/deep/x").read_text() == "x\n"
    assert (kept / "reports/r.txt").read_text() == "r\n"
    assert (kept / "logs/artifacts/p").read_text() == "p\n"
    assert (kept / "again/x").read_text() == "x\n"
    rows = json.loads((kept / "manifest.json").read_text())
    assert [(row["source"], row["kind"], row["files"], row["bytes"], row["reason"]) for row in rows] == [
        ("/logs/artifacts", "directory", 1, 2, ""),
        ("/work/out", "directory", 1, 2, ""),
        ("report.txt", "file", 1, 2, ""),
        ("/work/out/deep", "directory", 1, 2, ""),
        ("/work/missing", "", 0, 0, "it is not there"),
    ]
    assert record.detail["artifacts"][-1] == {
        "source": "/work/missing", "files": 0, "bytes": 0, "reason": "it is not there",
    }  # fmt: skip


async def test_a_task_without_artifacts_keeps_nothing(tmp_path: Path, attempts: Attempts) -> None:
    record = await attempts.run(
        write_task(tmp_path), ["mkdir -p /logs/artifacts; echo x > /logs/artifacts/x"]
    )
    assert "artifacts" not in record.detail
    assert not (attempts.scratch / "artifacts").exists()


async def test_patterns_leave_files_out_at_any_depth(tmp_path: Path, attempts: Attempts) -> None:
    toml = "artifacts = [{source = '/work/out', exclude = ['*.o', 'cache', 'a/b.txt']}]\n" + TOML
    names = "k.o a/k.o a/b.txt b.txt x/cache/1 x/cache/2"
    make = f"mkdir -p out/a out/x/cache; for name in {names}; do echo > out/$name; done"
    record = await attempts.run(write_task(tmp_path, **{"task.toml": toml}), [make])
    out = attempts.scratch / "artifacts/e/work/out"
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == ["b.txt"]
    assert record.detail["artifacts"][1]["files"] == 1


HOSTILE = {
    "a link out of the directory": "mkdir out; ln -s /etc/passwd out/link; ln -s / out/root",
    "a FIFO in the directory": "mkdir out; mkfifo out/pipe",
    "a FIFO": "mkfifo out",
    "a link to the whole system": "ln -s / out",
    "a link to an endless file": "ln -s /dev/zero out",
    "more than the limit": "head -c 3000000 /dev/zero > out",
    "a directory of more than the limit": "mkdir out; head -c 3000000 /dev/zero > out/x",
    "a sparse file": "truncate -s 1T out 2>/dev/null || truncate -s 1G out",
    "names that are no text": "mkdir out; cd out; touch \"$(printf '\\377')\" \"$(printf 'a\\nb')\" -- -rf",
    "set-user-ID": "mkdir out; cp /bin/sh out/sh; chmod 6777 out/sh",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_artifacts_harm_nobody(tmp_path: Path, attempts: Attempts, name: str) -> None:
    before = sorted(os.listdir("/etc"))
    toml = "artifacts = ['/work/out', '/work/fine.txt']\n" + TOML
    record = await attempts.run(
        write_task(tmp_path, **{"task.toml": toml}),
        [HOSTILE[name], "echo fine > /work/fine.txt; echo done > /work/answer.txt"],
        artifact_mb=2,
    )
    kept = attempts.scratch / "artifacts/e"
    assert record.reward == 1.0
    assert (kept / "work/fine.txt").read_text() == "fine\n"
    for path in kept.rglob("*"):
        assert path.resolve().is_relative_to(kept.resolve())
        assert path.is_file() or path.is_dir()
        assert not path.stat().st_mode & 0o7000
    assert sum(path.stat().st_size for path in kept.rglob("*") if path.is_file()) < 3 << 20
    assert sorted(os.listdir("/etc")) == before


SEPARATE = f"""\
artifacts = ["/work/answer.txt"]
{TOML}
[[verifier.collect]]
command = "mkdir -p /logs/artifacts; echo collected > /logs/artifacts/state.txt"
[[verifier.collect]]
command = "exit 3"
[verifier.environment]
network_mode = "no-network"
"""
LOOKS = """#!/bin/sh
ls /work > /logs/verifier/ls.txt
if [ "$(cat answer.txt)" = done ] && [ "$(cat /logs/artifacts/state.txt)" = collected ] && [ ! -e /work/trap ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
cat /logs/verifier/ls.txt
"""


async def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(
    tmp_path: Path, attempts: Attempts
) -> None:
    task = write_task(tmp_path, **{"task.toml": SEPARATE, "tests/test.sh": LOOKS})
    record = await attempts.run(task, ["echo done > answer.txt; touch trap"])
    assert record.reward == 1.0
    assert record.detail["output"] == "answer.txt"
    assert record.detail["warnings"] == ["collect hook 'exit 3' ended with 3"]
    assert [name for name, _ in attempts.pool.made] == ["main", "verifier"]
    missed = await attempts.run(task, ["touch trap"], name="e2")
    assert missed.reward == 0.0


async def test_a_separate_verifier_may_bring_its_tests(tmp_path: Path, attempts: Attempts) -> None:
    dockerfile = f"FROM {attempts.image}\nWORKDIR /judge\nCOPY . /tests/\n"
    test = (
        "#!/bin/sh\nmkdir -p /logs/verifier\npwd; ls /tests; cat /work/answer.txt\n"
        "echo 1 > /logs/verifier/reward.txt\n"
    )
    files = {"task.toml": SEPARATE, "tests/Dockerfile": dockerfile, "tests/test.sh": test}
    task = write_task(tmp_path, **files)
    record = await attempts.run(task, ["echo mine > answer.txt"])
    assert record.reward == 1.0
    assert record.detail["output"].split() == ["/judge", "Dockerfile", "test.sh", "mine"]


STEPS = f"""\
{TOML}
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
[steps.healthcheck]
command = "test -e set-up"
retries = 1
"""
STEP_TEST = """#!/bin/sh
mkdir -p /logs/verifier; ls -A /tests
n=$(cat answer.txt)
echo "{\\"reward\\": ${n:-0}, \\"step\\": STEP}" > /logs/verifier/reward.json
"""
SECOND = "#!/bin/sh\n[ -e set-up ] && [ ! -e /solution/old ] && echo 1 > answer.txt\n"


def steps(tmp_path: Path, toml: str = STEPS) -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": "",
        "tests/test.sh": STEP_TEST.replace("STEP", "1"),
        "tests/shared.txt": "x",
        "steps/one/instruction.md": "First.",
        "steps/one/workdir/given.txt": "given",
        "steps/one/solution/solve.sh": "#!/bin/sh\necho 0.5 > answer.txt\n",
        "steps/two/instruction.md": "Second.",
        "steps/two/workdir/setup.sh": "rm -f answer.txt; touch set-up",
        "steps/two/tests/test.sh": STEP_TEST.replace("STEP", "2"),
        "steps/one/solution/old": "x",
        "steps/two/solution/solve.sh": SECOND,
    }
    return write_task(tmp_path, **files)


async def test_steps_follow_one_another_in_one_sandbox(tmp_path: Path, attempts: Attempts) -> None:
    look = "find /tests /logs/verifier /solution -mindepth 1 2>/dev/null; cat given.txt"
    record = await attempts.run(
        steps(tmp_path), [look, "echo 0.5 > answer.txt"], [look, "ls", "echo 1 > answer.txt"]
    )
    assert record.reward == 0.75
    assert record.components == {"reward": 0.75, "step": 1.5}
    assert attempts.agent.asked == ["First.", "Second."]
    assert attempts.agent.printed == ["given", "", "given", "given.txt\nset-up\nsetup.sh\n", ""]
    one, two = record.detail["phases"]
    assert (one["step"], one["reward"], one["output"].split()) == ("one", 0.5, ["shared.txt", "test.sh"])
    assert (two["step"], two["reward"]) == ("two", 1.0)
    assert [name for name, _ in attempts.pool.made] == ["main"]


async def test_a_step_below_its_gate_is_the_last(tmp_path: Path, attempts: Attempts) -> None:
    record = await attempts.run(steps(tmp_path), ["echo 0.25 > answer.txt"], ["echo 1 > answer.txt"])
    assert (record.reward, attempts.agent.asked) == (0.25, ["First."])
    gate = STEPS.replace("min_reward = 0.5", "min_reward = {step = 1.5}")
    record = await attempts.run(steps(tmp_path / "2", gate), ["echo 1 > answer.txt"])
    assert (record.reward, attempts.agent.asked) == (1.0, ["First."])


async def test_the_last_step_may_be_what_counts(tmp_path: Path, attempts: Attempts) -> None:
    task = steps(tmp_path, f"multi_step_reward_strategy = 'final'\n{STEPS}")
    record = await attempts.run(task, solve=True)
    assert (record.reward, record.components) == (1.0, {"reward": 1.0, "step": 2.0})
    assert [phase["solution_exit_code"] for phase in record.detail["phases"]] == [0, 0]


async def test_a_step_that_cannot_be_set_up_is_no_reward(tmp_path: Path, attempts: Attempts) -> None:
    task = steps(tmp_path)
    (task / "steps/two/workdir/setup.sh").write_text("echo broken >&2; exit 4")
    record = await attempts.run(task, ["echo 1 > answer.txt"])
    assert (record.outcome.kind, record.outcome.reward) == ("infra_error", None)
    assert record.outcome.cause == "setup.sh of step two ended with 4: broken"


async def test_a_user_of_one_step_is_not_that_of_the_next(tmp_path: Path, attempts: Attempts) -> None:
    toml = STEPS.replace('name = "two"\n', 'name = "two"\n[steps.verifier]\nuser = "nobody"\n')
    toml = toml.replace("min_reward = 0.5\n", '[steps.agent]\nuser = "nobody"\n')
    task = steps(tmp_path, toml)
    for test in ("tests/test.sh", "steps/two/tests/test.sh"):
        (task / test).write_text((task / test).read_text().replace("ls -A /tests", "id -un"))
    record = await attempts.run(task, ["id -un", "echo 1 > answer.txt"], ["id -un", "echo 1 > answer.txt"])
    assert attempts.agent.printed[0::2] == ["nobody\n", "root\n"]
    assert [phase["output"].split()[0] for phase in record.detail["phases"]] == ["root", "nobody"]


async def test_steps_may_have_verifiers_and_users_of_their_own(tmp_path: Path, attempts: Attempts) -> None:
    toml = STEPS.replace(
        'name = "two"\n',
        'name = "two"\n[steps.agent]\nuser = "nobody"\n[steps.verifier]\nenvironment_mode = "separate"\n',
    )
    toml = f"artifacts = ['/work/answer.txt']\n{toml}"
    record = await attempts.run(
        steps(tmp_path, toml),
        ["id -un", "echo 1 > answer.txt; chmod a+w ."],
        ["id -un", "echo 0 > answer.txt"],
    )
    assert attempts.agent.printed[::2] == ["root\n", "nobody\n"]
    assert record.reward == 0.5
    assert [name for name, _ in attempts.pool.made] == ["main", "verifier-2"]
    kept = attempts.scratch / "artifacts/e"
    assert [(kept / step / "work/answer.txt").read_text() for step in ("one", "two")] == ["1\n", "0\n"]


async def test_a_plain_task_starts_no_command_but_the_agents_and_its_tests(
    tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attempts.image != "debian:12":
        return  # elsewhere files are removed by commands
    started: list[str] = []
    acquire = attempts.pool.acquire

    async def counted(*args: Any, **keys: Any) -> Sandbox:
        sandbox = await acquire(*args, **keys)
        start = sandbox._raw.start

        async def noted(argv: list[str], **keys: Any) -> Any:
            started.append(argv[-1])
            return await start(argv, **keys)

        sandbox._raw.start = noted  # type: ignore[method-assign, assignment]
        return sandbox

    monkeypatch.setattr(attempts.pool, "acquire", counted)
    dockerfile = "FROM debian:12\nWORKDIR /work\nCOPY files/ /work/\n"
    files = {"environment/Dockerfile": dockerfile, "environment/files/a": "x"}
    record = await attempts.run(write_task(tmp_path, **files), ["echo done > answer.txt"])
    assert record.reward == 1.0
    assert started == ["echo done > answer.txt", "/tests/test.sh"]


async def test_a_value_from_the_host_reaches_the_sandbox_and_no_record(
    tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HELD_HERE", "sentinel-91c4")
    monkeypatch.setenv("NOT_GIVEN", "sentinel-other")
    toml = (
        f"{TOML}[environment.env]\nKEY = '${{API_KEY}}'\nOTHER = '${{NOT_GIVEN:-nothing}}'\n"
        "[verifier.env]\nAGAIN = '${API_KEY}'\n"
    )
    test = '#!/bin/sh\nmkdir -p /logs/verifier; echo "tests: $AGAIN"; cat seen.txt\n'
    test += "[ $(cat seen.txt) = $AGAIN/nothing ] && echo 1 > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path, **{"task.toml": toml, "tests/test.sh": test})
    script = 'echo "$KEY/$OTHER" > seen.txt'
    record = await attempts.run(task, [script], host_env={"API_KEY": "env:HELD_HERE"})
    assert record.reward == 1.0
    assert record.detail["output"] == "tests: ${API_KEY}\n${API_KEY}/nothing"
    assert "sentinel" not in repr(record) + caplog.text


FAILS = {
    "a reward": ("[verifier.env]\nKEY = '${API_KEY}'\n", "echo $KEY > /logs/verifier/reward.txt"),
    "names of rewards": (
        "[verifier.env]\nKEY = '${API_KEY}'\n",
        'echo "{\\"$KEY\\": 1, \\"b\\": 1}" > /logs/verifier/reward.json',
    ),
    "a health check": (
        "[environment.env]\nKEY = '${API_KEY}'\n[environment.healthcheck]\n"
        "command = 'echo $KEY >&2; false'\nretries = 1\n",
        "",
    ),
    "output that is cut": (
        "[verifier.env]\nKEY = '${API_KEY}'\n",
        'printf "%02000d" 0; printf "%s%01990d" "$KEY" 1; echo 1 > /logs/verifier/reward.txt',
    ),
}


@pytest.mark.parametrize("way", FAILS)
async def test_a_value_from_the_host_is_in_no_reason(
    tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("HELD_HERE", "sentinel-91c4")
    keys, script = FAILS[way]
    files = {"task.toml": TOML + keys, "tests/test.sh": f"#!/bin/sh\n{script}\n"}
    record = await attempts.run(write_task(tmp_path, **files), [], host_env={"API_KEY": "env:HELD_HERE"})
    assert (record.reward is None) == (way != "output that is cut")
    assert not re.search("sentinel|91c4", repr(record))
    assert "API_KEY" in repr(record)


@pytest.mark.parametrize("gone", ["tests", "solution", "environment"])
async def test_a_task_that_goes_away_meanwhile_is_said_in_a_sentence(
    tmp_path: Path, attempts: Attempts, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    files = {"environment/Dockerfile": "FROM debian:12\nCOPY one two/ /work/\n", "environment/one": "1"}
    files |= {"environment/two/x": "2", "solution/solve.sh": "echo done > answer.txt\n"}
    task = write_task(tmp_path, **files)
    remove = attempts.pool.acquire

    async def removing(*arguments: Any, **keys: Any) -> Any:
        (task / gone).rename(tmp_path / "elsewhere")
        return await remove(*arguments, **keys)

    attempts.pool.acquire = removing  # type: ignore[method-assign]
    record = await attempts.run(task, [], solve=gone == "solution")
    assert record.reward is None
    assert re.search(f"task task.* {gone}", str(record.outcome.cause))
    assert not any(entry.exc_info for entry in caplog.records)


async def test_setup_that_fails_does_not_say_a_value_from_the_host(
    tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD_HERE", "sentinel-91c4")
    toml = f"{TOML}[environment.env]\nKEY = '${{API_KEY}}'\n[[steps]]\nname = 'a'\n"
    files = {"steps/a/instruction.md": "Wait.", "steps/a/workdir/setup.sh": "echo $KEY >&2; exit 3\n"}
    task = write_task(tmp_path, **{"task.toml": toml, **files})
    record = await attempts.run(task, [], host_env={"API_KEY": "env:HELD_HERE"})
    assert "setup.sh of step a ended with 3: ${API_KEY}" in str(record.outcome.cause)
