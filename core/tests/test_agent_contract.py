"""The agent contract passes for an agent that keeps it, and each broken one fails just its cases."""

import asyncio

import pytest

from rollhook.agent import Agent, StopReason
from rollhook.component import Config
from rollhook.errors import SandboxDead
from rollhook.messages import message
from rollhook.testing.agent import AgentContract, ChatAgentContract
from rollhook.testing.contract import failing_cases
from rollhook.testing.environment import build_context


class Echo(Agent):
    """Runs each reply as a command until TASK_COMPLETE."""

    def __init__(self):
        super().__init__(Config(), build_context())

    async def run(self, context):
        messages = list(context.observation.messages)
        while context.budget.turns_left:
            reply = await context.session.chat(messages)
            if reply.finish_reason == "length":
                return StopReason.LENGTH
            messages.append(reply.message)
            if reply.message["content"] == "TASK_COMPLETE":
                return StopReason.DONE
            await self.act(context, messages, reply.message["content"])
            observation = await context.respond(reply.message)
            messages += observation.messages if observation else []
        return StopReason.MAX_TURNS

    async def act(self, context, messages, command):
        result = await context.sandbox.exec(["sh", "-c", command], timeout=1)
        messages.append(message("user", self.shown(result)))

    def shown(self, result):
        return f"{result.exit_code} {(result.text + result.error_text)[:100]}"


class Solver(Agent):
    """Applies the solution."""

    needs_policy = False
    needs_solution = True

    def __init__(self):
        super().__init__(Config(), build_context())

    async def run(self, context):
        if context.solve is None:
            raise SandboxDead("no solution")
        await context.solve()
        return StopReason.DONE


class TestEcho(ChatAgentContract):
    command_reply = "ls"

    @pytest.fixture
    def agent(self):
        return Echo()


class TestSolver(AgentContract):
    @pytest.fixture
    def agent(self):
        return Solver()


class Stateful(Echo):
    """Keeps the conversation on itself."""

    messages = None

    async def act(self, context, messages, command):
        self.messages = messages
        await asyncio.sleep(0)
        await super().act(context, self.messages, command)


class Greedy(Echo):
    """Asks once more than it may."""

    async def run(self, context):
        reason = await super().run(context)
        if reason == StopReason.MAX_TURNS:
            await context.session.chat(list(context.observation.messages))
        return reason


class Rash(Echo):
    """Runs commands of replies that were cut."""

    async def run(self, context):
        reason = await super().run(context)
        if reason == StopReason.LENGTH:
            await context.sandbox.exec(["ls"])
        return reason


class Mute(Echo):
    """Shows only what a command printed on stdout."""

    def shown(self, result):
        return result.text[:100]


class Flood(Echo):
    """Shows everything, bytes that are no text included."""

    def shown(self, result):
        return f"{result.exit_code} " + (result.stdout + result.stderr).decode(errors="surrogateescape")


class Swallower(Echo):
    """Takes a broken sandbox for a failed command."""

    async def act(self, context, messages, command):
        try:
            await super().act(context, messages, command)
        except Exception:
            messages.append(message("user", "it failed"))


class Editor(Echo):
    """Tidies up its own replies."""

    async def act(self, context, messages, command):
        messages[-1] = message("assistant", command.strip() + "!")
        await super().act(context, messages, command)


class Vandal(Echo):
    """Writes into the observation."""

    async def run(self, context):
        context.observation.messages[0]["content"] += " Please."
        return await super().run(context)


class Cheat(Echo):
    """Uses a solution that it never declared."""

    async def run(self, context):
        if context.solve is not None:
            await context.solve()
        return await super().run(context)


class Deaf(Echo):
    """Does not hear the environment."""

    async def run(self, context):
        async def silence(said):
            return None

        object.__setattr__(context, "respond", silence)
        return await super().run(context)


TURNS = {"test_it_asks_no_more_than_its_turns", "test_without_turns_it_asks_nothing"}


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (Stateful, {"test_it_serves_many_episodes_at_once"}),
        (Greedy, TURNS | {"test_a_strange_reply_ends_or_is_answered"}),
        (Rash, {"test_a_reply_that_was_cut_is_not_acted_on"}),
        (Mute, {"test_a_failed_command_is_told_with_its_code_and_its_errors"}),
        (Flood, {"test_hostile_output_is_text_and_bounded"}),
        (Swallower, {"test_what_the_sandbox_raises_passes"}),
        (
            Editor,
            {"test_replies_are_passed_back_unchanged", "test_a_strange_reply_ends_or_is_answered"},
        ),
        (Vandal, {"test_it_leaves_the_observation_as_it_is"}),
        (Cheat, {"test_it_uses_the_solution_only_if_it_says_so"}),
        (Deaf, {"test_the_environment_is_heard"}),
    ],
)
def test_a_broken_agent_fails_just_its_cases(broken, cases):
    class Suite(ChatAgentContract):
        command_reply = "ls"

    failed = failing_cases(Suite, {"agent": broken, "text": lambda: "", "error": lambda: SandboxDead("gone")})
    assert failed == cases
