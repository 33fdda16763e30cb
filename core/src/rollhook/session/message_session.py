"""A session over messages: the face of a session where the engine gives no tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import ContextFullError, MessageRequest, Usage
from rollhook.errors import EngineError
from rollhook.messages import Message, ToolSchema
from rollhook.reply.parser import Delta
from rollhook.session.common import (
    Calls,
    DeltaSink,
    SessionStats,
    TurnConflictError,
    check_appended,
    checked,
    nothing,
    turn_seed,
)
from rollhook.session.tree import Key, Leaf, message_key

if TYPE_CHECKING:
    from rollhook.session.message_policy import Answer, MessagePolicy
    from rollhook.session.turn import Clock

#: bytes of text that are taken for one token where nobody has counted
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class _Turn:
    """What was said up to a reply, the reply included, and the tokens of it."""

    keys: tuple[Key, ...] = ()
    messages: tuple[Message, ...] = ()
    tokens: int = 0
    finish_reason: str = ""


class MessageSession:
    """Messages in, a message out. Made by `MessagePolicy.open`; implements `rollhook.agent.ChatSession`.

    Tokens are what the endpoint's `usage` says, for the budget and the record; where it reports none they are
    estimated from the bytes of the text. There are no leaves: nothing here can train.
    """

    versions: tuple[int, int] | None = None

    def __init__(
        self,
        policy: MessagePolicy,
        session_id: str,
        *,
        sampling: SamplingParams,
        max_seq_len: int,
        reply_tokens: int,
        turns: int,
        seed: int | None,
        clock: Clock | None,
    ) -> None:
        self.id = session_id
        self.stats = SessionStats()
        self.max_seq_len = max_seq_len
        self.reply_tokens = reply_tokens
        self.turns = turns
        #: the agent's clock; None charges nobody
        self.clock = clock
        self._policy = policy
        self.sampling = sampling
        self._seed = seed
        self._calls = Calls(session_id)
        self._started = 0
        self._turns: list[_Turn] = []

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._calls.closed

    @property
    def waits_for(self) -> str:
        """What its turns under way wait for, in words; empty when there are none."""
        return "a reply of the endpoint" if len(self._calls) else ""

    @property
    def failure(self) -> EngineError | None:
        """What the engines failed with at the latest request; None once they have answered."""
        return self._calls.failure

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one turn was under way."""
        return self._calls.busy_seconds

    @property
    def finish_reason(self) -> str:
        """How the latest reply ended; empty before the first."""
        return self._turns[-1].finish_reason if self._turns else ""

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""
        return max(0, self.turns - self.stats.turns - len(self._calls))

    @property
    def tokens_left(self) -> int:
        """Tokens that the conversation of the latest turn may still hold."""
        return max(0, self.max_seq_len - (self._turns[-1].tokens if self._turns else 0))

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn, its reply included."""
        return list(self._turns[-1].messages) if self._turns else []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        max_tokens: int | None = None,
        on_delta: DeltaSink | None = None,
    ) -> Reply:
        """Generate one turn after `messages`, the whole conversation so far.

        As of `rollhook.session.Session.chat`, with two differences: `on_delta` gets the text in one piece,
        and the tokens of what was appended are not known before the endpoint has counted them. The reply is
        asked to be so short that an estimate fits, and a conversation that has outgrown the session or the
        model's context ends in an empty `length`.
        """
        self._calls.check_open()
        keys = tuple(message_key(checked(message)) for message in messages)
        before = self._before(keys)
        check_appended(messages[len(before.keys) :])
        if before.finish_reason == "length":
            raise TurnConflictError("the turn before was cut for length and cannot be extended")
        if self.turns_left <= 0:
            return nothing(before.tokens, self.max_seq_len)
        reply = await self._calls.run(self._turn(before, keys, messages, tools or (), max_tokens))
        delta = Delta(reply.message.get("reasoning_content") or "", reply.message.get("content") or "")
        if on_delta is not None and (delta.reasoning or delta.text):
            on_delta(delta)
        return reply

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None
    ) -> int:
        """Return an estimate of the tokens of these messages; what is known of earlier turns is counted."""
        self._calls.check_open()
        before = self._before(tuple(message_key(checked(message)) for message in messages))
        added = estimate(messages[len(before.keys) :])
        return before.tokens + added + (0 if before.keys else estimate(tools or ()))

    def leaves(self) -> list[Leaf]:
        """Return nothing: without tokens nothing can train."""
        return []

    def drift(self, leaves: Sequence[Leaf]) -> None:
        """Return None: there are no tokens."""

    async def close(self) -> None:
        """End the session: calls under way are given up and raise SessionClosedError. Safe to call twice."""
        if not self.closed:
            self._policy.leave(self)
            await self._calls.close()

    def _before(self, keys: tuple[Key, ...]) -> _Turn:
        """Return the longest turn that the conversation extends, the latest of equals."""
        extended = [turn for turn in self._turns if keys[: len(turn.keys)] == turn.keys]
        return max(reversed(extended), key=lambda turn: len(turn.keys), default=_Turn())

    async def _turn(
        self,
        before: _Turn,
        keys: tuple[Key, ...],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        max_tokens: int | None,
    ) -> Reply:
        self._started += 1
        seed = turn_seed(self._seed, self._started)
        if self.clock is not None:
            self.clock.begin_turn()
            self.clock.check()
        left = self.max_seq_len - before.tokens
        if left <= 0:
            return nothing(before.tokens, self.max_seq_len)
        added = estimate(messages[len(before.keys) :]) + (0 if before.keys else estimate(tools))
        room = min(self.reply_tokens, max_tokens or self.reply_tokens, max(1, left - added))
        request = MessageRequest(messages, tools, replace(self.sampling, max_new_tokens=room, seed=seed))
        try:
            answer = await self._policy.complete(request, self.clock)
        except ContextFullError:
            if not self._turns:  # not a conversation that has grown, but one that never fitted
                raise
            return nothing(self.max_seq_len, self.max_seq_len)
        self._calls.check_open()
        message = answer.completion.message
        usage = answer.completion.usage or Usage(before.tokens + added, estimate([message]))
        usage = replace(usage, cached=min(usage.cached, usage.prompt))
        turn = _Turn(
            keys=(*before.keys, *keys[len(before.keys) :], message_key(message)),
            messages=(*before.messages, *(each.copy() for each in messages[len(before.keys) :]), message),
            tokens=usage.prompt + usage.completion,
            finish_reason=answer.completion.finish_reason,
        )
        self._turns.append(turn)
        self._count(before, usage, answer)
        called = message.get("tool_calls") and turn.finish_reason != "length"
        return Reply(
            message=message.copy(),
            finish_reason="tool_calls" if called else turn.finish_reason,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            tokens_left=max(0, self.max_seq_len - turn.tokens),
            cached_tokens=usage.cached,
        )

    def _count(self, before: _Turn, usage: Usage, answer: Answer) -> None:
        stats = self.stats
        stats.turns += 1
        stats.prompt_tokens += max(0, usage.prompt - before.tokens)
        stats.completion_tokens += usage.completion
        stats.input_tokens += usage.prompt
        stats.cached_tokens += usage.cached
        stats.token_seconds += answer.token_seconds
        stats.engine_seconds += answer.token_seconds
        stats.wait_seconds += answer.wait_seconds
        stats.retries += answer.tries - 1
        stats.estimated |= answer.completion.usage is None


def estimate(parts: Sequence[object]) -> int:
    """Return about how many tokens messages or tools have."""
    size = len(json.dumps(list(parts), ensure_ascii=False).encode(errors="replace")) if parts else 0
    return math.ceil(size / BYTES_PER_TOKEN)
