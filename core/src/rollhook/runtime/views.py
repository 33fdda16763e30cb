"""What an episode and its agent see of the runtime's own objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from rollhook.agent import Reply
from rollhook.budgets import AgentClock
from rollhook.errors import AgentError, BudgetExceeded
from rollhook.messages import Message, ToolSchema
from rollhook.runtime.verifier import HomeLoop

if TYPE_CHECKING:
    from rollhook.sandbox import Sandbox
    from rollhook.session import PolicySession


T = TypeVar("T")


class Boxes(Mapping[str, "Sandbox"]):
    """The live sandboxes as an episode sees them, usable from the verifier's own loop."""

    def __init__(self, boxes: Mapping[str, Sandbox], home: asyncio.AbstractEventLoop | None) -> None:
        self._boxes = boxes
        self._home = home

    def __getitem__(self, name: str) -> Sandbox:
        box: Any = self._boxes[name]
        return box if self._home is None else HomeLoop(box, self._home)  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)


class Recorder:
    """The session that an agent gets: keeps the conversation for the record, and says when it waits."""

    def __init__(
        self,
        session: PolicySession | None,
        heard: Callable[[list[Message]], None],
        waiting: Callable[[Callable[[], str]], AbstractContextManager[None]] = lambda what: nullcontext(),
    ) -> None:
        self._session = session
        self._heard = heard
        self._waiting = waiting

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> Reply:
        """Generate one turn."""
        if self._session is None:
            raise AgentError("this run has no policy to ask", kind="user")
        self._heard(list(messages))
        session = self._session
        with self._waiting(lambda: session.waits_for):
            reply = await session.chat(messages, tools=tools)
        self._heard([*messages, reply.message])
        return reply


class OnAgentClock:
    """Waits for an agent's own work on its clock; implements `rollhook.agent.OnClock`."""

    def __init__(self, clock: AgentClock, now: Callable[[], float]) -> None:
        self._clock = clock
        self._now = now

    @property
    def limit(self) -> float:
        """Seconds that one step may take."""
        return self._clock.command_limit

    async def __call__(self, work: Awaitable[T]) -> T:
        """Raises BudgetExceeded, `work` cancelled, when the clock runs out."""
        self._clock.check()
        limit, began = self._clock.remaining, self._now()
        try:
            async with asyncio.timeout(limit) as within:
                result = await work
        except TimeoutError:
            if not within.expired():
                raise
            self._clock.charge("command", max(self._now() - began, limit) + 1e-6)
            self._clock.check()
            raise BudgetExceeded("the agent's clock ran out", node="agent") from None
        except BaseException:
            self._clock.charge("command", self._now() - began)
            raise
        self._clock.charge("command", self._now() - began)
        return result


class RemainingBudget:
    """What an agent may still use."""

    def __init__(self, session: PolicySession | None, clock: AgentClock) -> None:
        self._session = session
        self._clock = clock

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""
        return self._session.turns_left if self._session is not None else 0

    @property
    def tokens_left(self) -> int:
        """Tokens that the session may still hold."""
        return self._session.tokens_left if self._session is not None else 0

    @property
    def seconds_left(self) -> float:
        """Seconds left on the agent's clock."""
        return self._clock.remaining
