"""`rollhook serve`: environments of ours, played by the real clients of OpenEnv and MCP."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from fastmcp import Client
from fastmcp.exceptions import ToolError

from rollhook.component import Config
from rollhook.environment import Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.errors import UsageError
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.testing.environment import build_context
from rollhook.testing.parts import needs_part
from rollhook.tools import ToolResult
from rollhook_tools.serve.openenv import app
from rollhook_tools.serve.seats import Guest, Table

OPENENV = ["openenv==0.10.0", "fastapi>=0.116", "annotated-doc"]
#: a program that plays with the client of the openenv package: once right, once wrong
OPENENV_CLIENT = r"""
import json, re, sys
from openenv.core.generic_client import GenericEnvClient
def told(said):
    print(json.dumps([said.observation["text"], said.reward, said.done]))
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    for wrong in (0, 1000):
        first = env.reset(seed=3)
        told(first)
        a, sign, b = re.search(r"(\d+) ([+-]) (\d+)", first.observation["text"]).groups()
        answer = int(a) + int(b) * (1 if sign == "+" else -1)
        told(env.step({"message": f"Answer: {answer + wrong}"}))
    print(json.dumps(env.state()))
"""


class Steps:
    """Tools with a memory."""

    def __init__(self):
        self.made = 0

    async def list(self):
        return [{"type": "function", "function": {"name": "step", "parameters": {"type": "object"}}}]

    async def call(self, name, arguments):
        if arguments.get("hang"):
            await asyncio.sleep(60)
        self.made += 1
        return ToolResult(f"step {self.made}")


class Walk(Phase):
    def __init__(self, number):
        self.observation = Observation([message("user", f"Phase {number}: make two steps, then say hello.")])
        self.tools = Steps()

    async def respond(self, said):
        return Observation([message("user", "Hello who?")]) if said["content"] == "hello" else None

    async def verify(self, transcript):
        said = [m["content"] for m in transcript.messages if m["role"] == "assistant" and m["content"]]
        return Verdict((self.tools.made == 2) / 2 + ("hello" in said) / 2)


class Walks(Episode):
    combine = "mean"

    async def phases(self):
        for number in (1, 2):
            yield Walk(number)


class World(Environment):
    verifies_apart = False

    def tasks(self, split=None):
        return [Task(name, name, "train", limits={"agent": 20.0, "verify": 5.0}) for name in ("a", "b")]

    def episode(self, task, ctx):
        if task.id == "b":
            raise RuntimeError("b cannot be played")
        return Walks()


@pytest.fixture
def table():
    """A table over the runtime's own runner."""
    environment = World(Config(), build_context())
    runner = EpisodeRunner(
        name="world", environment=environment, agent=Guest(None, build_context()), pool=None, policy=None,
        limits=Budgets(), outcome_policy=Outcomes(), context=build_context(),
    )  # fmt: skip

    async def episode(agent, task, suffix):
        return (await runner.run(EpisodeRequest(task.id + suffix, "g", task, 0))).record

    return Table(SimpleNamespace(episode=episode), environment.tasks(), most=2)


async def test_an_episode_of_two_phases(table):
    seat, said = await table.sit(table.choose("a", None))
    assert said.text == "Phase 1: make two steps, then say hello."
    assert [tool["function"]["name"] for tool in said.tools] == ["step"]
    assert (await seat.call("step", {})).text == "step 1"
    assert (await seat.call("fly", {})).error
    assert (await seat.call("step", {})).text == "step 2"
    assert (await seat.say("hello")).text == "Hello who?"
    said = await seat.say("nobody")
    assert (said.text, said.done) == ("Phase 2: make two steps, then say hello.", False)
    said = await seat.finish()
    assert (said.done, said.reward) == (True, 0.5)
    assert (await seat.call("step", {})).done
    assert (await seat.say("x")).done
    assert not table.full


async def test_what_cannot_be_played_is_told(table):
    _, said = await table.sit(table.choose("b", None))
    assert (said.done, said.reward, said.error) == (True, None, True)
    assert "b cannot be played" in said.text


async def test_seats_are_few_and_are_left(table):
    seats = [(await table.sit(table.choose("a", None)))[0] for _ in range(2)]
    assert table.full
    with pytest.raises(UsageError, match="2 episodes are open"):
        await table.sit(table.choose("a", None))
    await seats[0].aclose()
    assert not table.full
    await table.aclose()
    with pytest.raises(UsageError, match="no task 'z'"):
        table.choose("z", None)
    assert [table.choose(None, 1).id, table.choose(None, None).id] == ["b", "a"]


async def test_the_openenv_protocol_in_detail(table):
    from aiohttp import web

    runner = web.AppRunner(app(table, "world"), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:

        async def ask(text):
            await socket.send_str(text if isinstance(text, str) else json.dumps(text))
            return json.loads((await socket.receive()).data)

        def code(answer):
            return answer["type"], answer["data"].get("code")

        assert code(await ask("{")) == ("error", "INVALID_JSON")
        assert code(await ask([])) == ("error", "INVALID_JSON")
        assert code(await ask({"type": "dance"})) == ("error", "UNKNOWN_TYPE")
        assert code(await ask({"type": "step", "data": {"message": "x"}})) == ("error", "EXECUTION_ERROR")
        assert code(await ask({"type": "reset", "data": {"task_id": "z"}})) == ("error", "EXECUTION_ERROR")
        assert code(await ask({"type": "reset", "data": {"task_id": "a"}})) == ("observation", None)
        assert code(await ask({"type": "step", "data": {"fly": 1}})) == ("error", "VALIDATION_ERROR")
        assert (await ask({"type": "state"}))["data"] == {"step_count": 0}
        await socket.send_str('{"type": "close"}')
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    await runner.cleanup()
    assert not table.full


@contextmanager
def serving(tmp_path, *argv):
    """Run `rollhook serve` until the block ends; give its address."""
    command = [sys.executable, "-m", "rollhook.cli.main", "serve", *argv, "--port", "0", "--run-id", "s"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"tasks at (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        yield found[1]
    finally:
        process.terminate()
        process.stdout.read()
        process.stdout.close()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_the_client_of_openenv_plays_ours(tmp_path):
    needs_part("rollhook_arithmetic")
    target = tmp_path / "openenv"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, *OPENENV]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        pytest.skip(f"needs pypi (pip did not install {OPENENV}: {done.stderr[-200:]})")

    keys = ["--set", "families=[sums]", "--set", "count=50", "--sandbox", "none"]
    with serving(tmp_path, "arithmetic", "--protocol", "openenv", *keys) as url:
        argv = [sys.executable, "-c", OPENENV_CLIENT, url]
        env = {**os.environ, "PYTHONPATH": str(target)}
        played = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert played.returncode == 0, played.stderr
    first, right, again, wrong, state = [json.loads(line) for line in played.stdout.splitlines()]
    assert "What is" in first[0]
    assert first == again
    assert (first[1:], right[1:], wrong[1:]) == ([None, False], [1.0, True], [0.0, True])
    assert state == {"step_count": 1}


@pytest.mark.slow
async def test_the_client_of_mcp_plays_ours_in_sandboxes(tmp_path):
    needs_part("unshare", "rollhook_local", "rollhook_tbench2")
    with serving(tmp_path, "pocket", "--protocol", "mcp", "--sandbox", "local", "--split", "heldout") as url:
        async with Client(url) as client:
            assert {tool.name for tool in await client.list_tools()} == {
                "tasks",
                "start",
                "call",
                "reply",
                "finish",
            }
            ids = (await client.call_tool("tasks")).data
            task = next(each for each in ids if each.startswith("create-"))
            said = (await client.call_tool("start", {"task_id": task})).data
            assert {tool["function"]["name"] for tool in said["tools"]} == {"exec", "read", "write", "view"}
            play = {"episode": said["episode"]}
            ran = {**play, "tool": "exec", "arguments": {"command": "echo here; id -u"}}
            assert (await client.call_tool("call", ran)).data["text"].startswith("exit code 0\nhere")
            ended = (await client.call_tool("finish", play)).data
            assert (ended["done"], ended["reward"]) == (True, 0.0)
            with pytest.raises(ToolError, match="there is no episode"):
                await client.call_tool("finish", play)
            left = (await client.call_tool("start", {"task_id": task})).data
            assert not left["done"]
    journal = (tmp_path / "runs/s/attempts/1/journal.jsonl").read_text()
    events = Counter(json.loads(line)["event"] for line in journal.splitlines())
    assert events["lease"] == events["lease_released"] >= 2


def test_the_world_is_not_let_in_unasked(tmp_path):
    command = [
        sys.executable,
        "-m",
        "rollhook.cli.main",
        "serve",
        "x",
        "--protocol",
        "mcp",
        "--host",
        "0.0.0.0",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--trust-network" in done.stderr
