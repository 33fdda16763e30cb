"""The command agent: real programs, here and in real sandboxes, against a real gateway."""

import asyncio
import contextlib
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
from playing import assert_exact, playing

from rollhook.agent import StopReason
from rollhook.environment import Observation
from rollhook.messages import message
from rollhook.session import Renderer
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.parts import needs_part
from rollhook.testing.policy import says
from rollhook.testing.tokenizer import write_tokenizer
from rollhook_agents import CommandConfig
from rollhook_agents.command import filled, task_text
from rollhook_agents.programs import kill_marked

#: a client of OpenAI's protocol, of nothing but the standard library
CLIENT = r"""
import json, os, sys, urllib.request
base = os.environ["OPENAI_BASE_URL"]
messages = [{"role": "user", "content": os.environ.get("ROLLHOOK_TASK", "?")}]
def ask():
    body = json.dumps({"model": os.environ["ROLLHOOK_MODEL"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as reply:
        choice = json.load(reply)["choices"][0]
    messages.append(choice["message"])
    return choice
"""
MORE = 'messages.append({"role": "user", "content": "go on"})'
TWO_TURNS = f'{CLIENT}ask(); {MORE}; print(ask()["message"]["content"])'


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def backend(tmp_path):
    needs_part("bubblewrap", "rollhook_local")
    from rollhook.testing.boxes import started

    async with started("local", tmp_path / "sandboxes") as backend:
        yield backend


@pytest.fixture(params=["here", "inside"])
async def place(request, tmp_path):
    """Give no backend, for a program on this machine, or one, for a program in a sandbox."""
    if request.param == "here":
        yield None
        return
    needs_part("bubblewrap", "rollhook_local")
    from rollhook.testing.boxes import started

    async with started("local", tmp_path / "sandboxes") as backend:
        yield backend


def python(text):
    return [sys.executable, "-c", text]


def python_inside(text):
    return ["/usr/bin/python3", "-c", text]


async def test_a_program_on_this_machine_drives_its_session(directory, tmp_path):
    async with playing(directory, tmp_path, argv=python(TWO_TURNS)) as played:
        result = await played.run()
    record = result.record
    assert (record.ended, record.outcome.kind, record.turns) == ("done", "scored", 2)
    assert record.detail["agent"] == {"exit_code": 0, "stdout": "two\n", "stderr": "", "bytes": [4, 0]}
    (heard,) = played.phase.heard
    assert [m["content"] for m in heard.messages] == ["Be brief.\n\nSay two things.", "one", "go on", "two"]
    assert len(result.samples) == 1
    assert_exact(played, result)


async def test_a_program_in_a_sandbox_without_a_network_reaches_its_session_and_nothing_else(
    directory, tmp_path, backend
):
    text = (
        TWO_TURNS
        + r"""
def get(path):
    try:
        return urllib.request.urlopen(os.environ["ROLLHOOK_SESSION_URL"] + path).status
    except urllib.error.HTTPError as error:
        return error.code
paths = "/v1/models", "/health", "/sessions/other/v1/models", "/v1/../health", "/v1/models/../../x"
print([get(p) for p in paths])
import socket
try:
    socket.create_connection(("1.1.1.1", 80), 2)
except OSError as error:
    print("no network")
"""
    )
    keys = {"token": "t0ken-of-the-gateway", "argv": python_inside(text)}
    async with playing(directory, tmp_path, backend=backend, **keys) as played:
        result = await played.run()
    record = result.record
    assert (record.ended, record.outcome.kind, record.turns) == ("done", "scored", 2), record
    assert record.detail["agent"]["stdout"] == "two\n[200, 404, 404, 404, 404]\nno network\n"
    assert not record.warnings
    assert "t0ken" not in json.dumps(record.detail)


@pytest.mark.parametrize("how", ["argv", "file", "env", "stdin"])
async def test_it_is_told_what_to_do(directory, tmp_path, place, how):
    read = {
        "argv": "import sys; print(sys.argv[1])",
        "file": "import os; print(open(os.environ['ROLLHOOK_TASK_FILE']).read())",
        "env": "import os; print(os.environ['ROLLHOOK_TASK'])",
        "stdin": "import sys; print(sys.stdin.read())",
    }[how]
    argv = (python_inside if place else python)(read) + (["{task}"] if how == "argv" else [])
    async with playing(directory, tmp_path, backend=place, argv=argv, task=how) as played:
        result = await played.run()
    assert result.record.detail["agent"]["stdout"] == "Be brief.\n\nSay two things.\n"


async def test_at_the_end_of_its_time_it_is_killed_with_its_tree(directory, tmp_path, place):
    name = f"tree-{os.getpid()}-{place is None}"
    text = (
        "import subprocess, sys, time; print('begun', flush=True); "
        f"subprocess.Popen(['setsid', sys.executable, '-c', 'import time; time.sleep(600)', '{name}']);"
        "time.sleep(600)"
    )
    argv = (python_inside if place else python)(text)
    async with playing(directory, tmp_path, backend=place, argv=argv, limits={"agent": 1.0}) as played:
        began = time.monotonic()
        result = await played.run()
    assert time.monotonic() - began < 20
    record = result.record
    assert (record.ended, record.fired, record.used_by) == ("agent_timeout", "agent", "command")
    assert record.detail["agent"]["stdout"] == "begun\n"
    assert 0.9 < record.timings["agent/command"] < 5
    assert not running(name)


def running(name):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            found += [pid] if name.encode() in file.read().split(b"\0") else []
    return found


async def test_its_clock_stands_still_during_its_turns(directory, tmp_path):
    engine = FakeEngine(says(Renderer(directory), "one", "two"), latency=1.0)
    async with playing(directory, tmp_path, engine=engine, argv=python(TWO_TURNS)) as played:
        result = await played.run()
    record = result.record
    assert record.outcome.kind == "scored"
    assert record.timings["agent"] > 2.0
    assert record.timings["agent/command"] < record.timings["agent"] - 1.5


@pytest.mark.parametrize(
    ("text", "limits", "ended"),
    [
        (CLIENT + "ask()", {}, "done"),
        (f"{CLIENT}for n in range(9): ask(); {MORE}", {"turns": 2}, "max_turns"),
        (CLIENT + "ask()", {"reply_tokens": 1}, "length"),
        ("", {"turns": 1}, "done"),
    ],
)
async def test_why_it_ended(directory, tmp_path, text, limits, ended):
    replies = ("a longer reply", "and another")
    async with playing(directory, tmp_path, *replies, argv=python(text), limits=limits) as played:
        result = await played.run()
    assert (result.record.ended, result.record.outcome.kind) == (ended, "scored")


@pytest.mark.parametrize(
    ("keys", "says_why"),
    [
        ({"argv": python("import sys; sys.exit('no module named agent')")}, "exit code 1 after 0 turns"),
        ({"argv": ["no-such-program"]}, "exit code 127|cannot be started"),
        ({"argv": python("import os; os.kill(os.getpid(), 9)")}, "exit code (-9|137)"),
    ],
)
async def test_a_program_that_fails_never_trains(directory, tmp_path, keys, says_why):
    async with playing(directory, tmp_path, **keys) as played:
        result = await played.run()
    outcome = result.record.outcome
    assert (outcome.kind, outcome.boundary) == ("infra_error", "agent")
    assert outcome.cause
    assert __import__("re").search(says_why, outcome.cause), outcome.cause
    assert not result.samples


async def test_a_program_that_asks_nothing_leaves_the_observation_as_the_conversation(directory, tmp_path):
    async with playing(directory, tmp_path, argv=["true"]) as played:
        await played.run()
    assert [m["content"] for m in played.phase.heard[0].messages] == ["Be brief.", "Say two things."]


async def test_other_exit_codes_may_be_good_ones(directory, tmp_path):
    argv = python(CLIENT + "ask(); sys.exit(3)")
    async with playing(directory, tmp_path, argv=argv, done_codes=[0, 3]) as played:
        assert (await played.run()).record.outcome.kind == "scored"


async def test_an_engine_that_failed_last_is_no_end_of_the_agent(directory, tmp_path):
    """Invariant 1: the program hides the failure; nothing of it trains."""
    hides = "try: ask()\nexcept Exception: print('hidden')"
    async with playing(directory, tmp_path, argv=python(f"{CLIENT}ask(); {MORE}\n{hides}")) as played:
        first = played.engine.reply

        def reply(ids, params):
            played.engine.fail("/generate", 400, times=9)
            return first(ids, params)

        played.engine.reply = reply
        result = await played.run()
    assert result.record.detail["agent"]["stdout"] == "hidden\n"
    assert (result.record.outcome.kind, result.record.outcome.boundary) == ("infra_error", "engine")
    assert not result.samples


async def test_secrets_reach_the_program_and_no_record(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3ntinel-value")
    monkeypatch.setenv("UNRELATED", "stays-outside")
    text = "from os import environ as e; print(e['KEY'], e['OPENAI_API_KEY'], 'UNRELATED' in e, e['HI'])"
    keys = {"argv": python(text), "secrets": {"KEY": "env:A_KEY"}, "env": {"HI": "{model} at {other}"}}
    async with playing(directory, tmp_path, **keys) as played:
        result = await played.run()
    assert result.record.detail["agent"]["stdout"] == "[secret] [secret] False policy at {other}\n"
    assert "s3ntinel" not in repr(result) + repr(played.runner.agent.config)


async def test_a_missing_secret_is_told_before_anything_starts(directory, tmp_path):
    keys = {"argv": python("print(1)"), "secrets": {"KEY": "env:NOT_SET_ANYWHERE"}}
    async with playing(directory, tmp_path, **keys) as played:
        result = await played.run()
    assert "NOT_SET_ANYWHERE" in result.record.outcome.cause


async def test_without_python_in_the_sandbox_the_way_out_is_told(directory, tmp_path, backend):
    keys = {"argv": ["true"], "python": "python-of-nobody"}
    async with playing(directory, tmp_path, backend=backend, **keys) as played:
        result = await played.run()
    assert "agent.python: python-of-nobody does not run the forwarder" in result.record.outcome.cause


async def test_a_session_token_drives_its_session_only(directory, tmp_path):
    import aiohttp

    async with (
        playing(directory, tmp_path, token="whole", argv=["true"]) as played,
        aiohttp.ClientSession() as http,
    ):
        played.policy.open("a", max_seq_len=99, reply_tokens=9, turns=1)
        played.policy.open("b", max_seq_len=99, reply_tokens=9, turns=1)
        token = played.gateway.session_token("a")

        async def status(path, given=token, method="GET"):
            headers = {"Authorization": f"Bearer {given}"}
            async with http.request(method, played.gateway.url + path, headers=headers) as response:
                return response.status

        assert await status("/sessions/a/v1/models") == 200
        assert await status("/sessions/b/v1/models") == 401
        assert await status("/sessions/a", method="DELETE") == 401
        assert await status("/sessions", method="POST") == 401
        assert await status("/sessions/b/v1/models", "whole") == 200
        assert await status("/sessions/a/v1/models", "") == 401


async def test_a_cancelled_episode_leaves_no_program(directory, tmp_path):
    name = f"cancelled-{os.getpid()}"
    argv = [*python("import time; print(1, flush=True); time.sleep(600)"), name]
    async with playing(directory, tmp_path, argv=argv) as played:
        task = asyncio.create_task(played.run())
        while not running(name):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not running(name)


def test_only_the_known_words_are_filled_in():
    words = {"task": "a {url}", "url": "u", "model": "m", "workdir": "w", "task_file": "f"}
    assert filled("{task}|{url}|{model}|{workdir}|{task_file}|{x}|{", words) == "a {url}|u|m|w|f|{x}|{"


def test_a_task_without_its_place_is_refused():
    with pytest.raises(ValueError, match="nowhere does"):
        CommandConfig(argv=["x"], task="argv")
    with pytest.raises(ValueError, match="task: argv only"):
        CommandConfig(argv=["x", "{task}"])


def test_nothing_carries_a_mark_that_nobody_gave():
    assert kill_marked("nobody") == 0
    assert (
        task_text(SimpleNamespace(observation=Observation([message("user", "a"), message("user", "")])))
        == "a"
    )
    assert StopReason("done")
