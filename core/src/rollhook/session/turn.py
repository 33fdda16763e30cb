"""What one turn needs from others: the agent's clock, the engines, deadlines; and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

from rollhook.engine.base import Generation, GenerationRequest, SamplingParams
from rollhook.engine.streaming import TokenSink
from rollhook.engine.weights import WeightControl
from rollhook.router import Worker
from rollhook.session.health import Probed
from rollhook.session.tree import Span


class Clock(Protocol):
    """The agent's clock, as `rollhook.budgets.AgentClock` is one; seconds."""

    @property
    def remaining(self) -> float:
        """Seconds left."""

    def begin_turn(self) -> None:
        """Start the time of a new turn."""

    def charge(self, kind: Literal["command", "tokens"], seconds: float) -> None:
        """Add seconds that the agent's own work took."""

    def check(self) -> None:
        """Raise BudgetExceeded when nothing is left."""


class Generator(WeightControl, Probed, Protocol):
    """What the policy asks of an engine client; `rollhook.engine.client.EngineClient` is one."""

    async def generate(
        self, worker: Worker, request: GenerationRequest, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Generate one completion, streamed to `on_tokens` where there is one."""

    async def abort(self, worker: Worker, rid: str | None = None) -> None:
        """End a request."""


@dataclass(frozen=True)
class Limits:
    """Deadlines that are not the agent's; when one passes, the turn fails with EngineError. Seconds.

    Engines are probed every `health_interval` (see `rollhook.session.health`) and asked for their loads every
    `load_interval`; a worker's breaker opens for `breaker_seconds` after `breaker_faults` faults. A weight
    update waits up to `drain` for replies under way.
    """

    attempts: int = 5
    backoff: float = 0.5
    no_worker: float = 120.0
    pause: float = 1800.0
    abort: float = 10.0
    health_interval: float = 30.0
    down_after: int = 3
    up_after: int = 2
    load_interval: float = 5.0
    breaker_faults: int = 10
    breaker_seconds: float = 30.0
    drain: float = 0.0


@dataclass(frozen=True)
class Turn:
    """One generation with what surrounded it: spans of versions over it, and where the seconds went."""

    generation: Generation
    spans: tuple[Span, ...]
    token_seconds: float
    engine_seconds: float
    wait_seconds: float
    tries: int


class Parts:
    """A generation put together from tries of which each gave some of the tokens."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.spans: list[Span] = []
        #: seconds of tokens that were kept
        self.seconds = 0.0
        self._sampling = sampling
        self._logprobs: list[float] = []
        self._cached = 0
        self._reason = "abort"

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._sampling.max_new_tokens - len(self.token_ids)

    def add(self, part: Generation, before: int, after: int, seconds: float) -> None:
        """Add the tokens of a try, generated under the versions from `before` to `after`."""
        start = len(self.token_ids)
        if not start:
            self._cached = part.cached_tokens
        rows = version_spans(part, before, after)
        self.spans += [(start + a, start + b, first, last) for a, b, first, last in rows]
        self.token_ids += part.token_ids
        self._logprobs += part.logprobs
        self.seconds += seconds
        self._reason = part.finish_reason
        if self._reason == "abort" and self.token_ids:
            # cut behind the last token, before the end was told
            if self.token_ids[-1] in self._sampling.stop_token_ids:
                self._reason = "stop"
            elif self.room <= 0:
                self._reason = "length"

    def whole(self) -> Generation | None:
        """Return the generation if it has come to its end."""
        if self._reason == "abort":
            return None
        return Generation(self.token_ids, self._logprobs, self._reason, cached_tokens=self._cached)


def version_spans(generation: Generation, before: int, after: int) -> tuple[Span, ...]:
    """Return (start, end, first, last) rows over a completion: exact where reported, else bracketed.

    `before` and `after` are the versions in service when the request went out and when the reply came.
    A single reported version is the one at the end.
    """
    count = len(generation.token_ids)
    if not count:
        return ()
    if generation.versions is None:
        reported = generation.weight_version
        last = after if reported is None else reported
        return ((0, count, min(before, last), max(before, last)),)
    spans, start = [], 0
    for version, run in groupby(generation.versions):
        end = start + len(list(run))
        spans.append((start, end, version, version))
        start = end
    return tuple(spans)
