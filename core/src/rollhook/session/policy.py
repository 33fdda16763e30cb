"""The policy as the runtime sees it: sessions on one side, engine workers on the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

from rollhook.engine.base import Generation, GenerationRequest, PauseMode, SamplingParams
from rollhook.engine.streaming import CutStreamError, TokenSink
from rollhook.engine.weights import cache_key, update_workers
from rollhook.errors import BudgetExceeded, EngineError
from rollhook.router import RouteRequest, Worker
from rollhook.routing import Chain
from rollhook.session.common import SessionExistsError
from rollhook.session.fleet import Fleet, Route
from rollhook.session.render import Renderer
from rollhook.session.session import Session
from rollhook.session.spill import Spill
from rollhook.session.turn import Clock, Generator, Limits, Parts, Turn
from rollhook.session.workers import Entry, Gate, WorkerTable

log = logging.getLogger(__name__)


class PolicyClient:
    """Opens sessions, routes them to workers, and asks the engines for tokens.

    A turn whose worker fails is asked again from another one, which is safe because nothing was committed.
    Around a weight update `pause` makes requests wait, off the agent's clock. For `revive` see `Fleet`.
    """

    def __init__(
        self,
        renderer: Renderer,
        router: Chain,
        client: Generator,
        *,
        context_length: int,
        pause_mode: PauseMode = "in_place",
        seed: int = 0,
        limits: Limits | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        revive: Callable[[Worker], Awaitable[bool]] | None = None,
    ) -> None:
        self.renderer = renderer
        self.context_length = context_length
        #: `thin`: a client may send replies back without their reasoning
        self.matcher: Literal["strict", "thin"] = "strict"
        #: where the records of long sessions go
        self.spill = Spill()
        self.sessions: dict[str, Session] = {}
        self._client = client
        self._pause_mode = pause_mode
        self._limits = limits or Limits()
        self._now = now
        self._gate = Gate(now)
        self._next_version: int | None = None
        self.fleet = Fleet(
            router, client, self._gate, seed=seed, limits=limits, now=now, sleep=sleep, revive=revive
        )

    @property
    def table(self) -> WorkerTable:
        """The workers, with their loads."""
        return self.fleet.table

    @property
    def version(self) -> int:
        """The current weight version."""
        return self.table.version

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Say which workers exist, all healthy and serving `version`; others leave the routing."""
        self.fleet.set_workers(workers, version)

    def set_version(self, version: int, failed: Container[Worker] = ()) -> None:
        """Say that all workers serve `version` now, but for the failed ones, which leave the routing."""
        self.table.set_version(version, failed)

    def came_back(self, worker: Worker) -> None:
        """Look at once at an engine that was started anew; it must serve the current version."""
        self.fleet.health.trust(worker.url)
        self.fleet.later(self.fleet.check_health())

    def drop(self, worker: Worker) -> None:
        """Take an engine out for good, with all its ranks."""
        self.fleet.remove(Worker(worker.url))

    def pause(self, next_version: int | None = None) -> None:
        """Make new requests wait; `next_version` is what the engines may serve from now on."""
        self._next_version = next_version
        self._gate.pause()

    def resume(self) -> None:
        """Let requests through again."""
        self._next_version = None
        self._gate.resume()

    async def update_weights(self, path: Path, version: int) -> dict[Worker, str]:
        """Bring all engines to a version while requests wait; return the workers that failed, and why.

        Raises EngineError for a version that does not follow the current one.
        """
        if version <= self.version:
            raise EngineError(f"weight version {version} does not follow {self.version}, which is served")
        self.pause(version)
        try:
            if self._limits.drain:
                await self.fleet.idle(self._limits.drain)
            workers = self.table.workers
            out = {entry.worker for entry in self.table if not entry.healthy}
            failed = await update_workers(self._client, workers, path, version, self._pause_mode, out=out)
            joined = set(self.table.workers).difference(workers)  # they are offered once a probe finds it
            self.set_version(version, joined.union(failed))
        finally:
            self.resume()
        return failed

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
        prefix_ids: Sequence[int] = (),
    ) -> Session:
        """Open a session and choose its worker (the first turn chooses when none is on offer now).

        `max_seq_len` bounds prompt and replies together, `reply_tokens` one reply, `turns` the replies.
        `sampling.max_new_tokens` and `.stop_token_ids` are set per turn. Raises SessionExistsError for an id
        that is open.
        """
        if session_id in self.sessions:
            raise SessionExistsError(f"session {session_id!r} is open already")
        request = RouteRequest(session_id, task_id, prefix_ids, max_seq_len)
        session = Session(
            self,
            self.fleet.enter(request),
            sampling=replace(sampling or SamplingParams(), stop_token_ids=self.renderer.stop_token_ids),
            max_seq_len=min(max_seq_len, self.context_length),
            reply_tokens=reply_tokens,
            turns=turns,
            seed=seed,
            clock=clock,
        )
        self.sessions[session_id] = session
        return session

    async def generate(
        self,
        route: Route,
        ids: Sequence[int],
        sampling: SamplingParams,
        clock: Clock | None,
        on_tokens: TokenSink | None = None,
    ) -> Turn:
        """Ask the session's worker for one completion, and others when it fails.

        With `on_tokens` the engine streams; what that was given stays true, for the next try goes on from
        it. Charges the clock with the token time of what is returned, and raises BudgetExceeded, the request
        aborted, when the clock runs out before. Raises EngineError when the request is refused, or no worker
        has answered within the limits.
        """
        started = self._now()
        failed: set[Worker] = set()
        error: EngineError | None = None
        parts = Parts(sampling)
        streamed = tries = faults = 0
        engine = 0.0

        def sink(new: Sequence[int]) -> None:
            nonlocal streamed
            streamed += len(new)
            if on_tokens is not None:
                on_tokens(new)

        while faults < self._limits.attempts and parts.whole() is None:
            tries += 1
            entry = None
            while entry is None or self._gate.paused:  # an update may begin while a worker is waited for
                await self._wait_open()
                entry = await self.fleet.worker(route, failed, faults, ids)
            before = entry.version
            asked, paused, pauses = self._now(), self._gate.seconds(), self._gate.pauses
            request = GenerationRequest(
                f"{route.request.session_id}-{uuid4().hex[:12]}",
                [*ids, *parts.token_ids] if parts.token_ids else ids,
                replace(sampling, max_new_tokens=parts.room),
                cache_key(before, self._pause_mode),
            )
            part, failure = await self._try(entry, request, clock, None if on_tokens is None else sink)
            if failure is not None:
                error = failure
                faults += 1
                failed.add(entry.worker)
                if part is None:
                    if streamed > len(parts.token_ids):  # their log-probabilities are lost
                        break
                    continue
            assert part is not None
            engine = self._now() - asked
            spent = max(0.0, engine - (self._gate.seconds() - paused) - (part.queue_seconds or 0.0))
            if failure is None and part.finish_reason == "abort":
                error = EngineError(f"{entry.worker.url} aborted the request", kind="retryable")
                self._charge_cut(clock, spent)
                faults += self._gate.pauses == pauses  # a weight update may abort as often as it likes
            if on_tokens is not None or part.finish_reason != "abort":
                parts.add(part, before, self._version_after(entry), spent)
                if clock is not None:
                    clock.charge("tokens", spent)
        generation = parts.whole()
        if generation is None:
            raise EngineError(f"no answer after {tries} tries: {error}", kind="infrastructure") from error
        waited = max(0.0, self._now() - started - parts.seconds)
        return Turn(generation, tuple(parts.spans), parts.seconds, engine, waited, tries)

    def _version_after(self, entry: Entry) -> int:
        """Return the newest version that a reply of a worker may have been generated with."""
        return entry.version if self._next_version is None else max(entry.version, self._next_version)

    def waits_for(self, route: Route) -> str:
        """Return what a request of a session waits for now, in words."""
        if self._gate.paused:
            return "a weight update"
        if route.entry is None or route.worker is None:
            return "an engine that is healthy"
        rank = "" if route.worker.dp_rank is None else f" (rank {route.worker.dp_rank})"
        queued = f", where requests queue for {q:.1f} s" if (q := route.entry.queue_seconds) >= 0.1 else ""
        return f"tokens of {route.worker.url}{rank}{queued}"

    def leave(self, route: Route) -> None:
        """Forget a session: its worker's count and what the router policies know of it."""
        self.sessions.pop(route.request.session_id, None)
        self.fleet.leave(route)

    def abort_later(self, worker: Worker, rid: str) -> None:
        """Abort a request at its engine without waiting."""
        self.fleet.later(self._abort(worker, rid))

    async def check_health(self) -> None:
        """Ask the workers that are out for their health; those that serve the current version come back."""
        await self.fleet.check_health()

    async def close(self) -> None:
        """Close every session and finish what runs in the background; safe to call twice."""
        for session in list(self.sessions.values()):
            await session.close()
        await self.fleet.close()

    # -- one request

    async def _wait_open(self) -> None:
        try:
            await self._gate.wait(self._limits.pause)
        except TimeoutError:
            raise EngineError(
                f"the weight update did not finish within {self._limits.pause:g} s", kind="infrastructure"
            ) from None

    async def _try(
        self, entry: Entry, request: GenerationRequest, clock: Clock | None, on_tokens: TokenSink | None
    ) -> tuple[Generation | None, EngineError | None]:
        """Return what one try gave, a part of it where it was cut, and the failure that another may mend."""
        tokens = len(request.input_ids) + request.sampling.max_new_tokens
        try:
            with self.fleet.sending(entry, tokens):
                generation = await self._ask(entry, request, clock, on_tokens)
        except EngineError as failure:
            if failure.kind == "user":
                raise
            if failure.status is None:  # it gave no answer, so it may still be generating
                self.abort_later(entry.worker, request.rid)
            await self.fleet.failed(entry, failure)
            return failure.partial if isinstance(failure, CutStreamError) else None, failure
        return generation, None

    async def _ask(
        self, entry: Entry, request: GenerationRequest, clock: Clock | None, on_tokens: TokenSink | None
    ) -> Generation:
        """Send one request and wait for it as long as the clock allows.

        An engine that does not answer the abort either is at fault: EngineError.
        """
        asked = self._now()
        task = asyncio.ensure_future(self._client.generate(entry.worker, request, on_tokens))
        try:
            if not await self._within(task, clock, allowance=2 * entry.queue_seconds):
                await self._abort(entry.worker, request.rid)
                await asyncio.wait({task}, timeout=self._limits.abort)
                if not task.done():
                    raise EngineError(
                        f"{entry.worker.url} did not end an aborted request within {self._limits.abort:g} s",
                        kind="retryable",
                    )
            generation = task.result()
        finally:
            if not task.done():
                task.cancel()
                self.abort_later(entry.worker, request.rid)
        entry.queue_seconds = min(generation.queue_seconds or 0.0, self._now() - asked)
        return generation

    async def _within(self, task: asyncio.Task[Generation], clock: Clock | None, allowance: float) -> bool:
        """Return True when the task is done, False when the clock and the allowance have run out.

        Seconds of a pause do not count.
        """
        if clock is None:
            await asyncio.wait({task})
            return True
        started, paused = self._now(), self._gate.seconds()
        limit = clock.remaining + allowance
        while not task.done():
            if self._gate.paused:
                await self._gate.open_or_done(task)
                continue
            left = limit - (self._now() - started - (self._gate.seconds() - paused))
            if left <= 0:
                return False
            await asyncio.wait({task}, timeout=left)
        return True

    def _charge_cut(self, clock: Clock | None, spent: float) -> None:
        """After an aborted generation: raise BudgetExceeded if its token time used up the agent's clock."""
        if clock is None or spent < clock.remaining:
            return
        clock.charge("tokens", spent + 1e-6)
        clock.check()
        raise BudgetExceeded("the agent's clock ran out during a reply", node="agent")

    async def _abort(self, worker: Worker, rid: str) -> None:
        try:
            await self._client.abort(worker, rid)
        except EngineError as error:
            log.warning("request %s could not be aborted: %s", rid, error)
