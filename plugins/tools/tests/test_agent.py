"""The tools agent: calls, their results, and everything that can be wrong with them."""

import asyncio
import dataclasses
import json

import pytest
from fastmcp import Client, FastMCP
from fastmcp.exceptions import ToolError as Refusal
from hypothesis import given
from hypothesis import strategies as st

from rollhook.agent import Reply, StopReason
from rollhook.budgets import AgentClock
from rollhook.errors import BudgetExceeded, SandboxDead, ToolError
from rollhook.messages import message
from rollhook.runtime.views import OnAgentClock
from rollhook.sandbox.tools import SandboxTools
from rollhook.testing.agent import ChatAgentContract, ScriptedSession, context
from rollhook.testing.environment import build_context
from rollhook.testing.parts import needs_part
from rollhook.tools import ToolResult
from rollhook_tools import ToolsConfig
from rollhook_tools.agent import ToolCalling, parse_arguments
from rollhook_tools.mcp import opened


def tools_agent(**keys):
    return ToolCalling(ToolsConfig(**keys), build_context())


class TestTools(ChatAgentContract):
    command_reply = None
    done_reply = "Done."

    @pytest.fixture
    def agent(self):
        return tools_agent()


class Calling(ScriptedSession):
    """A session that says its script of replies, each a text or a list of (name, arguments) to call."""

    def __init__(self, script, **keys):
        super().__init__(script, **keys)
        self.schemas = []

    async def chat(self, messages, *, tools=None):
        self.schemas.append(tools)
        entry = self.script[min(len(self.requests), len(self.script) - 1)]
        calls = entry if isinstance(entry, list) else []
        reply = await super().chat(messages, tools=tools)
        if reply.finish_reason == "length":
            return reply
        said = message("assistant", "" if calls else entry)
        if calls:
            said["tool_calls"] = [
                {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)
            ]
        self.replies[-1] = said
        return dataclasses.replace(reply, message=said, finish_reason="tool_calls" if calls else "stop")


def server():
    made = FastMCP("demo")
    made.under_way = made.most = 0

    @made.tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @made.tool
    async def slow(seconds: float) -> str:
        made.under_way += 1
        made.most = max(made.most, made.under_way)
        try:
            await asyncio.sleep(seconds)
        finally:
            made.under_way -= 1
        return "at last"

    @made.tool
    def refuse() -> str:
        raise Refusal("not today")

    @made.tool
    def nothing() -> None:
        return None

    @made.tool
    def much(size: int) -> str:
        return "x" * size

    return made


async def play(tools, *script, clock=None, **keys):
    """Run the agent; return why it stopped, the session, the results that it told, and what it noted."""
    session, noted = Calling(list(script)), {}
    asked = dataclasses.replace(context(session), tools=tools, note=noted.update)
    if clock is not None:
        asked = dataclasses.replace(asked, on_clock=OnAgentClock(clock, asyncio.get_running_loop().time))
    reason = await tools_agent(**keys).run(asked)
    told = [m["content"] for m in (session.requests[-1] if session.requests else []) if m["role"] == "tool"]
    return reason, session, told, noted.get("calls", {})


def test_replies_are_what_a_session_gives():
    assert Reply(message("assistant", ""), "stop", 1, 1, 1)


async def test_calls_of_a_reply_are_made_and_told_in_their_order():
    calls = [("slow", '{"seconds": 0.05}'), ("add", '{"a": 1, "b": 2}'), ("nothing", "")]
    reason, session, told, noted = await play(server(), calls, "Three.")
    assert reason == StopReason.DONE
    assert told == ["at last", "3", "(no output)"]
    assert [m.get("tool_call_id") for m in session.requests[1][-3:]] == ["c0", "c1", "c2"]
    assert [tool["function"]["name"] for tool in session.schemas[0]] == [
        "add",
        "slow",
        "refuse",
        "nothing",
        "much",
    ]
    assert session.schemas[0][0]["function"]["parameters"]["required"] == ["a", "b"]
    assert noted == {"done": 3}
    assert not session.altered


async def test_calls_of_a_reply_run_at_once_as_far_as_they_may():
    made = server()
    await play(made, [("slow", '{"seconds": 0.05}')] * 6, "Done.", parallel=3)
    assert made.most == 3


@pytest.mark.parametrize(
    ("call", "told", "counted"),
    [
        (("add", "{"), "error: the arguments are not JSON", "malformed"),
        (("add", "[1, 2]"), "error: the arguments must be a JSON object", "malformed"),
        (("add", "[" * 100_000), "error: the arguments are not JSON", "malformed"),
        (("add", '{"a": "x", "b": 2}'), "error: ", "failed"),
        (("add", "{}"), "error: ", "failed"),
        (
            ("search_web英文明确", "{}"),
            "error: there is no tool 'search_web英文明确'; there are add, slow",
            "unknown",
        ),
        (("refuse", "{}"), "error: not today", "failed"),
        (("slow", '{"seconds": 30}'), "error: slow gave no answer within 0.2 s", "timed_out"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_and_the_others_are_made(call, told, counted):
    reason, _, results, noted = await play(
        server(), [call, ("add", '{"a": 1, "b": 2}')], "Done.", call_timeout=0.2
    )
    assert reason == StopReason.DONE
    assert results[0].startswith(told), results
    assert results[1] == "3"
    assert noted == {counted: 1, "done": 1}


async def test_more_calls_than_may_be_are_refused():
    _, _, told, noted = await play(server(), [("add", '{"a": 1, "b": 2}')] * 4, "Done.", calls=2)
    assert told == ["3", "3", *["error: at most 2 calls in one reply"] * 2]
    assert noted == {"done": 2, "too_many": 2}


async def test_long_and_strange_output_is_cut_text():
    class Strange:
        async def list(self):
            return [{"type": "function", "function": {"name": "f", "parameters": {}}}]

        async def call(self, name, arguments):
            return ToolResult("\ud800" + "a" * 100)

    _, _, told, _ = await play(server(), [("much", '{"size": 5000}')], "Done.", output_limit=100)
    assert told == ["x" * 50 + "[4900 characters cut]" + "x" * 50]
    _, _, told, _ = await play(Strange(), [("f", "{}")], "Done.")
    assert told == ["?" + "a" * 100]


async def test_a_reply_that_was_cut_calls_nothing():
    made = server()
    session = Calling([[("add", '{"a": 1, "b": 2}')]], turns=0)
    asked = dataclasses.replace(context(session), tools=made)
    assert await tools_agent().run(asked) == StopReason.MAX_TURNS
    session = Calling([("Cut", "length")])
    assert await tools_agent().run(dataclasses.replace(context(session), tools=made)) == StopReason.LENGTH


async def test_calls_are_on_the_agents_clock():
    clock = AgentClock(0.5)
    with pytest.raises(BudgetExceeded) as raised:
        await play(server(), [("slow", '{"seconds": 30}')], "Done.", clock=clock)
    assert raised.value.node == "agent"
    assert 0.5 <= clock.used["command"] < 5


async def test_a_call_past_the_limit_of_a_command_is_told():
    clock = AgentClock(30.0, command=0.2)
    reason, _, told, _ = await play(server(), [("slow", '{"seconds": 30}')], "Done.", clock=clock)
    assert reason == StopReason.DONE
    assert told == ["error: slow gave no answer within 0.2 s"]
    assert 0.2 <= clock.used["command"] < 5


async def test_without_tools_a_call_is_answered_and_a_reply_is_an_answer():
    reason, session, told, _ = await play(None, [("add", "{}")], "Done.")
    assert (reason, told) == (StopReason.DONE, ["error: there is no tool 'add'; there are none"])
    assert session.schemas == [None, None]


async def test_machinery_that_fails_is_the_episodes_error():
    class Broken:
        async def list(self):
            return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]

        async def call(self, name, arguments):
            if name == "g":
                await asyncio.sleep(60)
            raise SandboxDead("gone")

    with pytest.raises(SandboxDead):
        await play(Broken(), [("g", "{}"), ("f", "{}")], "Done.")


async def test_servers_clients_and_tools_are_taken_and_nothing_else():
    async with Client(server()) as client, opened(client) as tools:
        assert (await tools.call("add", {"a": 2, "b": 2})).content == "4"
    with pytest.raises(ToolError, match="neither Tools nor FastMCP"):
        async with opened(3):
            pass


ANY = st.recursive(st.none() | st.integers(), st.lists).map(json.dumps)


@given(st.text(max_size=50) | ANY)
def test_any_arguments_are_read(text):
    assert isinstance(parse_arguments(text), dict | str)


async def test_a_sandbox_as_tools(tmp_path):
    needs_part("bubblewrap", "rollhook_local")
    from rollhook.sandbox import SandboxSpec
    from rollhook.testing.boxes import open_box_with

    async with open_box_with("local", tmp_path)(SandboxSpec()) as box:
        calls = [
            ("write", json.dumps({"path": "d/a.txt", "content": "one\ntwo 日本\nthree"})),
            ("exec", json.dumps({"command": "wc -l d/a.txt; echo oops >&2; exit 3"})),
            ("exec", json.dumps({"command": "sleep 9", "timeout": 1})),
            ("read", '{"path": "d/a.txt"}'),
            ("view", '{"path": "d/a.txt", "first": 2, "last": 2}'),
            ("read", '{"path": "none"}'),
            ("read", '{"path": "/etc"}'),
            ("write", '{"path": "x"}'),
            ("exec", '{"command": "a\\u0000b"}'),
            ("view", '{"path": "d/a.txt", "first": "2"}'),
            ("exec", '{"command": "ls", "user": "root"}'),
        ]
        _, _, told, _ = await play(SandboxTools(box), *[[call] for call in calls], "Done.")
    assert told == [
        "wrote 20 bytes",
        "exit code 3\n2 d/a.txt\noops",
        "error: timed out after 1 s",
        "one\ntwo 日本\nthree",
        "     2  two 日本",
        "error: No such file or directory",
        "error: Is a directory",
        "error: the argument content is missing",
        "error: command must be text",
        "error: first must be a whole number, 1 or more",
        "error: there is no argument user; there are command, timeout",
    ]
