"""A session: one conversation, or several branches of one, with the exact tokens behind it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import orjson

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.errors import EngineError
from rollhook.messages import Message, ToolSchema
from rollhook.records import DRIFT_CATEGORIES
from rollhook.session.common import (
    Calls,
    DeltaSink,
    SessionError,
    SessionStats,
    TurnConflictError,
    check_appended,
    checked,
    nothing,
    turn_seed,
)
from rollhook.session.drift import drift
from rollhook.session.fleet import Route
from rollhook.session.tree import Key, Leaf, Node, Tree, message_key

if TYPE_CHECKING:
    from rollhook.session.policy import PolicyClient
    from rollhook.session.turn import Clock, Turn

# longer requests are rendered and tokenised on a thread, so that the loop is not held up
_LONG_TEXT = 32_768


class Session:
    """Token in, token out. Made by `PolicyClient.open`; implements `rollhook.agent.ChatSession`.

    Each call attaches to the deepest turn whose whole path is a prefix of its messages; an unknown
    prefix starts a new root, concurrent calls on one prefix become siblings. A turn is committed only
    when its generation has succeeded.
    """

    def __init__(
        self,
        policy: PolicyClient,
        route: Route,
        *,
        sampling: SamplingParams,
        max_seq_len: int,
        reply_tokens: int,
        turns: int,
        seed: int | None,
        clock: Clock | None,
    ) -> None:
        self.route = route
        self.stats = SessionStats()
        self.max_seq_len = max_seq_len
        self.reply_tokens = reply_tokens
        self.turns = turns
        #: the agent's clock; set anew for each phase, None charges nobody
        self.clock = clock
        self._policy = policy
        self._renderer = policy.renderer
        self.sampling = sampling
        self._seed = seed
        self._tree = Tree(policy.spill)
        self._calls = Calls(self.id)
        self._versions: tuple[int, int] | None = None
        self._sequence = 0
        self._started = 0

    @property
    def id(self) -> str:
        """The session's id."""
        return self.route.request.session_id

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._calls.closed

    @property
    def waits_for(self) -> str:
        """What its turns under way wait for, in words; empty when there are none."""
        return self._policy.waits_for(self.route) if len(self._calls) else ""

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
        return "" if self._tree.last is None else self._tree.last.finish_reason

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""
        return max(0, self.turns - self._tree.count - len(self._calls))

    @property
    def tokens_left(self) -> int:
        """Tokens that the branch of the latest turn may still hold."""
        return self.max_seq_len - (0 if self._tree.last is None else self._tree.last.end)

    @property
    def messages(self) -> list[Message]:
        """The conversation of the latest turn, its reply included."""
        return [] if self._tree.last is None else self._tree.last.conversation()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        max_tokens: int | None = None,
        on_delta: DeltaSink | None = None,
    ) -> Reply:
        """Generate one turn after `messages`, the whole conversation so far.

        The budget is enforced before anything is generated: the reply gets what `reply_tokens`,
        `max_tokens`, the session's and the model's length leave, and where nothing is left, or no turn,
        it is an empty `length` without a token. Cancelled, it aborts the request at the engine and
        commits nothing. `on_delta` gets the reply's text as it is generated, and with it all of its text
        but for the tool calls. Raises SessionError for a request that makes no sense (closed, malformed,
        extending a length-cut turn, refused by the template), BudgetExceeded when the agent's clock has
        run out, EngineError when the engines give no answer.
        """
        self._calls.check_open()
        if len(messages) > self.max_seq_len:  # not a token for each
            return nothing(len(messages), self.max_seq_len)
        request = self._request(messages, tools, max_tokens)
        if self.turns_left <= 0:
            return nothing(request.before, self.max_seq_len)
        return await self._calls.run(self._turn(request, on_delta))

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None
    ) -> int:
        """Return the tokens of the prompt that `chat` would send; nothing is generated, no turn is used.

        Raises SessionError as `chat` does.
        """
        self._calls.check_open()
        request = self._request(messages, tools, None)
        return request.before + len(await self._increment(request))

    def _request(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, max_tokens: int | None
    ) -> _Request:
        """Return a call, attached to the turn that it goes on from. Raises SessionError."""
        keys = [message_key(checked(message)) for message in messages]
        parent = self._attach(keys, digest := _json(list(tools)).decode() if tools else "")
        appended = messages if parent is None else messages[parent.message_count :]
        check_appended(appended)
        if parent is not None and parent.finish_reason == "length":
            raise TurnConflictError("the turn before was cut for length and cannot be extended")
        return _Request(
            parent, appended, _json(list(appended)), keys, tools, digest, max_tokens, self._sequence
        )

    def _attach(self, keys: Sequence[Key], tools: str) -> Node | None:
        """Return the turn that a request goes on from; SessionError where only its reasoning is missing."""
        thin = self._policy.matcher == "thin"
        parent = self._tree.attach(keys, tools, thin=thin)
        if not thin:
            other = self._tree.attach(keys, tools, thin=True)
            if other is not None and (parent is None or other.message_count > parent.message_count):
                raise SessionError(
                    "an assistant message is a reply of this session without its reasoning_content; send"
                    " replies back whole, or set gateway.matcher=thin, which takes them without"
                )
        return parent

    def leaves(self) -> list[Leaf]:
        """Return what may train: one leaf per branch, a completion that branches share only in the first."""
        return self._tree.leaves()

    def drift(self, leaves: Sequence[Leaf]) -> tuple[str, ...] | None:
        """Return how leaves differ from their rendered text (see `rollhook.session.drift`).

        None where one cannot be rendered. Slow: to be called on a thread.
        """
        found = [drift(self._renderer, leaf) for leaf in leaves]
        known = [categories for categories in found if categories is not None]
        if len(known) < len(found):
            return None
        return tuple(name for name in DRIFT_CATEGORIES if any(name in categories for categories in known))

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of any generated token; None before the first."""
        return self._versions

    async def close(self) -> None:
        """End the session: calls under way are aborted and raise SessionClosedError. Safe to call twice.

        What was committed can still be read.
        """
        if not self.closed:
            try:
                self._policy.leave(self.route)
            finally:
                await self._calls.close()

    async def _turn(self, request: _Request, on_delta: DeltaSink | None) -> Reply:
        self._started += 1
        seed = turn_seed(self._seed, self._started)
        if self.clock is not None:
            self.clock.begin_turn()
            self.clock.check()
        added = await self._increment(request)
        before = request.parent.token_ids() if request.parent is not None else array("i")
        ids = before + added
        room = min(self.reply_tokens, self.max_seq_len - len(ids), request.max_tokens or self.reply_tokens)
        if room <= 0:
            return nothing(len(ids), self.max_seq_len)
        sampling = replace(self.sampling, max_new_tokens=room, seed=seed)
        parser = self._renderer.stream_parser(request.tools, ids)

        def on_tokens(new: Sequence[int]) -> None:
            delta = parser.feed(new)
            if on_delta is not None and (delta.reasoning or delta.text):
                on_delta(delta)

        streamed = None if on_delta is None else on_tokens
        turn = await self._policy.generate(self.route, ids, sampling, self.clock, streamed)
        self._calls.check_open()
        if on_delta is None:
            parser.feed(turn.generation.token_ids)
        reply = self._commit(request, added, turn, parser.finish(), len(ids))
        if on_delta is not None and (parser.tail.reasoning or parser.tail.text):
            on_delta(parser.tail)
        return reply

    async def _increment(self, request: _Request) -> array[int]:
        """Return the ids that this request adds to its parent's."""
        if request.parent is None:
            work: Callable[[], list[int]] = partial(self._renderer.first, request.appended, request.tools)
        else:
            completion = request.parent.completion
            work = partial(
                self._renderer.increment,
                request.appended,
                last_token=completion[-1] if completion else None,
                tools=request.tools,
            )
        size = len(request.text) + (len(request.tools_text) if request.parent is None else 0)
        return array("i", await asyncio.to_thread(work) if size > _LONG_TEXT else work())

    def _commit(
        self, request: _Request, added: array[int], turn: Turn, reply: Message, prompt_tokens: int
    ) -> Reply:
        generation = turn.generation
        self._sequence += 1
        for number, call in enumerate(reply.get("tool_calls", ())):
            call["id"] = call["id"] or f"c{self._sequence:05d}{number:03d}"  # as long as Mistral wants it
        node = Node(
            parent=request.parent,
            text=request.text[:-1] + b"," + _json(reply) + b"]",
            keys=(*request.keys[-len(request.appended) :], message_key(reply)),
            bare=message_key(reply, bare=True),
            prompt=added,
            completion=array("i", generation.token_ids),
            logprobs=array("f", generation.logprobs),
            spans=turn.spans,
            finish_reason=generation.finish_reason,
            seq=self._sequence,
            asked=request.asked,
            tools=request.tools_text,
        )
        self._tree.commit(node)
        self._count(node, turn)
        called = reply.get("tool_calls") and generation.finish_reason != "length"
        return Reply(
            message=reply,
            finish_reason="tool_calls" if called else generation.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(node.completion),
            tokens_left=self.max_seq_len - node.end,
            cached_tokens=generation.cached_tokens,
        )

    def _count(self, node: Node, turn: Turn) -> None:
        stats = self.stats
        stats.turns += 1
        stats.prompt_tokens += len(node.prompt)
        stats.completion_tokens += len(node.completion)
        stats.input_tokens += node.start
        stats.cached_tokens += turn.generation.cached_tokens
        stats.token_seconds += turn.token_seconds
        stats.engine_seconds += turn.engine_seconds
        stats.wait_seconds += turn.wait_seconds
        stats.retries += turn.tries - 1
        for _, _, first, last in node.spans:
            low, high = self._versions or (first, last)
            self._versions = (min(low, first), max(high, last))


@dataclass(frozen=True)
class _Request:
    """One call, attached: what it adds to which turn, after `asked` turns were committed."""

    parent: Node | None
    appended: Sequence[Message]
    text: bytes
    keys: Sequence[Key]
    tools: Sequence[ToolSchema] | None
    tools_text: str
    max_tokens: int | None
    asked: int

    @property
    def before(self) -> int:
        """Tokens of the turn that it goes on from, and of those before it."""
        return 0 if self.parent is None else self.parent.end


def _json(data: object) -> bytes:
    try:
        return orjson.dumps(data)
    except TypeError as error:
        raise SessionError(f"messages and tools must be JSON: {error}") from None
