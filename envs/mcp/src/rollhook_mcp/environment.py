"""environment.mcp: an episode is a client of its own, with a server of its own where that is on stdio."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from rollhook.component import BuildContext
from rollhook.environment import (
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.errors import AgentError, TaskError, Unsupported, UsageError
from rollhook.messages import message
from rollhook_mcp import McpConfig
from rollhook_mcp.tasks import Call, McpTask, read_tasks

if TYPE_CHECKING:
    import mcp_types
    from fastmcp import Client

#: of this machine's environment a server on stdio gets these
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")
#: bytes that a message over HTTP may have at least
_LEAST = 16 << 20
#: characters of a result that a record keeps
_KEPT = 500
#: bytes at the end of a server's stderr that are looked at
_TAIL = 1 << 16


class McpEnvironment(Environment):
    """Tasks of a file, for the tools of a server."""

    verifies_apart: ClassVar[bool] = False
    config: McpConfig

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split in the file's order; those that make no sense are in `train`."""
        server = self.config.url or " ".join(self.config.argv)
        conditions = [server, self.config.system_prompt, *self.config.hidden]
        found = read_tasks(Path(self.config.tasks_file), conditions)
        splits = list(dict.fromkeys(task.split for task in found))
        if split is not None and split not in splits:
            raise UsageError(f"there is no split {split!r} in {self.config.tasks_file}: {', '.join(splits)}")
        return [task for task in found if split in (None, task.split)]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at a task. Raises TaskError for one that has a problem."""
        if task.problem is not None:
            raise TaskError(f"task {task.id} cannot run: {task.problem}")
        return McpEpisode(self.config, task.payload, self.context)

    def describe(self) -> Mapping[str, str]:
        """Return which server it is."""
        return {"server": self.config.url or f"{self.config.argv[0]} on stdio"}


class McpEpisode(Episode):
    """One client; it and a server on stdio end with the episode."""

    def __init__(self, config: McpConfig, task: McpTask, context: BuildContext) -> None:
        self._config = config
        self._task = task
        self._context = context
        self._stack = AsyncExitStack()
        self._phase: McpPhase | None = None
        self._log: TextIO | None = None
        self._told_before = 0
        self._secrets: Mapping[str, str] = {}

    async def __aenter__(self) -> Self:
        """Start the server and connect. Raises TaskError when that fails or takes too long."""
        config = self._config
        try:
            client = await asyncio.to_thread(self._client)
            async with asyncio.timeout(config.start_seconds):
                await self._stack.enter_async_context(client)
                server = Server(client, config.result_bytes)
                for call in self._task.setup:
                    await server.must(call, "setup")
        except BaseException as error:
            told = await asyncio.to_thread(self._stderr)
            await self._stack.aclose()
            if isinstance(error, TimeoutError):
                raise TaskError(
                    f"the MCP server was not ready within {config.start_seconds:g} s{told}"
                ) from None
            if isinstance(error, TaskError) or not isinstance(error, Exception):
                raise
            raise TaskError(f"the MCP server cannot be used: {_said(error)}{told}") from error
        hidden = {*config.hidden, *filter(None, [self._task.check.tool])}
        self._phase = McpPhase(self._task, server, hidden, config.system_prompt)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the client and its server."""
        await self._stack.aclose()

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the one phase."""
        assert self._phase is not None
        yield self._phase

    def _client(self) -> Client[Any]:
        from fastmcp import Client
        from fastmcp.client.transports import StdioTransport, StreamableHttpTransport

        config, context = self._config, self._context
        secrets = {name: context.secret(str(each)) for name, each in config.secrets.items()}
        self._secrets = secrets
        mode = "legacy" if config.sessions else "auto"  # of 2026-07-28 on the protocol has no sessions
        if config.url is not None:
            most = max(_LEAST, 4 * config.result_bytes)
            http = StreamableHttpTransport(config.url, headers=secrets, max_sse_event_size=most)
            return Client(http, init_timeout=config.start_seconds, mode=mode)
        context.scratch.mkdir(parents=True, exist_ok=True)
        directory = config.workdir or self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="mcp-", dir=context.scratch, ignore_cleanup_errors=True)
        )
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {"HOME": directory, **config.env, **secrets}
        log = self._stack.enter_context(open(Path(directory, "server.log"), "a"))  # noqa: SIM115
        self._log, self._told_before = log, log.tell()
        transport = StdioTransport(
            config.argv[0], list(config.argv[1:]), env=env, cwd=directory, keep_alive=False, log_file=log
        )
        return Client(transport, init_timeout=config.start_seconds, mode=mode)

    def _stderr(self) -> str:
        """Return how the stderr of a server on stdio ends, if it said anything, without secrets."""
        if self._log is None:
            return ""
        with suppress(OSError), open(self._log.name, "rb") as log:
            log.seek(max(self._told_before, os.path.getsize(self._log.name) - _TAIL))
            text = log.read(_TAIL).decode("utf-8", "replace")
            for name, value in self._secrets.items():
                text = text.replace(value, f"<{name}>")
            said = " ".join(text.split())[-_KEPT:]
            return f"; its stderr ends: {said}" if said else ""
        return ""


class Server:
    """A connected client, with results of bounded size; what a phase offers the tools agent is `view`."""

    def __init__(self, client: Client[Any], most: int) -> None:
        self._client = client
        self._most = most

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools."""
        return list(await self._client.list_tools())

    async def call_tool_mcp(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool; of its result at most so many bytes of text are kept."""
        result = await self._client.call_tool_mcp(name, arguments)
        for part in result.content:
            text = getattr(part, "text", None)
            if isinstance(text, str) and len(text) > self._most:
                part.text = text[: self._most]  # type: ignore[union-attr]
        return result

    async def must(self, call: Call, what: str) -> mcp_types.CallToolResult:
        """Make a call of the task's own. Raises TaskError when the tool fails."""
        result = await self.call_tool_mcp(call.tool, call.arguments)
        if result.is_error:
            raise TaskError(f"the task's {what} calls {call.tool}, which fails: {_text(result)[:_KEPT]}")
        return result


class View:
    """The server's tools as the agent has them: without the hidden ones."""

    def __init__(self, server: Server, hidden: set[str]) -> None:
        self._server = server
        self._hidden = hidden

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the tools that are not hidden."""
        return [tool for tool in await self._server.list_tools() if tool.name not in self._hidden]

    async def call_tool_mcp(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool that is not hidden."""
        if name in self._hidden:
            from mcp_types import CallToolResult, TextContent

            return CallToolResult(
                content=[TextContent(type="text", text=f"there is no tool {name!r}")], is_error=True
            )
        return await self._server.call_tool_mcp(name, arguments)


class McpPhase(Phase):
    """The prompt, the tools, and the check."""

    def __init__(self, task: McpTask, server: Server, hidden: set[str], system_prompt: str) -> None:
        self._task = task
        self._server = server
        self._solved: str | None = None
        system = [message("system", system_prompt)] if system_prompt else []
        self.observation = Observation([*system, message("user", task.prompt)])
        self.tools = View(server, hidden)

    async def solve(self) -> None:
        """Make the calls of the reference solution and give its reply."""
        if not self._task.solution and self._task.reply is None:
            raise Unsupported(f"task {self._task.id} has neither solution nor reply")
        for call in self._task.solution:
            try:
                await self._server.must(call, "solution")
            except TaskError as error:
                raise AgentError(str(error)) from error
        self._solved = self._task.reply or ""

    async def verify(self, transcript: Transcript) -> Verdict:
        """Compare the last reply, or ask the server."""
        check = self._task.check
        if check.tool is not None:
            result = await self._server.call_tool_mcp(check.tool, check.arguments)
            reward = None if result.is_error else reward_of(_text(result), result.structured_content)
            detail = {"result": _text(result)[:_KEPT]}
            if reward is None:
                detail["reason"] = f"{check.tool} gave no reward"
            return Verdict(reward, {}, detail)
        said = [m["content"] or "" for m in transcript.messages if m["role"] == "assistant"]
        text = self._solved if self._solved is not None else said[-1] if said else ""
        if check.equals is not None:
            return Verdict(float(text.strip().casefold() == check.equals.strip().casefold()))
        found = await asyncio.to_thread(re.search, check.matches or "", text)
        return Verdict(float(found is not None))


def reward_of(text: str, structured: Any) -> float | None:
    """Return the reward that a check's result gives: a number, true or false, or an object with `reward`."""
    values = [structured]
    with suppress(ValueError, RecursionError):
        values.append(json.loads(text))
    for value in values:
        found = _unwrapped(value)
        if isinstance(found, bool | int | float) and math.isfinite(found):
            return float(found)
    return None


def _unwrapped(value: Any) -> Any:
    for _ in range(2):  # FastMCP wraps what is no object into `result`
        if isinstance(value, Mapping):
            value = value.get("reward", value.get("result"))
    return value


def _text(result: mcp_types.CallToolResult) -> str:
    texts = (getattr(part, "text", None) for part in result.content)
    return "\n".join(text for text in texts if isinstance(text, str))


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:_KEPT] or type(error).__name__
