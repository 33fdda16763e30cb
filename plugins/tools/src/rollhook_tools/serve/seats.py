"""Episodes that a client from outside plays: the runtime's own, with the client in the agent's place."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.environment import Task
from rollhook.errors import RollhookError, UsageError
from rollhook.messages import Message, ToolCall, ToolSchema, message
from rollhook.records import EpisodeRecord
from rollhook.runtime.task_runs import TaskRuns
from rollhook.tools import ToolResult, Tools
from rollhook_tools.mcp import opened

#: the agent's name among those of `TaskRuns`
GUEST = "guest"
_SEAT: ContextVar[Seat] = ContextVar("seat")


@dataclass(frozen=True)
class Said:
    """What a client is told: a text, the tools that it has now, and at the end what the episode earned."""

    text: str
    tools: Sequence[ToolSchema] = ()
    done: bool = False
    reward: float | None = None
    error: bool = False


class Guest(Agent):
    """Leaves each phase to the client whose seat the episode has."""

    needs_policy = False

    async def run(self, context: AgentContext) -> StopReason:
        """Wait until the client has ended the phase."""
        async with opened(context.tools) as tools:
            return await _SEAT.get().play(context, tools)


class Table:
    """The tasks of an environment, and the seats of those who play them; at most `most` at once."""

    def __init__(self, runs: TaskRuns, tasks: Sequence[Task], most: int) -> None:
        self.tasks = [task for task in tasks if task.problem is None]
        if not self.tasks:
            raise UsageError("there is no task that can run")
        self._runs = runs
        self._most = most
        self._numbers = itertools.count()
        self._open: set[Seat] = set()

    @property
    def full(self) -> bool:
        """Whether nobody else may play now."""
        return len(self._open) >= self._most

    def choose(self, task_id: str | None, seed: int | None) -> Task:
        """Return a task by id, by seed, or the next in turn. Raises UsageError for an unknown id."""
        if task_id is None:
            return self.tasks[(next(self._numbers) if seed is None else seed) % len(self.tasks)]
        found = next((task for task in self.tasks if task.id == task_id), None)
        if found is None:
            raise UsageError(f"there is no task {task_id!r}")
        return found

    async def sit(self, task: Task) -> tuple[Seat, Said]:
        """Begin an episode; return its seat and what the client is told first."""
        if self.full:
            raise UsageError(f"{self._most} episodes are open; end some")
        seat = Seat()
        self._open.add(seat)
        seat.begin(self._runs, task, f"-{next(self._numbers)}", lambda: self._open.discard(seat))
        return seat, await seat.told()

    async def aclose(self) -> None:
        """End every episode."""
        for seat in list(self._open):
            await seat.aclose()


class Seat:
    """One episode. Its methods are to be awaited one after another."""

    def __init__(self) -> None:
        self._context: AgentContext | None = None
        self._tools: Tools | None = None
        self._schemas: list[ToolSchema] = []
        self._messages: list[Message] = []
        self._entered = asyncio.Event()
        self._left: asyncio.Future[StopReason] | None = None
        self._run: asyncio.Task[EpisodeRecord] | None = None
        self._calls = itertools.count()

    def begin(self, runs: TaskRuns, task: Task, suffix: str, ended: Any) -> None:
        """Start the episode."""
        _SEAT.set(self)  # the task copies it
        self._run = asyncio.create_task(runs.episode(GUEST, task, suffix))
        self._run.add_done_callback(lambda _: ended())

    async def play(self, context: AgentContext, tools: Tools | None) -> StopReason:
        """Be the agent of a phase: open it for the client, and wait until it has ended it."""
        self._context, self._tools = context, tools
        self._schemas = list(await tools.list()) if tools is not None else []
        self._messages = list(context.observation.messages)
        self._left = asyncio.get_running_loop().create_future()
        self._entered.set()
        try:
            return await self._left
        finally:
            self._left = None
            self._entered.clear()

    async def told(self) -> Said:
        """Wait for the next phase, or for the end of the episode."""
        assert self._run is not None
        entering = asyncio.create_task(self._entered.wait())
        try:
            await asyncio.wait({entering, self._run}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            entering.cancel()
        if self._left is not None:
            text = "\n\n".join(m["content"] for m in self._messages if m["content"])
            return Said(text, self._schemas)
        return self._end()

    async def call(self, name: str, arguments: dict[str, Any]) -> Said:
        """Call a tool of the phase."""
        context = self._context
        if self._left is None or context is None:
            return self._end()
        number = f"c{next(self._calls)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        called: list[ToolCall] = [{"id": number, "type": "function", "function": function}]
        asked: Message = {"role": "assistant", "content": None, "tool_calls": called}
        known = [schema["function"]["name"] for schema in self._schemas]
        if self._tools is None or name not in known:
            result = ToolResult(f"there is no tool {name!r}; there are {', '.join(known) or 'none'}", True)
        else:
            try:
                async with asyncio.timeout(context.on_clock.limit):
                    result = await context.on_clock(self._tools.call(name, arguments))
            except TimeoutError:
                result = ToolResult(f"{name} gave no answer in time", is_error=True)
            except RollhookError as error:
                self._fail(error)
                return await self.told()
        self._hear([asked, {"role": "tool", "tool_call_id": number, "content": result.content}])
        return Said(result.content, self._schemas, error=result.is_error)

    async def say(self, text: str) -> Said:
        """Reply to the environment; where it has nothing more to say, the phase ends."""
        context = self._context
        if self._left is None or context is None:
            return self._end()
        reply = message("assistant", text)
        self._hear([reply])
        try:
            said = await context.respond(reply)
        except RollhookError as error:
            self._fail(error)
            return await self.told()
        if said is None:
            return await self.finish()
        self._hear(list(said.messages))
        return Said("\n\n".join(m["content"] for m in said.messages if m["content"]), self._schemas)

    async def finish(self) -> Said:
        """End the phase: the next one is told, or what the episode earned."""
        if self._left is not None and not self._left.done():
            self._left.set_result(StopReason.DONE)
            self._entered.clear()
            self._left = None
        return await self.told()

    async def aclose(self) -> None:
        """End the episode, wherever it is."""
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait({self._run})

    def _hear(self, messages: Sequence[Message]) -> None:
        self._messages = [*self._messages, *messages]
        if self._context is not None:
            self._context.heard(self._messages)

    def _fail(self, error: RollhookError) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_exception(error)
            self._left = None

    def _end(self) -> Said:
        if self._run is None or not self._run.done() or self._run.cancelled():
            return Said("the episode is over", done=True)
        record = self._run.result()
        outcome = record.outcome
        if outcome.reward is None:
            return Said(f"no reward: {outcome.cause or outcome.kind}", done=True, error=True)
        return Said("the episode is over", done=True, reward=outcome.reward)
