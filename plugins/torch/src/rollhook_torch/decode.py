"""The decode loop: one thread that owns the model and generates for whoever waits.

The batch is continuous: requests are admitted between iterations, finished rows leave at once. Rows are
left-padded, with explicit positions, so that a row's numbers do not depend on its neighbours. Everything
that is not generation (weights, pauses, aborts) is an action that runs between two iterations, which makes
the weight version of every token exact.
"""

from __future__ import annotations

import inspect
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from rollhook_torch.sampling import Draw, sample
from rollhook_torch.weights import load_into

logger = logging.getLogger(__name__)
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(eq=False)
class Request:
    """One sequence on its way. `done` is called on the decode thread once `finish` is set."""

    rid: str
    prompt: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stops: frozenset[int]
    random: random.Random
    done: Callable[[Request], None]
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None

    @property
    def draw(self) -> Draw:
        """How the next token is drawn; takes one number from the row's own generator."""
        return Draw(self.temperature, self.top_p, self.top_k, self.random.random())


@dataclass
class Counts:
    """Totals since the start."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    iterations: int = 0
    busy_seconds: float = 0.0


class Batch:
    """The rows that are being decoded: their cache, mask and newest tokens, all left-padded alike."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # renamed in transformers 5.2x; the old name warns
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.rows: list[Request] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._newest = torch.zeros(0, dtype=torch.long)

    def admit(self, requests: Sequence[Request]) -> Tensor:
        """Prefill requests and join them to the rows; return logits [n, V] of their next tokens.

        Equal prompts are computed once. Tokens that a retracted request has generated belong to its prompt.
        """
        prompts = [(*r.prompt, *r.ids) for r in requests]
        unique = list(dict.fromkeys(prompts))
        seen: set[tuple[int, ...]] = set()
        for request, prompt in zip(requests, prompts, strict=True):
            request.cached_tokens = len(prompt) if prompt in seen else 0
            seen.add(prompt)
        width = max(map(len, unique))
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in unique], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in unique], device=device)
        cache = DynamicCache()
        logits = self._forward(ids, mask, cache)
        pick = torch.tensor([unique.index(p) for p in prompts], device=device)
        self._join(cache, mask, pick)
        self.rows.extend(requests)
        return logits[pick]

    def advance(self) -> Tensor:
        """Run the newest tokens of all rows through the model; return logits [B, V]."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        return self._forward(self._newest[:, None], self._mask, self._cache)

    def append(self, ids: Tensor) -> None:
        """Set the newest token of the rows at the end that have none yet."""
        self._newest = torch.cat([self._newest.to(ids.device), ids])

    def replace(self, ids: Tensor) -> None:
        """Set the newest token of every row."""
        self._newest = ids

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the padding that only they needed."""
        self.rows = [self.rows[i] for i in rows]
        if not rows:
            self.clear()
            return
        pick = torch.tensor(rows, device=self._mask.device)
        self._mask = self._mask[pick]
        self._newest = self._newest[pick]
        empty = int(self._mask.argmax(1).min())
        self._mask = self._mask[:, empty:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[pick, :, empty:]
            layer.values = layer.values[pick, :, empty:]

    def clear(self) -> None:
        """Drop everything."""
        self.rows = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._newest = torch.zeros(0, dtype=torch.long)

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _join(self, cache: DynamicCache, mask: Tensor, pick: Tensor) -> None:
        """Append rows `pick` of a prefill, padding the shorter of the two on the left."""
        mask = mask[pick]
        if not self.rows:
            self._cache, self._mask = cache, mask
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[pick], layer.values[pick]
            return
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_pad(self._mask, width, 1), _pad(mask, width, 1)])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_pad(old.keys, width, 2), _pad(new.keys[pick], width, 2)])
            old.values = torch.cat([_pad(old.values, width, 2), _pad(new.values[pick], width, 2)])


class Decoder:
    """The thread. All methods may be called from any other thread."""

    def __init__(
        self, model: Any, version: str, *, context_length: int, max_batch: int, prefill_tokens: int
    ) -> None:
        self.model = model
        self.version = version
        self.context_length = context_length
        self.counts = Counts()
        self.error: BaseException | None = None
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._batch = Batch(model)
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
        """Sequences being decoded."""
        return len(self._batch.rows)

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
        """Stop: `abort` ends what is under way, `retract` prefills it anew later, `in_place` keeps it."""

        def act() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(lambda request: True)
            if mode == "retract":
                self._waiting.extendleft(reversed(self._batch.rows))
                self._batch.clear()

        return self._act(act)

    def resume(self) -> Future[None]:
        """Go on generating."""

        def act() -> None:
            self._paused = False

        return self._act(act)

    def load(self, directory: Path, version: str | None) -> Future[None]:
        """Load weights between two iterations; tokens drawn after it carry the new version.

        The future raises ValueError when they do not fit, and nothing has changed then.
        """

        def act() -> None:
            load_into(self.model, directory)
            self.version = version if version is not None else self.version

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
            while self._wait():
                self._do_actions()
                if not self._paused:
                    started = time.perf_counter()
                    with torch.inference_mode():
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
                    or (not self._paused and (self._waiting or self._batch.rows))
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
            self._batch.replace(ids)
            self._record(self._batch.rows, ids, logprobs)
            self._release(lambda request: request.finish is not None)
        for requests in self._admissions():
            ids, logprobs = sample(self._batch.admit(requests), [r.draw for r in requests])
            self._batch.append(ids)
            self._record(requests, ids, logprobs)
        self._release(lambda request: request.finish is not None)
        self.counts.iterations += 1

    def _admissions(self) -> Iterable[list[Request]]:
        """Take waiting requests while there is room, in portions of similar length that fit one prefill."""
        room = self._max_batch - len(self._batch.rows)
        taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        now = time.perf_counter()
        portion: list[Request] = []
        for request in sorted(taken, key=lambda r: len(r.prompt) + len(r.ids)):
            if request.admitted is None:
                request.admitted = now
                self.counts.prompt_tokens += len(request.prompt)
            width = len(request.prompt) + len(request.ids)
            if portion and width * (len(portion) + 1) > self._prefill_tokens:
                yield portion
                portion = []
            portion.append(request)
        if portion:
            yield portion

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

    def _abort(self, match: Callable[[Request], bool]) -> int:
        chosen = [r for r in [*self._waiting, *self._batch.rows] if match(r)]
        for request in chosen:
            request.finish = {"type": "abort", "message": "aborted"}
            if request in self._waiting:
                self._waiting.remove(request)
                self._finish(request)
        self._release(lambda request: request.finish is not None)
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

    def _release(self, finished: Callable[[Request], bool]) -> None:
        rows = self._batch.rows
        if not any(map(finished, rows)):
            return
        self._batch.keep([i for i, request in enumerate(rows) if not finished(request)])
        for request in filter(finished, rows):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.counts.requests += 1
        with self._wake:
            self._live.discard(request)
        request.done(request)


def _pad(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Return `tensor` with zeros in front of dimension `dim` up to `width`."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)
