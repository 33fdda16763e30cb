"""The contract of agents: inherit `AgentContract` (or `ChatAgentContract`), give it an agent, run pytest."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from rollhook.agent import Agent, AgentContext, Reply, StopReason
from rollhook.environment import Observation
from rollhook.errors import BudgetExceeded, EngineError, RollhookError, SandboxDead, SandboxError
from rollhook.messages import Message, ToolSchema, message
from rollhook.sandbox import ExecResult
from rollhook.testing.contract import Contract

TASK = "Create the file a.txt."
PATIENCE = 20.0


@dataclass
class ScriptedSession:
    """A session that says its script: texts, (text, finish reason) pairs, or exceptions to raise.

    After the script it repeats the last entry. `requests` holds a copy of every conversation that it was
    asked with. It refuses a conversation that does not go on from its last reply.
    """

    script: Sequence[str | tuple[str, str] | BaseException]
    turns: int = 20
    requests: list[list[Message]] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    altered: bool = False

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> Reply:
        """Say the next entry."""
        await asyncio.sleep(0)
        self._compare(messages)
        self.requests.append(copy.deepcopy(list(messages)))
        if len(self.requests) > self.turns:
            return Reply(message("assistant", ""), "length", 10, 0, 0)
        entry = self.script[min(len(self.requests), len(self.script)) - 1]
        if isinstance(entry, BaseException):
            raise entry
        text, reason = entry if isinstance(entry, tuple) else (entry, "stop")
        said = message("assistant", text)
        self.replies.append(said)
        return Reply(said.copy(), reason, 10, 5, 1000 - 15 * len(self.requests))

    @property
    def turns_left(self) -> int:
        """Turns left."""
        return max(0, self.turns - len(self.requests))

    def _compare(self, messages: Sequence[Message]) -> None:
        if self.requests:
            before = [*self.requests[-1], self.replies[-1]]
            self.altered |= [dict(m) for m in messages[: len(before)]] != [dict(m) for m in before]


@dataclass
class ScriptedSandbox:
    """A sandbox that answers commands with `answer`, a result or an exception; `commands` logs them."""

    answer: ExecResult | BaseException | Callable[[Sequence[str]], ExecResult] = field(
        default_factory=lambda: result(b"done\n")
    )
    commands: list[list[str]] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)

    async def exec(self, argv: Sequence[str], *, timeout: float | None = None, **keys: Any) -> ExecResult:
        """Log the command and answer."""
        await asyncio.sleep(0)
        self.commands.append(list(argv))
        self.timeouts.append(timeout)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(argv) if callable(self.answer) else self.answer

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return nothing of any file."""
        return b""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Take the bytes."""


@dataclass
class ScriptedBudget:
    """What is left: the session's turns, and fixed tokens and seconds."""

    session: ScriptedSession
    tokens_left: int = 1000
    seconds_left: float = 600.0

    @property
    def turns_left(self) -> int:
        """Turns left."""
        return self.session.turns_left


def result(stdout: bytes = b"", stderr: bytes = b"", exit_code: int | None = 0, **keys: Any) -> ExecResult:
    """Return how a command ended, with the byte counts filled in."""
    counts = {"stdout_bytes": len(stdout), "stderr_bytes": len(stderr)}
    return ExecResult(stdout, stderr, exit_code, **{"timed_out": exit_code is None, **counts, **keys})


def context(
    session: ScriptedSession | None = None,
    sandbox: ScriptedSandbox | None = None,
    *,
    messages: Sequence[Message] | None = None,
    respond: Mapping[str, Sequence[Message]] | None = None,
    solve: Callable[[], Any] | None = None,
) -> AgentContext:
    """Return what an agent gets; `respond` maps a reply's text to what the environment says after it."""
    session = session or ScriptedSession(["TASK_COMPLETE"])
    spoken = respond or {}

    async def speak(said: Message) -> Observation | None:
        answer = spoken.get(said["content"] or "")
        return None if answer is None else Observation(answer)

    return AgentContext(
        session=session,
        observation=Observation([message("user", TASK)] if messages is None else messages),
        budget=ScriptedBudget(session),
        sandbox=sandbox or ScriptedSandbox(),  # type: ignore[arg-type]
        tools=None,
        respond=speak,
        seed=0,
        solve=solve,
        episode_id="e",
    )


class AgentContract(Contract):
    """What every agent must do. A suite gives the fixture `agent`, built as the runtime builds it."""

    @pytest.fixture
    def agent(self) -> Agent:
        """Return the agent under test."""
        raise NotImplementedError("give the contract a fixture agent")

    def script(self) -> Sequence[str]:
        """Return replies after which the agent stops of its own accord."""
        return ["TASK_COMPLETE"]

    async def test_it_says_why_it_stopped(self, agent: Agent) -> None:
        assert StopReason(await self._run(agent)) in StopReason

    async def test_it_serves_many_episodes_at_once(self, agent: Agent) -> None:
        alone = await self._trace(agent)
        together = await asyncio.gather(*(self._trace(agent) for _ in range(8)))
        assert all(trace == alone for trace in together)

    async def test_it_leaves_the_observation_as_it_is(self, agent: Agent) -> None:
        messages = (message("system", "Be brief."), message("user", TASK))
        before = copy.deepcopy(messages)
        await self._run(agent, messages=messages)
        assert messages == before

    async def test_it_asks_the_policy_only_if_it_says_so(self, agent: Agent) -> None:
        session = ScriptedSession(self.script())
        await self._run(agent, session)
        assert bool(session.requests) == agent.needs_policy

    async def test_it_uses_the_solution_only_if_it_says_so(self, agent: Agent) -> None:
        solved: list[bool] = []
        await self._run(agent, solved=solved)
        assert bool(solved) == agent.needs_solution

    async def test_without_the_solution_that_it_needs_it_refuses(self, agent: Agent) -> None:
        if not agent.needs_solution:
            pytest.skip("needs no solution")
        with pytest.raises(RollhookError):
            await asyncio.wait_for(agent.run(context()), PATIENCE)

    async def test_it_can_be_closed_twice(self, agent: Agent) -> None:
        await agent.aclose()
        await agent.aclose()

    async def _run(
        self,
        agent: Agent,
        session: ScriptedSession | None = None,
        sandbox: ScriptedSandbox | None = None,
        *,
        solved: list[bool] | None = None,
        **keys: Any,
    ) -> StopReason:
        async def solve() -> None:
            if solved is not None:
                solved.append(True)

        session = session or ScriptedSession(self.script())
        return await asyncio.wait_for(agent.run(context(session, sandbox, solve=solve, **keys)), PATIENCE)

    async def _trace(self, agent: Agent) -> tuple[Any, ...]:
        session, sandbox = ScriptedSession(self.script()), ScriptedSandbox()
        reason = await self._run(agent, session, sandbox)
        return reason, session.requests, sandbox.commands


class ChatAgentContract(AgentContract):
    """What an agent must do that asks the policy. A suite says what its replies look like.

    `command_reply` makes the agent act in its sandbox (None: it never does), `done_reply` makes it stop.
    """

    command_reply: ClassVar[str | None] = "```bash\nls\n```"
    done_reply: ClassVar[str] = "TASK_COMPLETE"

    def script(self) -> Sequence[str]:
        """Return an action, if there is one, and the end."""
        return [*([self.command_reply] if self.command_reply is not None else []), self.done_reply]

    async def test_the_conversation_begins_with_the_observation(self, agent: Agent) -> None:
        session = ScriptedSession(self.script())
        await self._run(agent, session)
        asked = [m["content"] for m in session.requests[0]]
        assert TASK in (asked[-1] or "")

    async def test_replies_are_passed_back_unchanged(self, agent: Agent) -> None:
        session = ScriptedSession([*self.script()[:-1], *self.script()])
        await self._run(agent, session)
        assert len(session.requests) == len(self.script()) * 2 - 1
        assert not session.altered

    async def test_it_stops_when_the_policy_says_that_it_is_done(self, agent: Agent) -> None:
        session = ScriptedSession([self.done_reply])
        assert await self._run(agent, session) == StopReason.DONE
        assert len(session.requests) == 1

    async def test_it_asks_no_more_than_its_turns(self, agent: Agent) -> None:
        session = ScriptedSession([self.script()[0]], turns=3)
        reason = await self._run(agent, session)
        assert len(session.requests) <= 3
        if self.command_reply is not None:
            assert reason == StopReason.MAX_TURNS

    async def test_without_turns_it_asks_nothing(self, agent: Agent) -> None:
        session = ScriptedSession(self.script(), turns=0)
        assert await self._run(agent, session) == StopReason.MAX_TURNS
        assert not session.requests

    async def test_a_reply_that_was_cut_is_not_acted_on(self, agent: Agent) -> None:
        session, sandbox = ScriptedSession([(self.script()[0], "length")]), ScriptedSandbox()
        assert await self._run(agent, session, sandbox) == StopReason.LENGTH
        assert not sandbox.commands
        assert len(session.requests) == 1

    @pytest.mark.parametrize(
        "text", ["", " \n", "```", "```bash\n```", "\x00", "\ufffd", "a" * 5000, "```\n" * 200]
    )
    async def test_a_strange_reply_ends_or_is_answered(self, agent: Agent, text: str) -> None:
        session = ScriptedSession([text], turns=6)
        assert await self._run(agent, session) in StopReason
        assert len(session.requests) <= 6
        assert not session.altered

    async def test_what_a_command_printed_is_in_the_next_request(self, agent: Agent) -> None:
        self._acts()
        session, sandbox = ScriptedSession(self.script()), ScriptedSandbox(result(b"printed\n"))
        await self._run(agent, session, sandbox)
        assert len(sandbox.commands) == 1
        assert "printed" in (session.requests[1][-1]["content"] or "")

    async def test_a_failed_command_is_told_with_its_code_and_its_errors(self, agent: Agent) -> None:
        self._acts()
        failed = ScriptedSandbox(result(b"", b"no such file\n", 17))
        session = ScriptedSession(self.script())
        await self._run(agent, session, failed)
        told = session.requests[1][-1]["content"] or ""
        assert "17" in told
        assert "no such file" in told

    async def test_hostile_output_is_text_and_bounded(self, agent: Agent) -> None:
        self._acts()
        session = ScriptedSession(self.script())
        await self._run(agent, session, ScriptedSandbox(result(b"\xff\x00\xed\xa0\x80" * 200_000)))
        told = session.requests[1][-1]["content"] or ""
        told.encode()
        assert len(told) < 100_000

    async def test_a_command_that_ran_out_of_time_is_told(self, agent: Agent) -> None:
        self._acts()
        session = ScriptedSession(self.script())
        await self._run(agent, session, ScriptedSandbox(result(b"half", exit_code=None, duration=5.0)))
        assert "half" in (session.requests[1][-1]["content"] or "")

    @pytest.mark.parametrize("error", [EngineError("no engine"), BudgetExceeded("over", node="agent")])
    async def test_what_the_session_raises_passes(self, agent: Agent, error: RollhookError) -> None:
        with pytest.raises(type(error)):
            await self._run(agent, ScriptedSession([error]))

    @pytest.mark.parametrize(
        "error", [SandboxError("broken"), SandboxDead("gone"), BudgetExceeded("over", node="agent")]
    )
    async def test_what_the_sandbox_raises_passes(self, agent: Agent, error: RollhookError) -> None:
        self._acts()
        with pytest.raises(type(error)):
            await self._run(agent, ScriptedSession(self.script()), ScriptedSandbox(error))

    async def test_a_cancelled_agent_stops(self, agent: Agent) -> None:
        with pytest.raises(asyncio.CancelledError):
            await self._run(agent, ScriptedSession([asyncio.CancelledError()]))

    async def test_the_environment_is_heard(self, agent: Agent) -> None:
        first = self.script()[0]
        if first == self.done_reply:
            pytest.skip("stops at the first reply")
        session = ScriptedSession(self.script())
        await self._run(agent, session, respond={first: [message("user", "one more thing")]})
        assert any(m["content"] == "one more thing" for m in session.requests[1])

    def _acts(self) -> None:
        if self.command_reply is None:
            pytest.skip("runs no commands")
