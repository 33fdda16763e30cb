"""The policy behind an endpoint that takes messages: its sessions, and requests bounded and retried."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import Completion, MessageEngine, MessageRequest
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.session.common import SessionExistsError
from rollhook.session.message_session import MessageSession
from rollhook.session.turn import Clock

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass(frozen=True)
class Answer:
    """One completion, and where the seconds went: in the request that gave it, or waiting for it."""

    completion: Completion
    token_seconds: float
    wait_seconds: float
    tries: int


class MessagePolicy:
    """Opens sessions and asks the engine, at most `limits.max_concurrent` requests at once.

    What another try may mend is asked again after a growing, jittered pause, or the longer one that the
    endpoint asks for. The agent's clock runs during the request that is answered, not while one waits for
    its place or for the next try.
    """

    def __init__(
        self,
        engine: MessageEngine,
        *,
        context_length: int | None = None,
        seed: int = 0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.sessions: dict[str, MessageSession] = {}
        self._engine = engine
        self._context_length = context_length or engine.context_length
        self._limits = engine.limits
        self._slots = asyncio.Semaphore(self._limits.max_concurrent)
        self._jitter = random.Random(seed)  # noqa: S311 - spreads retries
        self._now = now
        self._sleep = sleep
        self._uncounted = False

    def open(
        self,
        session_id: str,
        *,
        task_id: str = "",
        sampling: SamplingParams | None = None,
        max_seq_len: int,
        reply_tokens: int,
        turns: int,
        seed: int | None = None,
        clock: Clock | None = None,
        prefix_ids: Sequence[int] = (),
    ) -> MessageSession:
        """Open a session, as `rollhook.session.PolicyClient.open` does; an endpoint routes by itself."""
        if session_id in self.sessions:
            raise SessionExistsError(f"session {session_id!r} is open already")
        session = MessageSession(
            self,
            session_id,
            sampling=sampling or SamplingParams(),
            max_seq_len=min(max_seq_len, self._context_length or max_seq_len),
            reply_tokens=reply_tokens,
            turns=turns,
            seed=seed,
            clock=clock,
        )
        self.sessions[session_id] = session
        return session

    async def complete(self, request: MessageRequest, clock: Clock | None) -> Answer:
        """Ask until there is an answer.

        Raises BudgetExceeded, the request given up, when the clock runs out during it, and EngineError when
        the request is refused, or the tries or the seconds between them are used up.
        """
        started, waited, tries = self._now(), 0.0, 0
        while True:
            tries += 1
            try:
                completion, spent = await self._ask(request, clock)
                break
            except EngineError as error:
                if error.kind == "user":
                    raise
                pause = self._pause(tries, error)
                if tries > self._limits.max_retries or waited + pause > self._limits.retry_seconds:
                    raise EngineError(_gave_up(tries, waited, error), kind="infrastructure") from error
                level = logging.WARNING if tries == 1 else logging.DEBUG
                log.log(level, "%s; asked again in %.1f s", error, pause)
            await self._sleep(pause)
            waited += pause
        if completion.usage is None and not self._uncounted:
            self._uncounted = True
            log.warning("the endpoint reports no usage, so the tokens of replies are estimated")
        if clock is not None:
            clock.charge("tokens", spent)
        return Answer(completion, spent, max(0.0, self._now() - started - spent), tries)

    def leave(self, session: MessageSession) -> None:
        """Forget a session."""
        self.sessions.pop(session.id, None)

    async def close(self) -> None:
        """Close every session; safe to call twice."""
        for session in list(self.sessions.values()):
            await session.close()

    async def _ask(self, request: MessageRequest, clock: Clock | None) -> tuple[Completion, float]:
        """Send one request and wait for it as long as the clock allows; return the seconds that it took."""
        async with self._slots:
            asked = self._now()
            limit = asyncio.timeout(None if clock is None else clock.remaining)
            try:
                async with limit:
                    completion = await self._engine.complete(request)
            except TimeoutError:
                if clock is None or not limit.expired():
                    raise
                clock.charge("tokens", max(self._now() - asked, clock.remaining) + 1e-6)
                clock.check()
                raise BudgetExceeded("the agent's clock ran out during a reply", node="agent") from None
            return completion, self._now() - asked

    def _pause(self, tries: int, error: EngineError) -> float:
        longest = min(_FIRST_PAUSE * 2.0 ** (tries - 1), _LONGEST_PAUSE)
        asked = getattr(error, "retry_after", None) or 0.0
        return max(self._jitter.uniform(longest / 2, longest), asked + self._jitter.uniform(0.0, longest / 2))


def _gave_up(tries: int, waited: float, error: EngineError) -> str:
    asks = getattr(error, "retry_after", None)
    wants = f", which asks to wait {asks:g} s" if asks else ""
    return f"no answer after {tries} tries and {waited:.0f} s of waiting between them{wants}: {error}"
