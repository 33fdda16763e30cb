"""What sessions share, whether they are over tokens or over messages: errors, counts, checks, calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from rollhook.agent import Reply
from rollhook.errors import AgentError, EngineError, Kind
from rollhook.messages import Message
from rollhook.reply.parser import Delta

#: is given what a reply's text grows by
DeltaSink = Callable[[Delta], None]

_ROLES = frozenset({"system", "user", "assistant", "tool"})


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
class SessionStats:
    """Counts of committed turns, and where seconds went, failed tries included in the waiting.

    `prompt_tokens` counts what was appended, each token once; `input_tokens` all that the engine was given,
    of which it had `cached_tokens`. `estimated`: tokens were not counted by anybody.
    """

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    token_seconds: float = 0.0
    engine_seconds: float = 0.0
    wait_seconds: float = 0.0
    retries: int = 0
    estimated: bool = False


class Calls:
    """The turns of one session that are under way. Closing ends them, and no other begins."""

    def __init__(self, session_id: str, now: Callable[[], float] = time.monotonic) -> None:
        self.closed = False
        #: what the engines failed with, until they answer again
        self.failure: EngineError | None = None
        self._now = now
        self._busy = 0.0
        self._since = 0.0
        self._session_id = session_id
        self._running: set[asyncio.Task[Reply]] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one was under way."""
        return self._busy + (self._now() - self._since if self._running else 0.0)

    def check_open(self) -> None:
        """Raise SessionClosedError once the session is closed."""
        if self.closed:
            raise SessionClosedError(f"session {self._session_id!r} is closed")

    async def run(self, turn: Coroutine[Any, Any, Reply]) -> Reply:
        """Wait for a turn; raises SessionClosedError when the session is closed meanwhile."""
        work = asyncio.ensure_future(turn)
        if not self._running:
            self._since = self._now()
        self._running.add(work)
        try:
            reply = await work
            self.failure = None
            return reply
        except EngineError as error:
            self.failure = error
            raise
        except asyncio.CancelledError:
            mine = asyncio.current_task()
            if self.closed and (mine is None or not mine.cancelling()):
                raise SessionClosedError(
                    f"session {self._session_id!r} was closed during the reply"
                ) from None
            raise
        finally:
            self._running.discard(work)
            if not self._running:
                self._busy += self._now() - self._since

    async def close(self) -> None:
        """Cancel the turns under way and wait for their end."""
        self.closed = True
        running = list(self._running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running)


def turn_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of a session's turn, derived from the session's."""
    if seed is None:
        return None
    return int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=4).digest(), "big") >> 1


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


def check_appended(appended: Sequence[Message]) -> None:
    """Raise SessionError where a request adds nothing to answer."""
    if not appended:
        raise SessionError("nothing was appended after the last reply, so there is nothing to answer")
    if appended[-1]["role"] == "assistant":
        raise SessionError("the last message is the assistant's; end with a user or tool message")


def nothing(prompt_tokens: int, max_seq_len: int) -> Reply:
    """Return the reply of a budget that has no room: a clean `length`, nothing generated."""
    empty: Message = {"role": "assistant", "content": ""}
    return Reply(empty, "length", prompt_tokens, 0, max(0, max_seq_len - prompt_tokens))
