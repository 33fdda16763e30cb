"""Commands on a backend that can only run short scripts: started detached, looked after by polling.

Every request may be sent again, so a connection that a gateway cuts loses no output and never runs a command
twice. A backend gives the three methods of `Link`; `DetachedProcess` is the rest.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import detached_scripts as sh
from rollhook.sandbox import scripts
from rollhook.sandbox.detached_answers import CHUNK, Answer, Stream, parse

_NOTHING = bytes(CHUNK)
_LITTLE = 64 << 10
_INLINE_INPUT = 32 << 10
_INPUT_CHUNK = 4 << 20
_MUCH_GARBAGE = 8

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Link(Protocol):
    """What a backend offers. Errors are SandboxDead or SandboxError; `kind="retryable"` is tried again."""

    async def run(self, script: str, *, timeout: float) -> str:
        """Run a /bin/sh script as the user that may do most and return its stdout, whatever its exit code.

        It ends by itself within `timeout` seconds but for a sandbox that is stuck; it reads no input.
        `script` has at most `DetachedTimes.inline` bytes.
        """

    async def put(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox, its directory is there."""


@dataclass(frozen=True)
class DetachedTimes:
    """Times in seconds, and the largest script in bytes that is sent as a command."""

    #: an answer is waited for so long at most while nothing happens; keep it below what a gateway cuts
    poll: float = 15.0
    #: how long the start itself waits for a command that ends at once
    first: float = 0.3
    #: a request beyond what it was asked to wait
    grace: float = 20.0
    #: how long requests are sent again before the command is given up
    patience: float = 120.0
    backoff_first: float = 0.1
    backoff_most: float = 5.0
    inline: int = 60_000


class Detached:
    """The commands of one sandbox: where they are kept, and how requests are sent again."""

    def __init__(
        self,
        link: Link,
        *,
        base: str = "/var/tmp",  # noqa: S108 - in the sandbox
        times: DetachedTimes | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.times = times or DetachedTimes()
        #: commands whose command line contains this are the backend's own
        self.base = f"{base}/.rollhook-{secrets.token_hex(6)}"
        self._garbage: list[str] = []
        self._garbage_bytes = 0
        self._sleep = sleep
        self._clock = clock
        self._chores: set[asyncio.Task[None]] = set()

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> DetachedProcess:
        """Start a command, once whatever becomes of the request.

        A cancelled start starts nothing, or is undone: the tree that carries the `ROLLHOOK_EXEC` of `env` is
        killed. Raises SandboxError(kind="user") for an unknown user or one that cannot be had.
        """
        nonce = secrets.token_hex(8)
        done: list[str] = []
        if len(self._garbage) >= _MUCH_GARBAGE or self._garbage_bytes >= CHUNK:
            done, self._garbage, self._garbage_bytes = self._garbage, [], 0
        script = sh.start(
            self.base,
            nonce,
            argv,
            cwd=cwd,
            env=env or {},
            user=user,
            stdin=stdin,
            wait=0.0 if stdin else self.times.first,
            most=CHUNK,
            finished=done,
        )
        try:
            answer = await self.ask(script, wait=self.times.first, user=user)
        except asyncio.CancelledError:
            self._chore(self._undo(nonce, (env or {}).get("ROLLHOOK_EXEC", "")))
            raise
        return DetachedProcess(self, f"{self.base}/{nonce}", answer)

    def forget(self, path: str, size: int) -> None:
        """Have a path of so many bytes removed with one of the next starts, the very next if that is much."""
        self._garbage.append(path)
        self._garbage_bytes += size

    async def ask(self, script: str, *, wait: float, user: str | None = None) -> Answer:
        """Send a script that answers like `look` until an answer arrives."""

        async def once() -> Answer:
            said = await self._send(script, wait + self.times.grace)
            return parse(said, user)

        return await self.again(once)

    async def tell(self, script: str) -> str:
        """Send a script that may be sent twice; return what it printed."""
        return await self.again(lambda: self.send(script))

    async def again(self, request: Callable[[], Awaitable[Result]]) -> Result:
        """Send a request until it succeeds; what is not retryable, or has gone on too long, is raised."""
        deadline = self._clock() + self.times.patience
        for tries in itertools.count():
            try:
                return await request()
            except SandboxDead:
                raise
            except SandboxError as error:
                if error.kind != "retryable" or self._clock() >= deadline:
                    raise
                logger.info("a request to a sandbox is sent again: %s", error)
                asked = min(float(getattr(error, "retry_after", None) or 0.0), self.times.patience / 4)
            await self._sleep(max(asked, min(self.times.backoff_first * 2.0**tries, self.times.backoff_most)))
        raise AssertionError("unreachable")

    async def kill_tree(self, mark: str, own_pids: frozenset[int]) -> list[tuple[int, str]]:
        """Kill as `RawSandbox.kill_tree`; helpers of this module die too, but are no part of the census."""

        async def once() -> tuple[list[tuple[int, str]], int]:
            said = await self._send(sh.kill_tree(self.base, mark, own_pids), self.times.grace)
            killed, left = scripts.parse_killed(said.encode())
            if left < 0:
                raise SandboxError("the sandbox did not say what it killed", kind="retryable")
            return killed, left

        killed, left = await self.again(once)
        if left:
            raise SandboxError(f"{left} processes are still there after being killed")
        return [(pid, command) for pid, command in killed if self.base not in command]

    async def send(self, script: str) -> str:
        """Send a script once and return what it printed."""
        return await self._send(sh.helper(self.base) + script, self.times.grace)

    async def _send(self, script: str, timeout: float) -> str:
        data = script.encode("utf-8", "surrogateescape")
        if len(data) <= self.times.inline and _plain(script):
            return await self.link.run(script, timeout=timeout)
        path = f"{self.base}.{secrets.token_hex(4)}"
        await self.link.put(path, data)
        return await self.link.run(f". {path}; rm -f {path}", timeout=timeout)

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _undo(self, nonce: str, mark: str) -> None:
        try:
            await self.tell(sh.prevent(self.base, nonce))
            if mark:
                await self.kill_tree(mark, frozenset({1}))
        except SandboxDead:
            pass
        except SandboxError as error:
            logger.warning("a command whose start was cancelled may still run: %s", error)

    async def aclose(self) -> None:
        """Wait for what a cancelled start left to do."""
        while self._chores:
            await asyncio.wait(set(self._chores))


class DetachedProcess:
    """A command that was started detached; see `rollhook.sandbox.backend.RawProcess`.

    What it prints after its own end is not collected. One task looks after it as long as anybody waits.
    """

    def __init__(self, detached: Detached, directory: str, first: Answer) -> None:
        self._detached = detached
        self._directory = directory
        self._streams = (Stream(), Stream())
        self._code: int | None = None
        self._broken = self._input_closed = False
        self._failure: SandboxError | None = None
        self._changed = asyncio.Condition()
        self._looker: asyncio.Task[None] | None = None
        self._input = bytearray()
        self._chunks = 0
        self._feeder: asyncio.Task[None] | None = None
        self._feeding = asyncio.Lock()
        self._learn(first)

    def keep_at_most(self, size: int) -> None:
        """Fetch only the first and the last half of so many bytes of each stream.

        What lies between is counted, not fetched: zeros stand for it in the streams.
        """
        for stream in self._streams:
            stream.kept = ((size + 1) // 2, size // 2)

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""
        return self._open(self._streams[0])

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""
        return self._open(self._streams[1])

    def _open(self, stream: Stream) -> AsyncIterator[bytes]:
        stream.read = True
        return self._chunks_of(stream)

    async def _chunks_of(self, stream: Stream) -> AsyncIterator[bytes]:
        try:
            while True:
                await self._until(lambda: bool(stream.buffer) or (self._code is not None and not stream.open))
                if not stream.buffer:
                    return
                pieces = list(stream.buffer)
                stream.buffer.clear()
                stream.waiting = 0
                self._look()
                for piece in pieces:
                    if isinstance(piece, bytes):
                        yield piece
                        continue
                    for start in range(0, piece, CHUNK):
                        yield _NOTHING[: min(CHUNK, piece - start)]
        finally:
            stream.read = False

    async def wait(self) -> int:
        """Return the exit code once the command has ended and its output has arrived where it is read."""
        await self._until(lambda: self._code is not None and not any(s.open for s in self._streams))
        assert self._code is not None
        return self._code

    async def rest(self) -> None:
        """Wait until what a killed command printed last has arrived, as long as an answer may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._detached.times.grace):
                await self.wait()

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._look()
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or condition())
        if not condition() and self._failure is not None:
            raise self._failure

    def _look(self) -> None:
        if self._wanted() and (self._looker is None or self._looker.done()):
            self._looker = asyncio.create_task(self._keep_looking())

    def _wanted(self) -> bool:
        if self._failure is not None:
            return False
        if self._code is None:
            return not all(stream.full for stream in self._streams)
        return any(stream.open and not stream.full for stream in self._streams)

    async def _keep_looking(self) -> None:
        wait, chatty = self._detached.times.poll, 0
        try:
            while self._wanted():
                out, err = self._streams
                out.leave_out()
                err.leave_out()
                behind = any(stream.offset < stream.size and not stream.full for stream in self._streams)
                seconds = 0.0 if behind or self._code is not None else wait
                # a stream that nobody takes is asked for beyond its end, so that it brings nothing
                offsets = [1 << 60 if stream.full else stream.offset for stream in (out, err)]
                script = sh.look(self._directory, seconds, offsets[0], offsets[1], CHUNK)
                answer = await self._detached.ask(script, wait=seconds)
                self._learn(answer)
                async with self._changed:
                    self._changed.notify_all()
                # who prints a little all the time is asked less often
                brought = sum(len(news) for news in answer.news)
                chatty = chatty + 1 if answer.code is None and 0 < brought < _LITTLE else 0
                if chatty > 2:
                    await asyncio.sleep(min(0.05 * chatty, 0.25))
        except SandboxError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            self._failure = SandboxError(f"looking after a command failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _learn(self, answer: Answer) -> None:
        for stream, news, size in zip(self._streams, answer.news, answer.sizes, strict=True):
            stream.take_in(news, size)
        self._broken = self._broken or answer.broken
        if answer.code is not None and self._code is None:
            self._code = answer.code

    async def write_stdin(self, data: bytes) -> None:
        """Take data, which travels in the background; waits while much is under way.

        Raises BrokenPipeError once nobody reads.
        """
        if self._broken or self._code is not None or self._input_closed:
            raise BrokenPipeError(32, "nobody reads")
        self._input += data
        if self._feeder is None or self._feeder.done() or len(self._input) >= 2 * _INPUT_CHUNK:
            await self._fed()
            self._feeder = asyncio.create_task(self._feed())

    async def close_stdin(self) -> None:
        """Signal end of file, after all that was written."""
        await self._fed()
        await self._feed()
        if not self._input_closed and self._code is None:
            self._input_closed = True
            await self._detached.tell(sh.end_of_input(self._directory))

    async def _fed(self) -> None:
        """Wait for what is under way, and raise what went wrong with it."""
        feeder, self._feeder = self._feeder, None
        if feeder is not None:
            await feeder

    async def _feed(self) -> None:
        async with self._feeding:
            while self._input and not self._broken and self._code is None:
                data = bytes(self._input[:_INPUT_CHUNK])
                del self._input[:_INPUT_CHUNK]
                self._chunks += 1
                await self._give(self._chunks, data)

    async def _give(self, number: int, data: bytes) -> None:
        if len(data) <= _INLINE_INPUT:
            await self._detached.tell(sh.feed(self._directory, number, base64.b64encode(data).decode()))
            return
        path = f"{self._directory}/in/{number}.new"
        await self._detached.again(lambda: self._detached.link.put(path, data))
        await self._detached.tell(sh.feed(self._directory, number, None))

    async def kill(self) -> None:
        """Kill the process itself."""
        if self._code is None:
            await self._detached.tell(sh.kill_one(self._directory))

    async def aclose(self) -> None:
        """Drop the handle; the command, if it runs, goes on."""
        tasks = {task for task in (self._looker, self._feeder) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._feeder is not None and not self._feeder.cancelled() and self._feeder.exception() is not None:
            logger.info("input of a command did not arrive: %s", self._feeder.exception())
        if self._code is not None:
            self._detached.forget(self._directory, sum(stream.size for stream in self._streams))


def _plain(script: str) -> bool:
    """Return whether a script is text that can travel as text."""
    try:
        script.encode()
    except UnicodeEncodeError:
        return False
    return True
