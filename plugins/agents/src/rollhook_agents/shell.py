"""The shell agent: a reply is one command, what the command printed is the next message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollhook.agent import Agent, AgentContext, Budget, StopReason
from rollhook.messages import Message, message
from rollhook_agents import ShellConfig
from rollhook_agents.chat import converse

if TYPE_CHECKING:
    from rollhook.sandbox import ExecResult

DONE_WORD = "TASK_COMPLETE"
CORRECTION = "That was no command. Answer with exactly one ```bash block, or TASK_COMPLETE."
# a single argument of execve may hold 128 KiB
_LONGEST_COMMAND = 120_000
_STRICT = re.compile(r"```bash\n(.*?)\n?```", re.DOTALL)
_FENCED = re.compile(r"```[ \t]*(?:bash|sh|shell|console|python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)
_INLINE = re.compile(r"```(.+?)```", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What a reply asks for: run a `command`, stop (`done`), or neither (`malformed`)."""

    kind: Literal["command", "done", "malformed"]
    command: str = ""


class Shell(Agent):
    """One command per turn, until TASK_COMPLETE or the budget ends.

    A reply that was cut for length is never executed and ends the episode. A malformed one (see
    `parse_reply`) is answered with a short correction, `corrections` times per episode. In a phase without a
    sandbox, as other environments of a mix may have, a reply is an answer, as with the chat agent.
    """

    needs_sandbox = True

    async def run(self, context: AgentContext) -> StopReason:
        """Talk and run commands."""
        config: ShellConfig = self.config
        if context.sandbox is None:
            return await converse(context)
        messages = list(context.observation.messages)
        corrections = 0
        while context.budget.turns_left > 0:
            reply = await context.session.chat(messages)
            if reply.finish_reason == "length":
                return StopReason.LENGTH
            messages.append(reply.message)
            action = parse_reply(reply.message["content"] or "", config.parse)
            if action.kind == "done":
                return StopReason.DONE
            if action.kind == "command":
                answer = await self._execute(context, action.command)
            elif corrections < config.corrections:
                corrections += 1
                answer = CORRECTION
            else:
                return StopReason.DONE
            if config.show_budget:
                answer = f"{answer}\n{format_budget(context.budget, reply.tokens_left)}"
            messages.append(message("user", answer))
            messages.extend(await _spoken(context, reply.message))
        return StopReason.MAX_TURNS

    async def _execute(self, context: AgentContext, command: str) -> str:
        config: ShellConfig = self.config
        assert context.sandbox is not None
        result = await context.sandbox.exec([*config.shell, command], timeout=config.command_timeout)
        return format_exec(result, limit=config.output_limit)


async def _spoken(context: AgentContext, said: Message) -> list[Message]:
    observation = await context.respond(said)
    return [] if observation is None else list(observation.messages)


def parse_reply(text: str, mode: Literal["strict", "fenced", "lenient"]) -> Action:
    """Return what a reply asks for.

    `strict`: the whole reply, surrounding space aside, is one ```bash block, or TASK_COMPLETE. `fenced`:
    the first fenced block, or a reply that begins with TASK_COMPLETE in any case. `lenient`: as fenced,
    and a reply without a fence is itself the command. Empty commands, and those that no shell can be
    given (a NUL character, over 120,000 bytes), are malformed.
    """
    text = text.strip()
    if mode == "strict":
        if text == DONE_WORD:
            return Action("done")
        match = _STRICT.fullmatch(text)
        return _command(match[1] if match and "```" not in match[1] else "")
    if text.upper().startswith(DONE_WORD):
        return Action("done")
    match = _FENCED.search(text) or _INLINE.search(text)
    if match is not None:
        command = match[1].strip()
        return Action("done") if command.upper().startswith(DONE_WORD) else _command(command)
    return _command(text if mode == "lenient" and "```" not in text else "")


def _command(command: str) -> Action:
    if not command.strip() or "\0" in command or len(command.encode(errors="replace")) > _LONGEST_COMMAND:
        return Action("malformed")
    return Action("command", command)


def format_exec(result: ExecResult, *, limit: int) -> str:
    """Return the message for a finished command of a sandbox."""
    lost = max(0, result.stdout_bytes - len(result.stdout)) + max(0, result.stderr_bytes - len(result.stderr))
    return format_result(
        None if result.timed_out else result.exit_code,
        result.stdout,
        result.stderr,
        limit=limit,
        seconds=result.duration,
        lost=lost,
    )


def format_result(
    exit_code: int | None,
    stdout: bytes | str,
    stderr: bytes | str = b"",
    *,
    limit: int,
    seconds: float = 0.0,
    lost: int = 0,
) -> str:
    r"""Return what the agent is told of a command: `exit code {n}\n{output}`.

    The output is stdout, then stderr, without its trailing newlines; of more than `limit` characters the
    middle is replaced by how many were cut, `lost` bytes that the sandbox itself dropped included.
    Without an exit code the command ran out of time, after `seconds`.
    """
    head = f"exit code {exit_code}" if exit_code is not None else f"timed out after {seconds:.0f} s"
    parts = [part for part in (_text(stdout).rstrip("\n"), _text(stderr).rstrip("\n")) if part]
    return f"{head}\n{cut_middle(chr(10).join(parts), limit, lost)}"


def cut_middle(text: str, limit: int, lost: int = 0) -> str:
    """Return text with all but its first and last `limit`/2 characters replaced by how many they were."""
    if len(text) <= limit and not lost:
        return text
    kept = min(limit, len(text))
    tail = kept // 2
    head = kept - tail
    cut = len(text) - kept + lost
    return f"{text[:head]}[{cut} characters cut]{text[len(text) - tail :]}"


def format_budget(budget: Budget, tokens_left: int) -> str:
    """Return the line that tells an agent what it may still use."""
    return f"[left: {budget.turns_left} turns, {tokens_left} tokens, {budget.seconds_left:.0f} s]"


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode(errors="replace")
