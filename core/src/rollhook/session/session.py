"""A session: one conversation, or several branches of one, with the exact tokens behind it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from rollhook.agent import Reply
from rollhook.engine.base import Generation, SamplingParams
from rollhook.errors import AgentError, Kind
from rollhook.messages import Message, ToolSchema
from rollhook.router import RouteRequest, Worker
from rollhook.session.tree import Key, Leaf, Node, Span, Tree, message_key
from rollhook.session.workers import Entry

if TYPE_CHECKING:
    from rollhook.session.policy import PolicyClient
    from rollhook.session.turn import Clock, Turn

_ROLES = frozenset({"system", "user", "assistant", "tool"})
# longer texts are tokenised on a thread, so that the loop is not held up
_LONG_TEXT = 32_768


class SessionError(AgentError):
    """The caller used a session wrongly; `status` is what HTTP answers."""

    kind: Kind = "user"
    status: ClassVar[int] = 400


class SessionClosedError(SessionError):
    """The session is closed, or was closed while the reply was generated."""

    status = 404


class SessionExistsError(SessionError):
    """A session of that id is open."""

    status = 409


class TurnConflictError(SessionError):
    """The request extends a turn that was cut for length."""

    status = 409


@dataclass
class Route:
    """Where a session's requests go; owned by the policy client."""

    request: RouteRequest
    worker: Worker | None = None
    entry: Entry | None = None


@dataclass
class SessionStats:
    """Counts of committed turns, and where seconds went, failed tries included in the waiting."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    token_seconds: float = 0.0
    engine_seconds: float = 0.0
    wait_seconds: float = 0.0
    retries: int = 0


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
        self._sampling = sampling
        self._seed = seed
        self._tree = Tree()
        self._running: set[asyncio.Task[Reply]] = set()
        self._versions: tuple[int, int] | None = None
        self._sequence = 0
        self._started = 0
        self._closed = False

    @property
    def id(self) -> str:
        """The session's id."""
        return self.route.request.session_id

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""
        return max(0, self.turns - self._tree.count - len(self._running))

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
    ) -> Reply:
        """Generate one turn after `messages`, the whole conversation so far.

        The budget is enforced before anything is generated: the reply gets what `reply_tokens`,
        `max_tokens`, the session's and the model's length leave, and where nothing is left, or no turn,
        it is an empty `length` without a token. Cancelled, it aborts the request at the engine and
        commits nothing. Raises SessionError for a request that makes no sense (closed, malformed,
        extending a length-cut turn, refused by the template), BudgetExceeded when the agent's clock has
        run out, EngineError when the engines give no answer.
        """
        self._check_open()
        keys = [message_key(checked(message)) for message in messages]
        digest = orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS).decode() if tools else ""
        parent = self._tree.attach(keys, digest)
        appended = messages if parent is None else messages[parent.message_count :]
        _check_appended(appended)
        if parent is not None and parent.finish_reason == "length":
            raise TurnConflictError("the turn before was cut for length and cannot be extended")
        if self.turns_left <= 0:
            return _nothing(0 if parent is None else parent.end, self.max_seq_len)
        work = asyncio.ensure_future(self._turn(_Request(parent, appended, keys, tools, digest, max_tokens)))
        self._running.add(work)
        try:
            return await work
        except asyncio.CancelledError:
            mine = asyncio.current_task()
            if self._closed and (mine is None or not mine.cancelling()):
                raise SessionClosedError(f"session {self.id!r} was closed during the reply") from None
            raise
        finally:
            self._running.discard(work)

    def leaves(self) -> list[Leaf]:
        """Return what may train: one leaf per branch, a completion that branches share only in the first."""
        return self._tree.leaves()

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of any generated token; None before the first."""
        return self._versions

    async def close(self) -> None:
        """End the session: calls under way are aborted and raise SessionClosedError. Safe to call twice.

        What was committed can still be read.
        """
        if self._closed:
            return
        self._closed = True
        self._policy.leave(self.route)
        running = list(self._running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"session {self.id!r} is closed")

    async def _turn(self, request: _Request) -> Reply:
        seed = self._turn_seed()
        if self.clock is not None:
            self.clock.begin_turn()
            self.clock.check()
        added = await self._increment(request)
        before = request.parent.token_ids() if request.parent is not None else array("i")
        ids = before + added
        room = min(self.reply_tokens, self.max_seq_len - len(ids), request.max_tokens or self.reply_tokens)
        if room <= 0:
            return _nothing(len(ids), self.max_seq_len)
        sampling = replace(self._sampling, max_new_tokens=room, seed=seed)
        turn = await self._policy.generate(self.route, ids, sampling, self.clock)
        self._check_open()
        return self._commit(request, added, turn, len(ids))

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
        size = sum(len(message.get("content") or "") for message in request.appended)
        return array("i", await asyncio.to_thread(work) if size > _LONG_TEXT else work())

    def _turn_seed(self) -> int | None:
        """Return the seed of the next turn, derived from the session's; a retried turn keeps its own."""
        self._started += 1
        if self._seed is None:
            return None
        text = f"{self._seed}/{self._started}".encode()
        return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") >> 1

    def _commit(self, request: _Request, added: array[int], turn: Turn, prompt_tokens: int) -> Reply:
        generation = turn.generation
        self._sequence += 1
        reply = self._renderer.parse(generation.token_ids, tool_calls=bool(request.tools))
        for call in reply.get("tool_calls", ()):
            call["id"] = f"{call['id']}_{self._sequence}"
        node = Node(
            parent=request.parent,
            messages=(*(_copy(message) for message in request.appended), reply),
            keys=(*request.keys[-len(request.appended) :], message_key(reply)),
            prompt=added,
            completion=array("i", generation.token_ids),
            logprobs=array("f", generation.logprobs),
            spans=version_spans(generation, turn.version_before, turn.version_after),
            finish_reason=generation.finish_reason,
            seq=self._sequence,
            tools=request.digest,
        )
        self._tree.commit(node)
        self._count(node, turn)
        return Reply(
            message=_copy(reply),
            finish_reason="tool_calls" if reply.get("tool_calls") else generation.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(node.completion),
            tokens_left=self.max_seq_len - node.end,
        )

    def _count(self, node: Node, turn: Turn) -> None:
        stats = self.stats
        stats.turns += 1
        stats.prompt_tokens += len(node.prompt)
        stats.completion_tokens += len(node.completion)
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
    """One call, attached: what it adds to which turn."""

    parent: Node | None
    appended: Sequence[Message]
    keys: Sequence[Key]
    tools: Sequence[ToolSchema] | None
    digest: str
    max_tokens: int | None


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


def checked(message: Any) -> Message:
    """Return a message if it has the form of one, else raise SessionError."""
    if not isinstance(message, Mapping):
        raise SessionError("every message is an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise SessionError(f"role {role!r} is unknown; roles are system, user, assistant, tool")
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key), str | None):
            raise SessionError(f"{key} of a message must be text or null")
    for call in _calls(message):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SessionError("every one of a message's tool_calls has a function with a name")
    return message  # type: ignore[return-value]


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise SessionError("tool_calls of a message must be a list of objects")
    return calls


def _check_appended(appended: Sequence[Message]) -> None:
    if not appended:
        raise SessionError("nothing was appended after the last reply, so there is nothing to answer")
    if appended[-1]["role"] == "assistant":
        raise SessionError("the last message is the assistant's; end with a user or tool message")


def _copy(message: Message) -> Message:
    return message.copy()


def _nothing(prompt_tokens: int, max_seq_len: int) -> Reply:
    """Return the reply of a budget that has no room: a clean `length`, nothing generated."""
    empty: Message = {"role": "assistant", "content": ""}
    return Reply(empty, "length", prompt_tokens, 0, max(0, max_seq_len - prompt_tokens))
