"""The tensors of what is being generated: prompts that are being computed, and rows that are decoded.

All rows end in the same column and are padded on the left, with explicit positions, so that a row's numbers
do not depend on its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rollhook_torch.prefix_cache import Ids, Tensors
from rollhook_torch.request import Request

#: columns kept free for tokens to come; all is copied once in so many steps
SPARE = 256


class Forward:
    """The model as a function of ids and a cache to the logits of each row's next token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device = model.device
        # renamed in transformers 5.2x; the old name warns
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def __call__(self, ids: Tensor, lengths: Tensor, width: int, cache: Cache) -> Tensor:
        """Return logits [B, V] after `ids` [B, q], the last of `lengths` [B] tokens in `width` columns."""
        columns = torch.arange(width, device=ids.device)
        begins = (width - lengths)[:, None]
        output = self._model(
            input_ids=ids,
            attention_mask=(columns >= begins).long(),
            position_ids=(columns[-ids.shape[1] :] - begins).clamp_(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass
class Prompt:
    """Tokens to be computed, for one or several requests, and what is held of their beginning."""

    ids: Ids
    namespace: str
    requests: list[Request]
    held: int
    stretches: list[Tensors]

    @property
    def new(self) -> int:
        """Tokens that must be computed: one at least, for its logits."""
        return max(1, len(self.ids) - self.held)


class Prefill:
    """Prompts that are computed together, piece by piece.

    All run as many of their last tokens as the one with the most new ones needs: what would be padding is
    computed anew instead, and no row has a hole.
    """

    def __init__(self, forward: Forward, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        self._forward = forward
        self._lengths = torch.tensor([len(p.ids) for p in prompts], device=forward.device)
        self.width = max(len(p.ids) for p in prompts)
        new = max(p.new for p in prompts)
        last = [p.ids[-new:] for p in prompts]
        self._ids = torch.tensor([[0] * (new - len(ids)) + list(ids) for ids in last], device=forward.device)
        self._done = self.width - new
        self._cache = DynamicCache()
        if self._done:
            self._fill()
        for prompt in prompts:
            prompt.stretches = []
            prompt.held = max(0, len(prompt.ids) - new)

    @property
    def requests(self) -> list[Request]:
        """Whose prompts they are."""
        return [request for prompt in self.prompts for request in prompt.requests]

    @property
    def kept(self) -> list[Tensor]:
        """Keys and values of all layers, [P, heads, width, size]."""
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    @property
    def places(self) -> list[int]:
        """The prompt of each of the requests."""
        return [place for place, prompt in enumerate(self.prompts) for _ in prompt.requests]

    def forget_finished(self) -> list[Request]:
        """Take the requests that have ended meanwhile out, and return them."""
        ended = [request for request in self.requests if request.finish is not None]
        for prompt in self.prompts:
            prompt.requests = [request for request in prompt.requests if request.finish is None]
        return ended

    def step(self, tokens: int) -> tuple[int, Tensor | None]:
        """Compute about `tokens` tokens; return how many it were, and after the last the logits [P, V]."""
        piece = self._ids[:, : max(1, tokens // len(self.prompts))]
        self._ids = self._ids[:, piece.shape[1] :]
        self._done += piece.shape[1]
        lengths = (self._lengths - (self.width - self._done)).clamp(min=0)
        logits = self._forward(piece, lengths, self._done, self._cache)
        return piece.numel(), None if self._ids.shape[1] else logits

    def tensors(self, index: int) -> Callable[[int, int], Tensors]:
        """Return a function that gives the tensors of a stretch of prompt `index`."""
        begin = self.width - len(self.prompts[index].ids)
        return lambda start, stop: [kept[index, :, begin + start : begin + stop] for kept in self.kept]

    def _fill(self) -> None:
        """Put what is held of the prompts into the columns before the first that is computed."""
        known = next(p.stretches[0] for p in self.prompts if p.stretches)
        filled = [t.new_zeros(len(self.prompts), t.shape[0], self._done, t.shape[2]) for t in known]
        for row, prompt in enumerate(self.prompts):
            column = self.width - len(prompt.ids)
            for stretch in prompt.stretches:
                stop = min(column + stretch[0].shape[1], self._done)
                for whole, part in zip(filled, stretch, strict=True):
                    whole[row, :, column:stop] = part[:, : max(0, stop - column)]
                column = stop
        for layer, keys in enumerate(filled[::2]):
            self._cache.update(keys, filled[2 * layer + 1], layer)


class Batch:
    """The rows that are being decoded, in tensors with room for more rows and columns."""

    def __init__(self, forward: Forward, max_rows: int) -> None:
        self._forward = forward
        self._max_rows = max_rows
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.rows: list[Request] = []
        self._window = Window()
        self._cache = Cache(layers=[])
        self._lengths = torch.zeros(0, dtype=torch.long, device=self._forward.device)
        self._newest = self._lengths

    def advance(self) -> Tensor:
        """Run the newest tokens of all rows through the model; return logits [B, V]."""
        window = self._window
        if window.stop == window.columns:
            self._move(self._width, window.rows)
        self._lengths = self._lengths + 1
        logits = self._forward(self._newest[:, None], self._lengths, self._width, self._cache)
        window.stop += 1
        return logits

    def newest(self, ids: Tensor) -> None:
        """Set the newest token of every row, whose keys and values are not there yet."""
        self._newest = ids

    def join(self, prefill: Prefill, places: Tensor, requests: Sequence[Request], ids: Tensor) -> None:
        """Append rows for `requests`, whose prompts are those at `places` and whose newest tokens `ids`."""
        lengths = torch.tensor([len(r.prompt) + len(r.ids) - 1 for r in requests], device=ids.device)
        begin, end = len(self.rows), len(self.rows) + len(requests)
        if not self.rows:
            pairs = zip(prefill.kept[::2], prefill.kept[1::2], strict=True)
            self._cache = Cache(layers=[Layer(self._window, keys, values) for keys, values in pairs])
        self._lengths = torch.cat([self._lengths, lengths])
        self._newest = torch.cat([self._newest, ids])
        self.rows.extend(requests)
        window = self._window
        if end > window.rows or self._width > window.stop:
            self._move(self._width, end)
        width = int(lengths.max())
        for tensor, kept in zip(self._tensors, prefill.kept, strict=True):
            tensor[begin:end, :, : window.stop - width] = 0
            tensor[begin:end, :, window.stop - width : window.stop] = kept[places, :, -width:]
        window.start = window.stop - self._width
        window.used = end

    def drop(self, rows: Sequence[int]) -> None:
        """Remove rows; the last ones take their places."""
        gone = set(rows)
        count = len(self.rows) - len(gone)
        if not count:
            self.clear()
            return
        holes = [i for i in sorted(gone) if i < count]
        movers = [i for i in range(count, len(self.rows)) if i not in gone]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        window = self._window
        if holes:
            columns = slice(window.start, window.stop)
            for tensor in self._tensors:
                tensor[holes, :, columns] = tensor[movers, :, columns]
        self.rows = [self.rows[i] for i in order]
        self._lengths, self._newest = self._lengths[order], self._newest[order]
        window.used = count
        window.start = window.stop - self._width

    def tensors(self, row: int) -> Callable[[int, int], Tensors]:
        """Return a function that gives the tensors of a stretch of a row."""
        begin = self._window.stop - int(self._lengths[row])
        return lambda start, stop: [t[row, :, begin + start : begin + stop] for t in self._tensors]

    @property
    def _width(self) -> int:
        """Columns that the longest row takes."""
        return int(self._lengths.max())

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    def _move(self, width: int, rows: int) -> None:
        """Copy everything into tensors with `width` used columns, free ones behind them, and more rows."""
        window = self._window
        old = slice(window.start, window.stop)
        taken = window.stop - window.start
        rows = max(window.rows, min(self._max_rows, 1 << (rows - 1).bit_length()))
        for layer in self._cache.layers:
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                fresh = tensor.new_empty(rows, tensor.shape[1], width + SPARE, tensor.shape[3])
                fresh[: window.used, :, : width - taken] = 0  # seen, though masked: it must be a number
                fresh[: window.used, :, width - taken : width] = tensor[: window.used, :, old]
                setattr(layer, name, fresh)
        window.rows, window.columns = rows, width + SPARE
        window.start, window.stop = width - taken, width


@dataclass
class Window:
    """Which part of the tensors is in use: the first `used` rows, columns `start` to `stop`."""

    rows: int = 0
    columns: int = 0
    used: int = 0
    start: int = 0
    stop: int = 0


class Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, [rows, heads, columns, size], of which the window is seen."""

    def __init__(self, window: Window, keys: Tensor, values: Tensor) -> None:
        """Make an empty one for tensors such as these."""
        super().__init__()
        self.keys, self.values = keys[:0, :, :0], values[:0, :, :0]
        self.is_initialized = True
        self._window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the newest column and return what the window shows with it."""
        window = self._window
        end = window.stop + key_states.shape[2]
        rows, columns = slice(window.used), slice(window.start, end)
        self.keys[rows, :, window.stop : end] = key_states
        self.values[rows, :, window.stop : end] = value_states
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def get_seq_length(self) -> int:
        """Return the columns seen so far."""
        return self._window.stop - self._window.start
