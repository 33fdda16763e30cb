"""What one turn needs from others: the agent's clock, the engines, deadlines; and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollhook.engine.base import Generation, GenerationRequest
from rollhook.engine.weights import WeightControl
from rollhook.router import Worker


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


class Generator(WeightControl, Protocol):
    """What the policy asks of an engine client; `rollhook.engine.client.EngineClient` is one."""

    async def generate(self, worker: Worker, request: GenerationRequest) -> Generation:
        """Generate one completion."""

    async def health(self, worker: Worker) -> bool:
        """Return whether the engine is healthy."""

    async def abort(self, worker: Worker, rid: str | None = None) -> None:
        """End a request."""


@dataclass(frozen=True)
class Limits:
    """Deadlines that are not the agent's; when one passes, the turn fails with EngineError. Seconds."""

    attempts: int = 5
    backoff: float = 0.5
    no_worker: float = 120.0
    pause: float = 1800.0
    abort: float = 10.0
    health_interval: float = 30.0


@dataclass(frozen=True)
class Turn:
    """One generation with what surrounded it: versions that bracket it, and where the seconds went."""

    generation: Generation
    version_before: int
    version_after: int
    token_seconds: float
    engine_seconds: float
    wait_seconds: float
    tries: int
