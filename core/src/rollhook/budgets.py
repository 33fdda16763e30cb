"""The budget tree of an episode and the agent's clock (`docs/outcomes-and-budgets.md`).

lifetime > episode > {create, setup, agent > turn > command, verify, teardown}. A child's limit is at
most its parent's; the lifetime reserves every child and `slack`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollhook.errors import BudgetExceeded

if TYPE_CHECKING:
    from rollhook.recipe.schema import Budgets

#: seconds of a node that neither the task nor the recipe names
DEFAULTS: Mapping[str, float] = {
    "create": 300.0,
    "setup": 120.0,
    "agent": 3600.0,
    "verify": 900.0,
    "teardown": 60.0,
}


@dataclass(frozen=True)
class Limits:
    """The limits in force for one episode, all in seconds."""

    create: float
    setup: float
    agent: float
    turn: float
    command: float
    verify: float
    teardown: float
    episode: float
    lifetime: float


def resolve(budgets: Budgets, task_limits: Mapping[str, float]) -> Limits:
    """Return the limits of an episode: what the task asks for, capped by the recipe."""

    def node(name: str) -> float:
        caps = (getattr(budgets, name), budgets.episode)
        return float(min([task_limits.get(name, DEFAULTS[name]), *(cap for cap in caps if cap is not None)]))

    create, setup, agent = node("create"), node("setup"), node("agent")
    verify, teardown = node("verify"), node("teardown")
    turn = min(agent, budgets.turn or agent)
    command = min(turn, budgets.command or turn)
    total = create + setup + agent + verify + teardown
    episode = min(budgets.episode or total, total)
    lifetime = budgets.lifetime or total + budgets.slack
    return Limits(create, setup, agent, turn, command, verify, teardown, episode, lifetime)


class AgentClock:
    """The agent's own time: it runs only during its own commands and its own tokens.

    Whoever does work for the agent charges the seconds afterwards and passes `remaining` as the limit
    of that work before.
    """

    def __init__(self, agent: float, turn: float | None = None, command: float | None = None) -> None:
        self._whole = self._agent = agent
        self._turn = agent if turn is None else turn
        self._command = self._turn if command is None else command
        self._turn_used = 0.0
        self.used: dict[str, float] = {"command": 0.0, "tokens": 0.0}
        self.fired = ""

    @property
    def remaining(self) -> float:
        """Seconds left for the agent, of its whole time and of this turn; never negative."""
        whole = self._agent - sum(self.used.values())
        return max(0.0, min(whole, self._turn - self._turn_used))

    @property
    def command_limit(self) -> float:
        """Seconds that the next command may take."""
        return min(self._command, self.remaining)

    def begin_phase(self, seconds: float) -> None:
        """Start a phase, which has at most this much of what is left of the agent's time."""
        self._agent = min(self._whole, sum(self.used.values()) + seconds)

    def begin_turn(self) -> None:
        """Start the time of a new turn."""
        self._turn_used = 0.0

    def charge(self, kind: Literal["command", "tokens"], seconds: float) -> None:
        """Add seconds that the agent's own work took."""
        self.used[kind] += seconds
        self._turn_used += seconds

    def check(self) -> None:
        """Raise BudgetExceeded when the agent has no time left."""
        if self.remaining > 0:
            return
        self.fired = "agent" if sum(self.used.values()) >= self._agent else "turn"
        limit = self._agent if self.fired == "agent" else self._turn
        raise BudgetExceeded(f"the agent used up its {limit:g} s ({self.fired})", node=self.fired)

    @property
    def used_by(self) -> str:
        """Who used up most of the agent's time: `command` or `tokens`."""
        return max(self.used, key=lambda kind: self.used[kind])
