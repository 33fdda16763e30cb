"""Real MCP servers as environments: over stdio and HTTP, well and ill."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollhook.environment import Transcript
from rollhook.errors import TaskError, UsageError
from rollhook.messages import message
from rollhook.secrets import resolve_secret
from rollhook.testing.environment import EnvironmentContract, build_context, entered
from rollhook_mcp import McpConfig
from rollhook_mcp.environment import McpEnvironment, reward_of

SERVER = Path(__file__).with_name("counter_server.py")


def call(tool, **arguments):
    return {"tool": tool, "arguments": arguments}


COUNT = {
    "id": "three",
    "prompt": "Bring the counter to 3.",
    "family": "count",
    "setup": [call("add", amount=1)],
    "solution": [call("add", amount=2)],
    "check": call("judge", target=3),
}
SAY = {"id": "say", "prompt": "Say yes.", "reply": " YES ", "check": {"equals": "yes"}}
TASKS = [
    COUNT,
    SAY,
    {
        "id": "number",
        "prompt": "Say it.",
        "reply": "It is 42.",
        "check": {"matches": r"\b42\b"},
        "split": "b",
    },
    {"id": "unjudged", "prompt": "Anything.", "split": "c", "check": {"tool": "no_judge"}},
]


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS) + '{"id": "broken", "prompt": "x"}\n')
    return str(path)


@pytest.fixture(scope="module")
def http_server():
    """Serve over HTTP in a process of its own; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "--http", str(port)])
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def environment(tasks_file, tmp_path, *flags, **keys):
    keys = {"argv": [sys.executable, str(SERVER), *flags]} | keys
    return McpEnvironment(
        McpConfig(tasks_file=tasks_file, **keys), build_context(tmp_path, secret=resolve_secret)
    )


def task_of(environment, name):
    return next(task for task in environment.tasks() if task.id == name)


class TestHttp(EnvironmentContract):
    task_limit = 2

    @pytest.fixture
    def make_environment(self, tasks_file, tmp_path, http_server):
        return lambda: environment(tasks_file, tmp_path, argv=[], url=http_server)

    @pytest.fixture
    def problem_task(self):
        return "tasks.jsonl:5"

    @pytest.fixture
    def no_reward_task(self):
        return "unjudged"


async def play(environment, name, *calls, said="done"):
    """Make calls as the tools agent does; return their texts, the names of the tools, and the verdict."""
    async with entered(environment, task_of(environment, name), None) as phases:
        phase = await anext(phases)
        told = []
        for tool, arguments in calls:
            result = await phase.tools.call_tool_mcp(tool, arguments)
            told.append(result.content[0].text if result.content else "")
        names = {tool.name for tool in await phase.tools.list_tools()}
        messages = [*phase.observation.messages, message("assistant", said)]
        return told, names, await phase.verify(Transcript(messages, "done"))


async def test_an_episode_over_stdio(tasks_file, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3ntinel")
    monkeypatch.setenv("UNRELATED", "x")
    keys = {"hidden": ["slow"], "system_prompt": "Count.", "secrets": {"KEY": "env:A_KEY"}}
    made = environment(tasks_file, tmp_path, "--noise", "--mark-of-this-test", **keys)
    calls = ("add", {"amount": 2}), ("judge", {"target": 3}), ("slow", {}), ("secret", {})
    told, names, verdict = await play(made, "three", *calls)
    assert told == ["3", "there is no tool 'judge'", "there is no tool 'slow'", "KEY"]
    assert names == {"add", "no_judge", "die", "much", "secret"}
    assert (verdict.reward, json.loads(verdict.detail["result"])) == (1.0, {"reward": 1.0})
    assert "s3ntinel" not in repr(made.config)
    for _ in range(100):
        left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"--mark-of-this-test" in read(p)]
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(left)


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_an_episode_over_http(tasks_file, tmp_path, http_server):
    made = environment(tasks_file, tmp_path, argv=[], url=http_server)
    assert (await play(made, "three", ("add", {"amount": 5})))[2].reward == 0.0
    _, names, verdict = await play(made, "say", said=" Yes")
    assert verdict.reward == 1.0
    assert "judge" in names


@pytest.mark.parametrize(("said", "reward"), [("it was 42, I think", 1.0), ("420", 0.0), ("", 0.0)])
async def test_a_reply_is_searched(tasks_file, tmp_path, http_server, said, reward):
    made = environment(tasks_file, tmp_path, argv=[], url=http_server)
    _, _, verdict = await play(made, "number", said=said)
    assert verdict.reward == reward


async def test_long_results_are_cut(tasks_file, tmp_path, http_server):
    made = environment(tasks_file, tmp_path, argv=[], url=http_server, result_bytes=1000)
    assert (await play(made, "say", ("much", {})))[0] == ["x" * 1000]


async def test_a_server_that_dies_is_an_error_and_no_reward(tasks_file, tmp_path):
    with pytest.raises(Exception, match=r"\S") as raised:
        await asyncio.wait_for(play(environment(tasks_file, tmp_path), "three", ("die", {})), 20)
    assert not isinstance(raised.value, TimeoutError)


@pytest.mark.parametrize(
    ("flags", "keys", "why"),
    [
        (["--slow"], {"start_seconds": 0.5}, "not ready within 0.5 s"),
        (["--garbage"], {}, "cannot be used|not ready"),
        ([], {"argv": ["no-such-program-at-all"]}, "cannot be used: .*no-such-program-at-all"),
        ([], {"argv": [sys.executable, "-c", "print('bye')"]}, "cannot be used|not ready"),
        ([], {"argv": [], "url": "http://127.0.0.1:9/mcp"}, "cannot be used|not ready"),
    ],
)
async def test_a_server_that_does_not_come_up_is_told(tasks_file, tmp_path, flags, keys, why):
    made = environment(tasks_file, tmp_path, *flags, **{"start_seconds": 5.0} | keys)
    with pytest.raises(TaskError, match=why):
        await asyncio.wait_for(play(made, "say"), 30)


async def test_how_the_stderr_of_a_server_that_does_not_come_up_ends_is_told(
    tasks_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_KEY", "s3ntinel")
    code = (
        "import os, sys; print('x' * 99999, file=sys.stderr); sys.exit('no luck with ' + os.environ['KEY'])"
    )
    keys = {"argv": [sys.executable, "-c", code], "secrets": {"KEY": "env:A_KEY"}, "start_seconds": 20.0}
    for workdir in (None, str(tmp_path)):
        with pytest.raises(TaskError, match=r"cannot be used: .* no luck with ") as raised:
            await play(environment(tasks_file, tmp_path, **keys, workdir=workdir), "say")
        assert "s3ntinel" not in str(raised.value)
        assert len(str(raised.value)) < 1000


async def test_what_an_earlier_server_said_is_not_told(tasks_file, tmp_path):
    Path(tmp_path, "server.log").write_text("an old story\n")
    keys = {"argv": [sys.executable, "-c", "print('bye')"], "workdir": str(tmp_path), "start_seconds": 20.0}
    with pytest.raises(TaskError, match="cannot be used") as raised:
        await play(environment(tasks_file, tmp_path, **keys), "say")
    assert "old story" not in str(raised.value)


async def test_a_setup_that_fails_is_told(tmp_path, http_server):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({**COUNT, "setup": [{"tool": "add", "arguments": {"amount": "x"}}]}))
    with pytest.raises(TaskError, match="setup calls add, which fails"):
        await play(environment(str(file), tmp_path, argv=[], url=http_server), "three")


@pytest.mark.parametrize(
    ("text", "structured", "reward"),
    [
        ("1", None, 1.0), ("true", None, 1.0), ("0.25", None, 0.25), ('{"reward": 0.5}', None, 0.5),
        ("", {"reward": 1}, 1.0), ("", {"result": 0.5}, 0.5), ("", {"result": {"reward": 0}}, 0.0),
        ("yes", None, None), ("NaN", None, None), ('{"reward": "1"}', None, None), ("1e999", None, None),
        ("[" * 100_000, None, None),
    ],
)  # fmt: skip
def test_what_a_check_says(text, structured, reward):
    assert reward_of(text, structured) == reward


def test_task_files_that_make_no_sense(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        environment(str(tmp_path / "none.jsonl"), tmp_path).tasks()
    file = tmp_path / "t.jsonl"
    file.write_text(f"{json.dumps(SAY)}\n\n{json.dumps(SAY)}\n")
    with pytest.raises(UsageError, match=":3 says 'say' a second time"):
        environment(str(file), tmp_path).tasks()
    two = {**SAY, "id": "b", "check": {"equals": "a", "matches": "b"}}
    wrong = {**SAY, "id": "c", "check": {"matches": "("}}
    file.write_text("\n".join(["no json", json.dumps(two), json.dumps(wrong)]))
    problems = [task.problem for task in environment(str(file), tmp_path).tasks()]
    assert "not JSON" in problems[0]
    assert "one of equals, matches, tool" in problems[1]
    assert "no regular expression" in problems[2]


def test_a_server_is_one_of_the_two():
    for keys in ({}, {"argv": ["x"], "url": "http://x"}):
        with pytest.raises(ValueError, match="either argv"):
            McpConfig(tasks_file="t", **keys)
