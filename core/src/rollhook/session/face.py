"""What the runtime and the gateway use of a policy and its sessions, over tokens or over messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.errors import EngineError
from rollhook.messages import Message, ToolSchema
from rollhook.session.common import DeltaSink, SessionStats
from rollhook.session.tree import Leaf
from rollhook.session.turn import Clock


class PolicySession(Protocol):
    """One conversation with the policy; `Session` and `MessageSession` are such."""

    stats: SessionStats
    sampling: SamplingParams

    @property
    def id(self) -> str:
        """The session's id."""

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""

    @property
    def tokens_left(self) -> int:
        """Tokens that the session may still hold."""

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn, its reply included."""

    @property
    def finish_reason(self) -> str:
        """How the latest reply ended; empty before the first."""

    @property
    def failure(self) -> EngineError | None:
        """What the engines failed with at the latest request; None once they have answered."""

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one turn was under way."""

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of any generated token; None where none is known."""

    @property
    def waits_for(self) -> str:
        """What its turns under way wait for, in words; empty when there are none."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        max_tokens: int | None = None,
        on_delta: DeltaSink | None = None,
    ) -> Reply:
        """Generate one turn after `messages`; `on_delta` gets its text as it comes."""

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None
    ) -> int:
        """Return the tokens of the prompt that `chat` would send; nothing is generated, no turn is used."""

    def leaves(self) -> list[Leaf]:
        """Return what may train."""

    def drift(self, leaves: Sequence[Leaf]) -> tuple[str, ...] | None:
        """Return how leaves differ from their rendered text; None where that is not known."""

    async def close(self) -> None:
        """End the session."""


class Policy(Protocol):
    """Opens sessions; `PolicyClient` and `MessagePolicy` are such."""

    @property
    def sessions(self) -> Mapping[str, PolicySession]:
        """The open sessions by id."""

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
    ) -> PolicySession:
        """Open a session."""

    async def close(self) -> None:
        """Close every session."""
