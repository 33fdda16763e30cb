"""The command agent: any program that speaks OpenAI's or Anthropic's protocol to the session's address."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from rollhook.agent import Agent, AgentContext, Endpoint, StopReason
from rollhook.errors import AgentError
from rollhook_agents.config import CommandConfig
from rollhook_agents.programs import Program
from rollhook_agents.relay import Relay

#: where a sandbox has the task's text, with `task: file`
TASK_FILE = "/tmp/rollhook-task.md"  # noqa: S108 - a path inside
#: of this machine's environment a program beside the sandbox gets these
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_TOLD = 500


class Command(Agent):
    """Starts a program, gives it the session's address and waits for its end.

    The program's time runs on the agent's clock, but for that of its turns, which is counted as that of any
    agent. At the end of the clock it is killed with all that it started. It is done when its exit code is one
    of `done_codes`; another is an AgentError.
    """

    config: CommandConfig

    @classmethod
    def asks_from(cls, config: CommandConfig) -> Literal["machine", "sandbox"]:
        """Return from where requests come: a forwarder's come from this machine."""
        return "sandbox" if config.where == "sandbox" and config.reach != "relay" else "machine"

    async def run(self, context: AgentContext) -> StopReason:
        """Run the program."""
        endpoint, config = context.endpoint, self.config
        if endpoint is None:
            raise AgentError("agent command needs a policy that is served over HTTP", kind="user")
        if config.where == "sandbox" and context.sandbox is None:
            raise AgentError(
                "agent command works in a sandbox, and this phase has none; set agent.where=host", kind="user"
            )
        if context.budget.turns_left <= 0:
            return StopReason.MAX_TURNS
        secrets = {name: self.context.secret(str(each)) for name, each in config.secrets.items()}
        async with AsyncExitStack() as stack:
            program = await self._prepare(context, endpoint, secrets, stack)
            run = program.run_here() if config.where == "host" else program.run_in(_sandbox(context))
            try:
                await endpoint.attend(run)
            finally:
                context.note(self._kept(program, [endpoint.token, *secrets.values()]))
        return self._ended(context, endpoint, program)

    async def _prepare(
        self, context: AgentContext, endpoint: Endpoint, secrets: Mapping[str, str], stack: AsyncExitStack
    ) -> Program:
        config = self.config
        text = task_text(context)
        if config.where == "host":
            directory = await asyncio.to_thread(self._directory)
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, directory, True)
            url, workdir, file = endpoint.url, config.workdir or directory, f"{directory}/task.md"
            inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ} | {
                "HOME": directory
            }
            if config.task == "file":
                await asyncio.to_thread(Path(file).write_text, text, "utf-8")
        else:
            url = await self._reach(context, endpoint, stack)
            workdir, file, inherited = config.workdir or "", TASK_FILE, {}
            if config.task == "file":
                await _sandbox(context).write(file, text.encode())
        words = {"task": text, "task_file": file, "url": url, "model": config.model, "workdir": workdir}
        env = {
            **inherited,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": endpoint.token,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": endpoint.token,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "ROLLHOOK_MODEL": config.model,
            "ROLLHOOK_SESSION_URL": url,
            **({"ROLLHOOK_TASK": text} if config.task == "env" else {}),
            **({"ROLLHOOK_TASK_FILE": file} if config.task == "file" else {}),
            **{name: filled(value, words) for name, value in config.env.items()},
            **secrets,
        }
        return Program(
            [filled(part, words) for part in config.argv],
            env,
            workdir or None,
            text.encode() if config.task == "stdin" else None,
            config.output_limit,
        )

    async def _reach(self, context: AgentContext, endpoint: Endpoint, stack: AsyncExitStack) -> str:
        """Return the session's base URL in the sandbox."""
        config = self.config
        if config.reach == "url" or (config.reach == "auto" and endpoint.public_url is not None):
            if endpoint.public_url is None:
                raise AgentError("agent.reach is url, and gateway.public_url is not set", kind="user")
            return endpoint.public_url
        target, token = endpoint.url, endpoint.token
        return (await stack.enter_async_context(Relay(_sandbox(context), config.python, target, token))).url

    def _directory(self) -> str:
        self.context.scratch.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="agent-", dir=self.context.scratch.absolute())

    def _kept(self, program: Program, hidden: list[str]) -> dict[str, Any]:
        def text(data: bytes) -> str:
            shown = data.decode("utf-8", "replace")
            for value in filter(None, hidden):
                shown = shown.replace(value, "[secret]")
            return shown

        return {
            "exit_code": program.exit_code,
            "stdout": text(program.stdout.value()),
            "stderr": text(program.stderr.value()),
            "bytes": [program.stdout.total, program.stderr.total],
        }

    def _ended(self, context: AgentContext, endpoint: Endpoint, program: Program) -> StopReason:
        if context.budget.turns_left <= 0:
            return StopReason.MAX_TURNS
        if endpoint.finish_reason == "length":
            return StopReason.LENGTH
        if program.exit_code in self.config.done_codes:
            return StopReason.DONE
        said = self._kept(program, [endpoint.token])["stderr"].strip()[-_TOLD:]
        raise AgentError(
            f"agent.argv: {self.config.argv[0]} ended with exit code {program.exit_code} after "
            f"{endpoint.turns} turns, none of agent.done_codes: {said or 'it wrote nothing to stderr'}"
        )


def task_text(context: AgentContext) -> str:
    """Return what the program is told to do: the observation's messages, one after another."""
    return "\n\n".join(m["content"] for m in context.observation.messages if m["content"])


def filled(text: str, words: Mapping[str, str]) -> str:
    """Return text with each `{word}` replaced; other braces stay as they are."""
    parts = text
    for name in ("task_file", "url", "model", "workdir"):
        parts = parts.replace("{" + name + "}", words[name])
    return words["task"].join(parts.split("{task}"))


def _sandbox(context: AgentContext) -> Any:
    assert context.sandbox is not None
    return context.sandbox
