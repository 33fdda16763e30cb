"""Asks and answers between two event loops, over anything that carries lists of messages in order.

What is said is pickled at once, so that what cannot be pickled fails alone, where it was said.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollhook.errors import RollhookError
from rollhook.failures import Failure

logger = logging.getLogger(__name__)


class Message(NamedTuple):
    """One thing said. `number` ties an answer, a failure or a withdrawal to its ask; a tell has 0."""

    kind: Literal["ask", "answer", "failure", "withdraw", "tell"]
    number: int
    payload: bytes


class Peer:
    """One end. `handlers` are what the other may ask or tell for, by name: functions, plain or async.

    A plain handler runs before what was said later is looked at; an async one runs in a task. An ask whose
    asker is cancelled is withdrawn, and its handler's task cancelled. `log` is where the other end's
    tracebacks go, `name` is what the other calls this end in errors.
    """

    def __init__(self, name: str, handlers: Mapping[str, Callable[..., Any]], log: Path) -> None:
        self._name = name
        self._handlers = handlers
        self._log = log
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._messages: list[Message] = []
        self._waiting = asyncio.Event()
        self._lost: RollhookError | None = None

    async def ask(self, what: str, *args: Any) -> Any:
        """Return what the other end's handler returns; raises what it raises, or what `lose` was told."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        payload = pickle.dumps((what, args))
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._say(Message("ask", number, payload))
        try:
            return await future
        except asyncio.CancelledError:
            self._say(Message("withdraw", number, b""))
            raise
        finally:
            self._asked.pop(number, None)

    def tell(self, what: str, *args: Any) -> None:
        """Say something that wants no answer; nobody hears it once the other end is lost."""
        self._say(Message("tell", 0, pickle.dumps((what, args))))

    async def outgoing(self) -> list[Message]:
        """Return what is to be carried to the other end, waiting until there is something."""
        await self._waiting.wait()
        self._waiting.clear()
        messages, self._messages = self._messages, []
        return messages

    def take(self, messages: Sequence[Message]) -> None:
        """Take what the other end's `outgoing` returned."""
        for message in messages:
            kind, number, payload = message
            if kind in ("ask", "tell"):
                self._handle(number, payload)
            elif kind == "withdraw":
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            elif (future := self._asked.get(number)) is not None and not future.done():
                try:
                    value = pickle.loads(payload)  # noqa: S301 - from our own process
                except Exception as error:  # noqa: BLE001 - whatever its classes raise
                    kind, value = "failure", Failure.of(error, "reading an answer")
                if kind == "failure":
                    future.set_exception(value.to_error(self._log))
                else:
                    future.set_result(value)

    def lose(self, error: RollhookError) -> None:
        """The other end is gone: fail what it was asked, now and later, and drop what it asks."""
        self._lost = error
        self._messages.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
        for task in self._tasks.values():
            task.cancel()

    def _say(self, message: Message) -> None:
        if self._lost is None:
            self._messages.append(message)
            self._waiting.set()

    def _handle(self, number: int, payload: bytes) -> None:
        what = "a message"
        try:
            what, args = pickle.loads(payload)  # noqa: S301 - from our own process
            handler = self._handlers[what]
            result = None if inspect.iscoroutinefunction(handler) else handler(*args)
        except Exception as error:  # noqa: BLE001 - handed to the asker
            self._fail(number, what, error)
            return
        if inspect.iscoroutinefunction(handler):
            task = asyncio.ensure_future(self._finish(number, what, handler, args))
            key = number or -next(self._numbers)
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        else:
            self._answer(number, what, result)

    async def _finish(self, number: int, what: str, handler: Callable[..., Any], args: Sequence[Any]) -> None:
        try:
            value = await handler(*args)
        except Exception as error:  # noqa: BLE001 - handed to the asker
            self._fail(number, what, error)
        else:
            self._answer(number, what, value)

    def _answer(self, number: int, what: str, value: Any) -> None:
        if not number:
            return
        try:
            payload = pickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - pickle raises whatever the value's classes raise
            self._fail(number, what, error)
        else:
            self._say(Message("answer", number, payload))

    def _fail(self, number: int, what: str, error: Exception) -> None:
        """Send an error home; one of a tell has no home, and is logged."""
        if not isinstance(error, RollhookError):
            logger.error("%s: %s failed", self._name, what, exc_info=error)
        elif not number:
            logger.error("%s: %s failed: %s", self._name, what, error)
        if number:
            failure = Failure.of(error, f"{self._name}.{what}")
            self._say(Message("failure", number, pickle.dumps(failure)))
