"""The chat agent, and the shell agent where there is no sandbox."""

import dataclasses

import pytest

from rollhook.agent import StopReason
from rollhook.messages import message
from rollhook.testing.agent import ChatAgentContract, ScriptedSession, context
from rollhook.testing.environment import build_context
from rollhook_agents import ChatConfig, ShellConfig
from rollhook_agents.chat import Chat
from rollhook_agents.shell import Shell


def chat():
    return Chat(ChatConfig(), build_context())


class TestChat(ChatAgentContract):
    command_reply = None
    done_reply = "Done."

    @pytest.fixture
    def agent(self):
        return chat()


@pytest.mark.parametrize("agent", [chat(), Shell(ShellConfig(), build_context())])
async def test_it_talks_for_as_long_as_the_environment_does(agent):
    session = ScriptedSession(["one", "two", "three"])
    asked = context(session, respond={"one": [message("user", "more")], "two": [message("user", "again")]})
    assert await agent.run(dataclasses.replace(asked, sandbox=None)) == StopReason.DONE
    assert [m["content"] for m in session.requests[-1]][1:] == ["one", "more", "two", "again"]


@pytest.mark.parametrize("agent", [chat(), Shell(ShellConfig(), build_context())])
async def test_it_stops_when_its_turns_are_used_up(agent):
    session = ScriptedSession(["again"], turns=3)
    asked = context(session, respond={"again": [message("user", "more")]})
    assert await agent.run(dataclasses.replace(asked, sandbox=None)) == StopReason.MAX_TURNS
    assert len(session.requests) == 3
