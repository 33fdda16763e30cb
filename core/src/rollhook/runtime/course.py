"""What is known of an episode while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollhook.environment import Verdict
from rollhook.messages import Message
from rollhook.records import Ended, Outcome

if TYPE_CHECKING:
    from rollhook.runtime.live import LiveEpisode


@dataclass
class Course:
    """How far an episode has come. `messages` are of its phase, `earlier` of the phases before."""

    live: LiveEpisode
    timings: dict[str, float] = field(default_factory=dict)
    earlier: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    ended: Ended = "done"
    outcome: Outcome | None = None
    warnings: list[str] = field(default_factory=list)
    fired: str = ""
    used_by: str = ""
    #: what the agent wants to be kept, of all phases
    notes: dict[str, Any] = field(default_factory=dict)

    def begin_phase(self, messages: Sequence[Message]) -> None:
        """Start another conversation."""
        self.earlier += self.messages
        self.messages = list(messages)

    def heard(self, messages: list[Message]) -> None:
        """Take the phase's conversation as it stands."""
        self.messages = messages

    def spent(self, node: str, seconds: float) -> None:
        """Add seconds to a budget node."""
        self.timings[node] = self.timings.get(node, 0.0) + seconds

    def fail(self, boundary: str, cause: str, fired: str = "") -> None:
        """End in an `infra_error`; `fired` is the budget node that ran out, if none was noted before."""
        self.ended = "infra"
        self.outcome = Outcome("infra_error", boundary=boundary, cause=cause)
        self.fired = self.fired or fired
