"""The tools agent: what the policy calls is called, what comes back is the next message."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.messages import Message, ToolCall
from rollhook.tools import ToolResult, Tools
from rollhook_tools import ToolsConfig
from rollhook_tools.mcp import opened


class ToolCalling(Agent):
    """Calls the phase's tools for the policy, those of one reply at once, until a reply calls none.

    Whatever is wrong with a call (no such tool, arguments that are no JSON object or do not fit, a failure,
    no answer in time) is told to the policy as that call's result; the other calls are made. A reply that was
    cut for length is not acted on. Only machinery that fails is an error of the episode.
    """

    needs_tools = True
    config: ToolsConfig

    async def run(self, context: AgentContext) -> StopReason:
        """Talk and call."""
        counts: Counter[str] = Counter()
        try:
            async with opened(context.tools) as tools:
                return await self._converse(context, tools, counts)
        finally:
            if counts:
                context.note({"calls": dict(counts)})

    async def _converse(self, context: AgentContext, tools: Tools | None, counts: Counter[str]) -> StopReason:
        schemas = list(await tools.list()) if tools is not None else []
        messages = list(context.observation.messages)
        while context.budget.turns_left > 0:
            reply = await context.session.chat(messages, tools=schemas or None)
            if reply.finish_reason == "length":
                return StopReason.LENGTH
            messages.append(reply.message)
            calls = reply.message.get("tool_calls") or []
            if calls:
                answers = await self._answers(context, tools, schemas, calls, counts)
                if self.config.show_budget:
                    answers[-1]["content"] = f"{answers[-1]['content']}\n{_left(context, reply.tokens_left)}"
                messages.extend(answers)
            said = await context.respond(reply.message)
            if said is not None:
                messages.extend(said.messages)
            elif not calls:
                return StopReason.DONE
        return StopReason.MAX_TURNS

    async def _answers(
        self,
        context: AgentContext,
        tools: Tools | None,
        schemas: Sequence[dict[str, Any]],
        calls: Sequence[ToolCall],
        counts: Counter[str],
    ) -> list[Message]:
        """Make the calls of a reply; their results are in the order of the calls."""
        slots = asyncio.Semaphore(self.config.parallel)
        names = [each["function"]["name"] for each in schemas]

        async def one(number: int, call: ToolCall) -> ToolResult:
            function = call["function"]
            arguments = parse_arguments(function.get("arguments", ""))
            if number >= self.config.calls:
                counts["too_many"] += 1
                return ToolResult(f"at most {self.config.calls} calls in one reply", is_error=True)
            if tools is None or function["name"] not in names:
                counts["unknown"] += 1
                known = f"there are {', '.join(names)}" if names else "there are none"
                return ToolResult(f"there is no tool {function['name'][:100]!r}; {known}", is_error=True)
            if isinstance(arguments, str):
                counts["malformed"] += 1
                return ToolResult(arguments, is_error=True)
            async with slots:
                limit = min(self.config.call_timeout, context.on_clock.limit)
                return await self._call(tools, function["name"], arguments, limit, counts)

        try:
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(one(number, call)) for number, call in enumerate(calls)]
                await context.on_clock(asyncio.wait(work))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self._shown(task.result())}
            for call, task in zip(calls, work, strict=True)
        ]

    async def _call(
        self, tools: Tools, name: str, arguments: dict[str, Any], limit: float, counts: Counter[str]
    ) -> ToolResult:
        try:
            async with asyncio.timeout(limit) as within:
                result = await tools.call(name, arguments)
        except TimeoutError:
            if not within.expired():
                raise
            counts["timed_out"] += 1
            return ToolResult(f"{name} gave no answer within {limit:g} s", is_error=True)
        counts["failed" if result.is_error else "done"] += 1
        return result

    def _shown(self, result: ToolResult) -> str:
        text = result.content.encode("utf-8", "replace").decode()
        limit = self.config.output_limit
        if len(text) > limit:
            tail = limit // 2
            cut = len(text) - limit
            text = f"{text[: limit - tail]}[{cut} characters cut]{text[len(text) - tail :]}"
        return f"error: {text or 'the tool failed'}" if result.is_error else text or "(no output)"


def parse_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call, or what is wrong with them."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    return arguments


def _left(context: AgentContext, tokens: int) -> str:
    budget = context.budget
    return f"[left: {budget.turns_left} turns, {tokens} tokens, {budget.seconds_left:.0f} s]"
