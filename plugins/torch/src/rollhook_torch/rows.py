"""Rows of messages for SFT: read with line numbers, rendered once, drawn in a seeded order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollhook.errors import TrainerError
from rollhook.messages import Message
from rollhook.session.render import Renderer, RenderError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """One row and where it came from."""

    value: Mapping[str, Any]
    where: str

    def messages(self) -> list[Message]:
        """Return its messages. Raises TrainerError with file, line and reason."""
        messages = self.value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise self.error("`messages` must be a list of at least one message")
        return [self._message(index, message) for index, message in enumerate(messages)]

    def error(self, reason: str) -> TrainerError:
        """Return the error that says what is wrong with this row."""
        return TrainerError(f"{self.where}: {reason}", kind="user")

    def _message(self, index: int, message: Any) -> Message:
        if not isinstance(message, Mapping):
            raise self.error(f"messages[{index}] must be an object with role and content")
        if message.get("role") not in ROLES:
            raise self.error(
                f"messages[{index}].role is {message.get('role')!r}, not one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise self.error(f"messages[{index}].content must be a string")
        if message.get("tool_calls"):
            raise self.error(f"messages[{index}].tool_calls: training on tool calls is not supported")
        plain: Message = {"role": message["role"], "content": message["content"]}
        return plain


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl or .parquet file. Raises TrainerError with file, line and reason."""
    if not path.is_file():
        raise TrainerError(f"{path}: there is no such file of rows", kind="user")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl(path)
    else:
        raise TrainerError(f"{path}: rows are read from .jsonl or .parquet files", kind="user")


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TrainerError(f"{where}: is not JSON: {error}", kind="user") from error
            if not isinstance(value, dict):
                raise TrainerError(f"{where}: must be a JSON object", kind="user")
            yield Row(value, where)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise TrainerError(f"{path}: is no parquet file that can be read: {error}", kind="user") from error
    for number, value in enumerate(table.to_pylist(), 1):
        yield Row(value, f"{path}, row {number}")


@dataclass(frozen=True)
class Rendered:
    """Token ids int32[T] and mask uint8[T], 1 where the assistant speaks."""

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    mask: np.ndarray[Any, np.dtype[np.uint8]]


def render(messages: Sequence[Message], renderer: Renderer) -> Rendered:
    """Return a conversation as a session would have recorded it, had the policy said the assistant's parts.

    Every part is tokenised apart, as it is in a session: the prompt, the reply up to and with the token
    that ends it, what follows the reply. Only replies are trained. Raises ValueError or RenderError.
    """
    ids: list[int] = []
    mask: list[int] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            pending.append(message)
            continue
        if not pending:
            raise ValueError("an assistant message must follow a message of somebody else")
        prompt = renderer.increment(pending, last_token=ids[-1]) if ids else renderer.first(pending)
        reply = _reply(message["content"] or "", renderer)
        ids += prompt + reply
        mask += [0] * len(prompt) + [1] * len(reply)
        pending = []
    if not ids:
        raise ValueError("there is no assistant message to train on")
    return Rendered(np.array(ids, np.int32), np.array(mask, np.uint8))


def _reply(text: str, renderer: Renderer) -> list[int]:
    """Return the ids of an assistant's text and of the token that closes it in the template."""
    closing = renderer.increment([{"role": "user", "content": "u"}], last_token=None)[:1]
    if not closing or closing[0] not in renderer.stop_token_ids:
        raise ValueError("the chat template closes an assistant's message with no token that ends a reply")
    ids = renderer.encode(text)
    if any(token in renderer.stop_token_ids for token in ids):
        raise ValueError("an assistant message holds a token that ends a reply, as text")
    return ids + closing


class Rows:
    """The rows of a file in a seeded order without end: every pass over them is a new permutation.

    `position` counts rows taken; restoring it restores the order exactly.
    """

    def __init__(self, path: Path, renderer: Renderer, *, seed: int, max_tokens: int | None = None) -> None:
        self._rows = list(read_rows(path))
        if not self._rows:
            raise TrainerError(f"{path}: there are no rows", kind="user")
        for row in self._rows:
            row.messages()
        self._renderer = renderer
        self._seed = seed
        self._max_tokens = max_tokens
        self._rendered: dict[int, Rendered] = {}
        self._order: tuple[int, Any] = (-1, None)
        self.position = 0

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, count: int) -> list[Rendered]:
        """Return the next `count` rows."""
        taken = [self._render(self._index(self.position + i)) for i in range(count)]
        self.position += count
        return taken

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        return int(self._order[1][offset])

    def _render(self, index: int) -> Rendered:
        if index not in self._rendered:
            row = self._rows[index]
            try:
                rendered = render(row.messages(), self._renderer)
            except (ValueError, RenderError) as error:
                raise row.error(str(error)) from error
            if self._max_tokens is not None and len(rendered.token_ids) > self._max_tokens:
                raise row.error(
                    f"has {len(rendered.token_ids)} tokens, the context of the model {self._max_tokens}"
                )
            self._rendered[index] = rendered
        return self._rendered[index]
