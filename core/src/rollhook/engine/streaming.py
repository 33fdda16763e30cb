"""A generation as SGLang streams it: server-sent events whose numbers are checked and put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from rollhook.engine.base import Generation
from rollhook.engine.generation import parse_generation, parse_rows
from rollhook.errors import EngineError, Kind

#: is given the ids that a stream adds, as they come
TokenSink = Callable[[Sequence[int]], None]

#: what an answer outside the protocol raises where it is read
OUTSIDE = (KeyError, TypeError, ValueError, IndexError, OverflowError)
# bytes of one event: the cumulative rows of a long reply are some megabytes
_LONGEST_EVENT = 256 << 20


class CutStreamError(EngineError):
    """A stream ended before its generation did; `partial` is what came, its finish reason `abort`."""

    kind: Kind = "retryable"

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial


class TakenBackError(ValueError):
    """An event contradicts those before it, so that none of them can be trusted."""


class GenerationStream:
    """Puts the events of one streamed `/generate` together; `add` takes each and returns the ids it adds.

    `meta_info.completion_tokens` counts all tokens so far; `output_token_logprobs` holds the rows of all of
    them, or, where the server runs with incremental output, of the new ones. `output_ids` and `text`, which
    releases of SGLang cut differently, are not read.
    """

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._meta: dict[str, Any] = {}

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._rows)

    @property
    def finished(self) -> bool:
        """Whether an event gave the reason of the end."""
        return self._meta.get("finish_reason") is not None

    def add(self, event: Any) -> list[int]:
        """Take an event, or nothing of it.

        Raises ValueError, KeyError, IndexError, TypeError or OverflowError when it breaks the protocol, and
        TakenBackError when it does not agree with what came before it.
        """
        meta = dict(event["meta_info"])
        rows = meta.get("output_token_logprobs") or []
        total, seen = meta.get("completion_tokens", len(rows)), len(self._rows)
        if total < seen:
            raise TakenBackError(f"{total} tokens after {seen} were streamed")
        if len(rows) == total:
            if seen and rows[seen - 1][1] != self._rows[-1][1]:
                raise TakenBackError("a token that was streamed has changed")
            new = rows[seen:]
        elif seen + len(rows) == total:
            new = rows
        else:
            raise ValueError(f"{len(rows)} log-probabilities after {seen} of {total} tokens")
        _, ids = parse_rows(new)
        self._rows += new
        self._meta = meta
        return ids

    def generation(self) -> Generation:
        """Return the whole; raises as `add` does."""
        return parse_generation({"meta_info": self._meta | {"output_token_logprobs": self._rows}})

    def partial(self) -> Generation:
        """Return what came before the stream was cut; raises as `add` does."""
        rows = {"output_token_logprobs": self._rows, "finish_reason": {"type": "abort"}}
        return parse_generation({"meta_info": self._meta | rows})


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Yield the decoded `data` of server-sent events up to `[DONE]` or the end.

    Raises ValueError for data that is no JSON, or an event without an end.
    """
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) > _LONGEST_EVENT:
            raise ValueError(f"an event is longer than {_LONGEST_EVENT} bytes")
        *lines, rest = held.split(b"\n")
        held = rest
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield orjson.loads(data)


async def read_generation(chunks: AsyncIterator[bytes], on_tokens: TokenSink) -> Generation:
    """Read a streamed generation to its end, giving `on_tokens` the ids as they come.

    Raises CutStreamError when it ends early, or breaks off or breaks the protocol after its first token: the
    events before stay true. EngineError when the server says that it failed before, and ValueError, KeyError,
    IndexError, TypeError or OverflowError when it breaks the protocol before, or takes something back.
    """
    stream = GenerationStream()
    try:
        async for event in read_events(chunks):
            if "error" in event:
                raise EngineError(f"the stream failed: {_reason(event['error'])}", kind="retryable")
            if ids := stream.add(event):
                on_tokens(ids)
        if stream.finished:
            return stream.generation()
    except TakenBackError:
        raise
    except (EngineError, aiohttp.ClientError, OSError, TimeoutError) as error:
        if stream.count:
            raise CutStreamError(f"{error or type(error).__name__}", stream.partial()) from error
        raise
    except OUTSIDE as error:
        if stream.count:
            reason = f"it broke the protocol after {stream.count} tokens: {type(error).__name__}: {error}"
            raise CutStreamError(reason, stream.partial()) from error
        raise
    raise CutStreamError(f"the stream ended after {stream.count} tokens", stream.partial())


def _reason(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
