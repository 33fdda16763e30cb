"""The decode loop: one thread that owns the model and generates for whoever waits.

The batch is continuous: requests are admitted between iterations, finished rows leave at once. An iteration
is one token for every row and a bounded piece of the prompts that wait. Everything that is not generation
(weights, pauses, aborts) is an action that runs between two iterations, which makes the weight version of
every token exact.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rollhook_torch.batch import Batch, Forward, Prefill, Prompt
from rollhook_torch.prefix_cache import PrefixCache
from rollhook_torch.request import Request
from rollhook_torch.sampling import sample
from rollhook_torch.weights import load_into

logger = logging.getLogger(__name__)
PauseMode = Literal["abort", "retract", "in_place"]
#: prompts run together while their new tokens differ by at most this factor, or are fewer than SHORT
SIMILAR, SHORT = 2, 16


@dataclass
class Counts:
    """Totals since the start."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    iterations: int = 0
    busy_seconds: float = 0.0


class Decoder:
    """The thread. All methods may be called from any other thread."""

    def __init__(
        self,
        model: Any,
        version: str,
        *,
        context_length: int,
        max_batch: int,
        prefill_tokens: int,
        prefix_cache_bytes: int,
    ) -> None:
        self.model = model
        self.version = version
        self.context_length = context_length
        self.counts = Counts()
        self.error: BaseException | None = None
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self._forward = Forward(model)
        self._batch = Batch(self._forward, max_batch)
        self._prefill: Prefill | None = None
        self._waiting: deque[Request] = deque()
        self._live: set[Request] = set()
        self._actions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._paused = False
        self._stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Sequences that are decoded, or whose prompt is being computed."""
        return len(self._running())

    @property
    def waiting(self) -> int:
        """Sequences not admitted yet."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._paused

    def submit(self, request: Request) -> None:
        """Queue a request; it ends at once where the thread has died."""
        with self._wake:
            self._live.add(request)
            self._waiting.append(request)
            self._wake.notify()
        if self.error is not None:
            self._fail()

    def abort(self, match: Callable[[Request], bool]) -> Future[int]:
        """End the requests that match, with what they have generated; the future holds their number."""
        return self._act(lambda: self._abort(match))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop: `abort` ends what is under way, `retract` computes it anew later, `in_place` keeps it."""

        def act() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(lambda request: True)
            if mode == "retract":
                self._waiting.extendleft(reversed(self._running()))
                self._batch.clear()
                self._prefill = None

        return self._act(act)

    def resume(self) -> Future[None]:
        """Go on generating."""

        def act() -> None:
            self._paused = False

        return self._act(act)

    def load(self, directory: Path, version: str | None) -> Future[None]:
        """Load weights between two iterations; tokens drawn after it carry the new version.

        Rows under way go on with the keys and values that they have; nobody else gets those.
        The future raises ValueError when they do not fit, and nothing has changed then.
        """

        def act() -> None:
            load_into(self.model, directory)
            self.version = version if version is not None else self.version
            self.prefixes.clear()
            for request in self._batch.rows:
                request.one_version = False
            if self._prefill is not None:
                self._waiting.extendleft(reversed(self._prefill.requests))
                self._prefill = None

        return self._act(act)

    def flush(self) -> Future[bool]:
        """Drop all prefixes; the future holds False, and nothing happens, while there are requests."""

        def act() -> bool:
            if self._waiting or self._running():
                return False
            self.prefixes.clear()
            return True

        return self._act(act)

    def stop(self) -> None:
        """End the thread after the iteration under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _act(self, action: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            self._actions.append((action, future))
            self._wake.notify()
        if self.error is not None:
            self._fail()
        return future

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait():
                    self._do_actions()
                    if not self._paused:
                        started = time.perf_counter()
                        self._iterate()
                        self.counts.busy_seconds += time.perf_counter() - started
        except BaseException as error:
            self.error = error
            logger.exception("the decode thread died")
            self._fail()
            raise

    def _wait(self) -> bool:
        """Sleep until there is something to do; return False when the thread shall end."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._stopping
                    or self._actions
                    or (not self._paused and (self._waiting or self._running()))
                )
            )
            return not self._stopping

    def _do_actions(self) -> None:
        while self._actions:
            action, future = self._actions.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # who asked is gone
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - handed to who asked
                future.set_exception(error)

    def _iterate(self) -> None:
        if self._batch.rows:
            ids, logprobs = sample(self._batch.advance(), [r.draw for r in self._batch.rows])
            self._batch.newest(ids)
            self._record(self._batch.rows, ids, logprobs)
            self._release()
        tokens = self._prefill_tokens
        while tokens > 0 and (self._prefill or self._admit()):
            tokens -= self._compute(tokens)
        self.counts.iterations += 1

    def _admit(self) -> bool:
        """Take waiting requests whose prompts are computed together, the first and such as are like it."""
        room = self._max_batch - len(self._batch.rows)
        prompts: dict[tuple[str, tuple[int, ...]], Prompt] = {}
        new: list[int] = []
        for request in list(self._waiting)[:room]:
            namespace = request.extra_key or f"weight-version:{self.version}"
            key = (namespace, request.sequence)
            if key not in prompts:
                prompt = Prompt(key[1], namespace, [], *self.prefixes.match(*key))
                counts = [*new, prompt.new]
                if new and (
                    max(counts) > max(SIMILAR * min(counts), SHORT)
                    or max(counts) * len(counts) > self._prefill_tokens
                ):
                    continue
                prompts[key], new = prompt, counts
            prompts[key].requests.append(request)
        if not prompts:
            return False
        self._prefill = Prefill(self._forward, list(prompts.values()))
        now = time.perf_counter()
        for prompt in self._prefill.prompts:
            for place, request in enumerate(prompt.requests):
                self._waiting.remove(request)
                request.one_version = True
                if request.admitted is None:
                    request.admitted = now
                    request.cached_tokens = len(prompt.ids) if place else prompt.held
                    self.counts.prompt_tokens += len(request.prompt)
                    self.counts.cached_tokens += request.cached_tokens
        return True

    def _compute(self, tokens: int) -> int:
        """Compute a piece of the prompts, and after the last their first tokens; return its tokens."""
        prefill = self._prefill
        assert prefill is not None
        count, logits = prefill.step(tokens)
        if logits is not None:
            self._prefill = None
            for index, prompt in enumerate(prefill.prompts):
                self.prefixes.insert(prompt.namespace, prompt.ids, prefill.tensors(index))
            requests = prefill.requests
            rows = torch.tensor(prefill.places, device=logits.device)
            ids, logprobs = sample(logits[rows], [r.draw for r in requests])
            self._record(requests, ids, logprobs)
            going = [i for i, request in enumerate(requests) if request.finish is None]
            if going:
                self._batch.join(prefill, rows[going], [requests[i] for i in going], ids[going])
            for request in requests:
                if request.finish is not None:
                    self._finish(request)
        return count

    def _record(self, rows: Sequence[Request], ids: Tensor, logprobs: Tensor) -> None:
        self.counts.generated_tokens += len(rows)
        for request, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if token in request.stops:
                request.finish = {"type": "stop", "matched": token}
            elif len(request.ids) >= request.max_new_tokens or (
                len(request.prompt) + len(request.ids) >= self.context_length
            ):
                request.finish = {"type": "length", "length": len(request.ids)}
            if request.progress is not None:
                request.progress(request)

    def _abort(self, match: Callable[[Request], bool]) -> int:
        chosen = [r for r in [*self._waiting, *self._running()] if match(r)]
        for request in chosen:
            request.finish = {"type": "abort", "message": "aborted"}
            if request in self._waiting:
                self._waiting.remove(request)
                self._finish(request)
        if self._prefill is not None:
            for request in self._prefill.forget_finished():
                self._finish(request)
            self._prefill = self._prefill if self._prefill.requests else None
        self._release()
        return len(chosen)

    def _fail(self) -> None:
        """End everybody's wait: nothing is generated any more."""
        with self._wake:
            left, self._live = self._live, set()
            actions = list(self._actions)
            self._actions.clear()
        for request in left:
            request.finish = {"type": "abort", "message": f"the decode thread died: {self.error}"}
            request.done(request)
        for _, future in actions:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(f"the decode thread died: {self.error}"))

    def _running(self) -> list[Request]:
        return self._batch.rows + (self._prefill.requests if self._prefill is not None else [])

    def _release(self) -> None:
        """Let the finished rows go, and hold what they have computed."""
        finished = [i for i, request in enumerate(self._batch.rows) if request.finish is not None]
        requests = [self._batch.rows[i] for i in finished]
        for row, request in zip(finished, requests, strict=True):
            if request.one_version:
                namespace = request.extra_key or f"weight-version:{self.version}"
                self.prefixes.insert(namespace, request.sequence[:-1], self._batch.tensors(row))
        self._batch.drop(finished)
        for request in requests:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.counts.requests += 1
        with self._wake:
            self._live.discard(request)
        request.done(request)
