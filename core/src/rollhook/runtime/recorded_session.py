"""A session without a policy: each turn is answered with the reply that was recorded in its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import orjson

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.errors import AgentError, BudgetExceeded
from rollhook.messages import Message, ToolSchema
from rollhook.session.common import DeltaSink, SessionStats

if TYPE_CHECKING:
    from rollhook.errors import EngineError
    from rollhook.records import EpisodeRecord
    from rollhook.session.tree import Leaf
    from rollhook.session.turn import Clock

#: how what an agent was told compares with the record: the same, the same but for numbers, or neither
Observed = Literal["same", "numbers", "text"]

_DEGREES: tuple[Observed, ...] = ("same", "numbers", "text")


class RecordedSession:
    """Plays one recorded conversation; has the face of `rollhook.session.Session` that an episode uses.

    A record has the conversations of its phases one behind the other, so a turn is found by its place: that
    of the phase, and how many messages the agent sends. `observed` says how these compare with the recorded
    ones. Tokens are not counted: `tokens_left` is always the whole.
    """

    def __init__(self, record: EpisodeRecord, *, turns: int, max_seq_len: int, clock: Clock | None) -> None:
        self.id = record.episode_id
        self.versions: tuple[int, int] | None = None
        self.waits_for = self.finish_reason = ""
        self.failure: EngineError | None = None
        self.busy_seconds = 0.0
        self.stats = SessionStats()
        self.sampling = SamplingParams()
        self.observed: Observed = "same"
        self.tokens_left = max_seq_len
        self._record = record
        self._turns = turns
        self._clock = clock
        self._begin = 0
        self._said: list[Message] = []

    @property
    def turns_left(self) -> int:
        """Turns that may still be asked for."""
        return max(0, self._turns - self.stats.turns)

    @property
    def unused(self) -> int:
        """Recorded turns that the agent has not asked for."""
        return max(0, self._record.turns - self.stats.turns)

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn, its reply included."""
        return list(self._said)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        max_tokens: int | None = None,
        on_delta: DeltaSink | None = None,
    ) -> Reply:
        """Return the recorded reply to these messages, a phase's whole conversation so far.

        Raises AgentError where the record has none, BudgetExceeded where the recorded agent ran out of time.
        """
        if self._clock is not None:
            self._clock.begin_turn()
            self._clock.check()
        known = len(self._said)
        if list(messages[:known]) != self._said:  # another phase
            self._begin, known = self._begin + known, 0
        recorded = self._record.messages
        place = self._begin + len(messages)
        self._compare(recorded[self._begin + known : place], messages[known:])
        if place >= len(recorded) or recorded[place]["role"] != "assistant":
            raise self._nothing(place)
        reply = recorded[place]
        self._said = [*messages, reply]
        self.stats.turns += 1
        self.finish_reason = self._finish_reason(place)
        return Reply(reply.copy(), self.finish_reason, 0, 0, self.tokens_left)

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None
    ) -> int:
        """Return 0: there are no tokens."""
        return 0

    def leaves(self) -> list[Leaf]:
        """Return nothing: there are no tokens."""
        return []

    def drift(self, leaves: Sequence[Leaf]) -> None:
        """Return None: there are no tokens."""

    async def close(self) -> None:
        """End the session."""

    def _compare(self, recorded: Sequence[Message], given: Sequence[Message]) -> None:
        self.observed = max(self.observed, compare(recorded, given), key=_DEGREES.index)

    def _finish_reason(self, place: int) -> str:
        """Return how the recorded reply ended: only one that ended its episode can have been cut."""
        if self._record.ended == "length" and place == len(self._record.messages) - 1:
            return "length"
        return "tool_calls" if self._record.messages[place].get("tool_calls") else "stop"

    def _nothing(self, place: int) -> Exception:
        if self._record.ended == "agent_timeout":
            return BudgetExceeded(
                "the recorded agent ran out of time here", node=self._record.fired or "agent"
            )
        return AgentError(f"the record has no reply after {place} messages: the agent went another way")


class RecordedPolicy:
    """Opens sessions as `PolicyClient` does, for the episodes that it was told to expect."""

    def __init__(self) -> None:
        self.sessions: dict[str, RecordedSession] = {}
        self._records: dict[str, EpisodeRecord] = {}

    def expect(self, record: EpisodeRecord) -> None:
        """Take the record that the session of this episode plays."""
        self._records[record.episode_id] = record

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
    ) -> RecordedSession:
        """Open the session of an expected episode, kept in `sessions` until it is taken."""
        session = RecordedSession(
            self._records.pop(session_id), turns=turns, max_seq_len=max_seq_len, clock=clock
        )
        self.sessions[session_id] = session
        return session

    def take(self, session_id: str) -> RecordedSession:
        """Return the session of a finished episode and forget it."""
        return self.sessions.pop(session_id)

    async def close(self) -> None:
        """Nothing is held."""


def compare(recorded: Sequence[Message], given: Sequence[Message]) -> Observed:
    """Return how two stretches of a conversation compare."""
    one, other = (orjson.dumps(list(each), option=orjson.OPT_SORT_KEYS) for each in (recorded, given))
    if one == other:
        return "same"
    return "numbers" if _masked(one) == _masked(other) else "text"


def _masked(text: bytes) -> bytes:
    return re.sub(rb"\d+", b"0", text)
