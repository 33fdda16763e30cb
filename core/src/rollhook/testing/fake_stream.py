"""The stream of a fake engine: server-sent events as SGLang sends them."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


class EventStream:
    """One streamed generation; an event holds all tokens so far, or only the new ones where `incremental`.

    After `cut` tokens, if that is a number, the connection is dropped.
    """

    def __init__(self, request: web.Request, incremental: bool, cut: int | None) -> None:
        self._request = request
        self._incremental = incremental
        self._cut = cut
        self._sent = 0
        self._response: web.StreamResponse | None = None

    async def send(self, answer: Any) -> None:
        """Send the answer so far."""
        if self._cut is not None and self._sent >= self._cut:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the stream is cut")
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._response.prepare(self._request)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if self._incremental and isinstance(meta, dict):
            rows = meta["output_token_logprobs"]
            meta["output_token_logprobs"], self._sent = rows[self._sent :], len(rows)
        else:
            self._sent += 1
        await self._response.write(f"data: {json.dumps(answer)}\n\n".encode())

    async def end(self, answer: Any) -> web.StreamResponse:
        """Send the whole answer and end the stream."""
        await self.send(answer)
        assert self._response is not None
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response
