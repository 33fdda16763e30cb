"""A session as a program outside this process has it: its address, its token, and what must be told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from rollhook.budgets import AgentClock
from rollhook.messages import Message

if TYPE_CHECKING:
    from rollhook.session.face import PolicySession
    from rollhook.session.gateway import Gateway

T = TypeVar("T")
#: seconds after which it is looked whether the clock has run out
_TICK = 0.25


class OutsideSession:
    """The session of one phase over HTTP; implements `rollhook.agent.Endpoint`."""

    def __init__(
        self,
        session: PolicySession,
        gateway: Gateway,
        clock: AgentClock,
        heard: Callable[[list[Message]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._clock = clock
        self._heard = heard
        self._now = now
        self._before = session.stats.turns
        self.url = f"{gateway.url}/sessions/{session.id}"
        self.public_url = f"{gateway.public_url}/sessions/{session.id}" if gateway.public_url else None
        self.token = gateway.session_token(session.id)

    @property
    def turns(self) -> int:
        """Turns that have been generated in this phase."""
        return self._session.stats.turns - self._before

    @property
    def finish_reason(self) -> str:
        """How the phase's latest reply ended; empty before the first."""
        return self._session.finish_reason if self.turns else ""

    async def attend(self, work: Awaitable[T]) -> T:
        """Wait for a program of the agent while its clock runs, which stands still during its turns.

        Raises BudgetExceeded, `work` cancelled, when the clock has run out. Raises EngineError when the
        engines gave no answer to the program's last request, whatever it made of that.
        """
        task = asyncio.ensure_future(work)
        try:
            await self._wait(task)
            self._clock.check()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if self.turns:
                self._heard(self._session.messages)
        if self._session.failure is not None:
            raise self._session.failure
        return task.result()

    async def _wait(self, task: asyncio.Future[T]) -> None:
        began, busy = self._now(), self._session.busy_seconds
        while not task.done() and self._clock.remaining > 0:
            await asyncio.wait({task}, timeout=min(_TICK, self._clock.remaining + 0.001))
            now, turning = self._now(), self._session.busy_seconds
            self._clock.charge("command", max(0.0, (now - began) - (turning - busy)))
            began, busy = now, turning
