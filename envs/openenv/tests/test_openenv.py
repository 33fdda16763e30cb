"""A real server of the openenv package as an environment, well and ill."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

from rollhook.environment import Transcript
from rollhook.errors import TaskError, UsageError
from rollhook.messages import message
from rollhook.testing.environment import EnvironmentContract, build_context, entered
from rollhook_openenv import OpenEnvConfig
from rollhook_openenv.client import OpenEnvSession
from rollhook_openenv.environment import OpenEnv, shown

SERVER = Path(__file__).with_name("guess_server.py")
TASKS = [
    {"id": "seven", "reset": {"seed": 7}, "prompt": "Play.", "solution": [{"number": 1}, {"number": 7}]},
    {"id": "three", "reset": {"seed": 3}, "solution": [{"number": 3}], "split": "heldout", "family": "low"},
    {"id": "unrewarded", "reset": {"seed": 1, "kind": "unrewarded"}},
    {"id": "broken", "reset": {"kind": "broken"}, "split": "x"},
    {"id": "refused", "reset": {"kind": "refused"}, "split": "x"},
    {"id": "die", "reset": {"kind": "die"}, "split": "x"},
]


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS) + "[]\n")
    return str(path)


def environment(tmp_path, **keys):
    return OpenEnv(OpenEnvConfig(**keys), build_context(tmp_path))


def task_of(environment, name):
    return next(task for task in environment.tasks() if task.id == name)


class TestOpenEnv(EnvironmentContract):
    task_limit = 2

    @pytest.fixture
    def make_environment(self, guess_url, tasks_file, tmp_path):
        return lambda: environment(tmp_path, url=guess_url, tasks_file=tasks_file)

    @pytest.fixture
    def problem_task(self):
        return "tasks.jsonl:7"


async def play(environment, name, *calls):
    """Call the tool as the agent does; return the first observation, what was told, and the verdict."""
    async with entered(environment, task_of(environment, name), None) as phases:
        phase = await anext(phases)
        told = [(await phase.tools.call("step", call)) for call in calls]
        verdict = await phase.verify(Transcript(list(phase.observation.messages), "done"))
        return phase.observation.messages[-1]["content"], told, verdict


async def test_an_episode_by_calls(guess_url, tasks_file, tmp_path):
    made = environment(tmp_path, url=guess_url, tasks_file=tasks_file)
    first, told, verdict = await play(
        made, "seven", {"number": 1}, {"number": "x"}, {"number": 7}, {"number": 7}
    )
    assert first == "Play.\n\nGuess my number between 0 and 9."
    assert told[0].content == "higher"
    assert told[1].is_error
    assert "number" in told[1].content
    assert told[2].content == "right\nThe episode is over."
    assert (told[3].content, told[3].is_error) == ("the episode is over", True)
    assert (verdict.reward, verdict.components) == (1.0, {"steps": 2.0, "refused": 1.0})


async def test_the_schema_of_the_tool_is_the_servers(guess_url, tmp_path):
    made = environment(tmp_path, url=guess_url + "/", seeds=30)
    async with entered(made, made.tasks()[0], None) as phases:
        (schema,) = await (await anext(phases)).tools.list()
    assert schema["function"]["description"] == "Say a number."
    assert set(schema["function"]["parameters"]["properties"]) == {"number"}
    assert {task.split for task in made.tasks()} == {"train", "heldout"}


async def test_an_episode_by_replies(tmp_path):
    """A double of a server whose action is a text: it says what it was told, twice."""
    seen = []

    async def ws(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            said = json.loads(frame.data)
            seen.append(said)
            if said["type"] == "close":
                break
            text = said["data"].get("message", "Hello.")
            data = {"observation": {"echo": text, "metadata": {}}, "reward": 0.5, "done": len(seen) > 2}
            await socket.send_str(json.dumps({"type": "observation", "data": data}))
        return socket

    async with double(ws) as url:
        made = environment(tmp_path, url=url, act="reply", reward="sum", seeds=1)
        async with entered(made, made.tasks()[0], None) as phases:
            phase = await anext(phases)
            assert phase.tools is None
            said = await phase.respond(message("assistant", "one"))
            assert [m["content"] for m in said.messages] == ["one"]
            assert await phase.respond(message("assistant", "two")) is None
            assert await phase.respond(message("assistant", "three")) is None
            assert (await phase.verify(Transcript([], "done"))).reward == 1.0
    assert [each["type"] for each in seen] == ["reset", "step", "step", "close"]


class double:
    """A server on a port of its own that only has `/ws`."""

    def __init__(self, handler):
        app = web.Application()
        app.router.add_get("/ws", handler)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self):
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *exception):
        await self.runner.cleanup()


async def test_an_end_without_any_reward_is_no_zero(guess_url, tasks_file, tmp_path):
    made = environment(tmp_path, url=guess_url, tasks_file=tasks_file)
    _, _, verdict = await play(made, "unrewarded", {"number": 1})
    assert (verdict.reward, verdict.detail["reason"]) == (
        None,
        "the episode is over and no step gave a reward",
    )
    _, _, verdict = await play(made, "unrewarded")
    assert verdict.reward == 0.0


async def test_what_the_environment_raises_is_told(guess_url, tasks_file, tmp_path):
    made = environment(tmp_path, url=guess_url, tasks_file=tasks_file)
    _, (told,), _ = await play(made, "broken", {"number": 1})
    assert (told.content, told.is_error) == ("the environment is broken", True)
    with pytest.raises(TaskError, match="does not take the task's reset: no such kind"):
        await play(made, "refused")


async def test_a_server_of_its_own_is_started_once_and_again_after_its_death(openenv, tasks_file, tmp_path):
    argv = [sys.executable, str(SERVER), "{port}"]
    made = environment(tmp_path, argv=argv, env=openenv, tasks_file=tasks_file)
    try:
        with pytest.raises(TaskError, match=r"ended the session amid step|is gone"):
            await play(made, "die", {"number": 1})
        _, _, verdict = await play(made, "three", {"number": 3})
        assert verdict.reward == 1.0
        pid = made._server._process.pid
    finally:
        await made.aclose()
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.nightly
async def test_a_server_of_the_oldest_release(oldest_openenv, tasks_file, tmp_path):
    argv = [sys.executable, str(SERVER), "{port}"]
    made = environment(tmp_path, argv=argv, env=oldest_openenv, tasks_file=tasks_file)
    try:
        _, told, verdict = await play(made, "three", {"number": "x"}, {"number": 3})
    finally:
        await made.aclose()
    assert [result.is_error for result in told] == [True, False]
    assert verdict.reward == 1.0


async def test_a_full_server_is_waited_for(openenv, tasks_file, tmp_path):
    argv = [sys.executable, str(SERVER), "{port}", "1"]
    made = environment(tmp_path, argv=argv, env=openenv, tasks_file=tasks_file)
    try:
        verdicts = await asyncio.gather(*(play(made, "three", {"number": 3}) for _ in range(3)))
    finally:
        await made.aclose()
    assert [verdict.reward for _, _, verdict in verdicts] == [1.0] * 3


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"url": "http://127.0.0.1:9", "start_seconds": 0.5},
            "no session within 0.5 s: Cannot connect to host",
        ),
        ({"argv": ["no-such-program", "{port}"]}, "no-such-program cannot be started"),
        (
            {"argv": [sys.executable, "-c", "import sys; sys.exit(5)", "{port}"]},
            "ended with exit code 5; see",
        ),
        ({"argv": [sys.executable, "-c", "input() or 1", "{port}"], "start_seconds": 5}, "exit code 1; see"),
    ],
)
async def test_a_server_that_is_not_there_is_told(tmp_path, keys, why):
    made = environment(tmp_path, seeds=1, **keys)
    try:
        with pytest.raises(TaskError, match=why):
            await play(made, "seed-0")
    finally:
        await made.aclose()


ODD = [
    "no json", "[]", "{}", '{"type": "state", "data": {}}', "x" * 5000,
    '{"type": "observation", "data": {"observation": 1}}',
    '{"type": "observation", "data": {"observation": {}, "reward": "1"}}',
    '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "odd"}}',
]  # fmt: skip


async def connect(url, *, seconds, most):
    async def where():
        return url

    return await OpenEnvSession.connect(where, {}, {}, seconds=seconds, most=most)


@pytest.mark.parametrize("answer", ODD)
async def test_hostile_answers_are_errors(answer):
    async def ws(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_str(answer)
        return socket

    async with double(ws) as url:
        with pytest.raises(TaskError):
            await connect(url, seconds=5, most=4096)


async def test_a_silent_server_and_one_of_another_kind_are_told():
    async def ws(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        return socket

    async with double(ws) as url:
        with pytest.raises(TaskError, match=r"no session within 0.3 s"):
            await connect(url, seconds=0.3, most=4096)
        with pytest.raises(TaskError, match="/ws answers 404"):
            await connect(f"{url}/other", seconds=5, most=4096)


def test_task_files_that_make_no_sense(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        environment(tmp_path, url="http://x", tasks_file=str(tmp_path / "none")).tasks()
    file = tmp_path / "t.jsonl"
    file.write_text('{"id": "a"}\n{"id": "a"}')
    with pytest.raises(UsageError, match=":2 says 'a' a second time"):
        environment(tmp_path, url="http://x", tasks_file=str(file)).tasks()
    file.write_text('x\n{"id": 1}\n{"id": "b", "odd": 1}\n{"id": "c", "reset": 1}')
    found = environment(tmp_path, url="http://x", tasks_file=str(file)).tasks()
    assert [bool(task.problem) for task in found] == [True] * 4


@pytest.mark.parametrize(
    ("observation", "fields", "text"),
    [
        ({"text": "a", "metadata": {"x": 1}}, (), "a"), ({"a": "x", "n": 0}, (), '{"a": "x", "n": 0}'),
        ({"a": "x", "b": "y"}, ("b",), "y"), ({}, (), ""), ({"a": None, "b": ""}, (), ""),
        ({"a": [1]}, (), '{"a": [1]}'),
    ],
)  # fmt: skip
def test_observations_as_text(observation, fields, text):
    assert shown(observation, fields) == text


def test_a_server_is_one_of_the_two():
    for keys in ({}, {"argv": ["x", "{port}"], "url": "http://x"}, {"argv": ["x"]}):
        with pytest.raises(ValueError, match=r"argv"):
            OpenEnvConfig(**keys)
