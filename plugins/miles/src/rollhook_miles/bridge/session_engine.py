"""One session of miles' session server as an engine that takes messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import aiohttp
import orjson

from rollhook.component import BuildContext
from rollhook.engine.messages import (
    BusyError,
    Completion,
    ContextFullError,
    MessageEngine,
    MessageRequest,
    RequestLimits,
    Usage,
)
from rollhook.errors import EngineError
from rollhook.messages import Message
from rollhook.packs import cache_directory

logger = logging.getLogger(__name__)
#: the session keeps each turn for training: a request that may have been served is never sent again
LIMITS = RequestLimits(max_concurrent=64, max_retries=0, retry_seconds=0.0)
REQUEST_SECONDS = 7200.0


class SessionEngine(MessageEngine):
    """Asks `<base_url>/v1/chat/completions`. The server records the tokens; here there are messages only."""

    def __init__(self, base_url: str, http: aiohttp.ClientSession, model: str = "model") -> None:
        context = BuildContext(logger=logger, scratch=cache_directory(), cache=cache_directory())
        super().__init__(None, context)
        self._url = f"{base_url.rstrip('/')}/v1/chat/completions"
        self._http = http
        self._model = model

    @property
    def limits(self) -> RequestLimits:
        """What the server may be asked."""
        return LIMITS

    async def start(self) -> None:
        """Do nothing: miles has opened the session."""

    async def stop(self) -> None:
        """Do nothing: miles collects the session's samples and closes it."""

    async def complete(self, request: MessageRequest) -> Completion:
        """Ask once."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(request.messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        try:
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            async with self._http.post(
                self._url, data=orjson.dumps(body), headers=_JSON, timeout=timeout
            ) as answer:
                status, raw = answer.status, await answer.read()
        except TimeoutError:
            raise BusyError(f"miles' session server gave no answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BusyError(f"miles' session server cannot be reached: {error}") from error
        if status != 200:
            raise _failure(status, raw)
        try:
            return _completion(orjson.loads(raw))
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"miles' session server gave no chat completion ({error!r}): {raw[:200]!r}"
            ) from None


_JSON = {"Content-Type": "application/json"}


def _failure(status: int, raw: bytes) -> EngineError:
    said = " ".join(raw.decode(errors="replace").split())[:300] or "no reason"
    text = f"miles' session server answered {status}: {said}"
    if status == 400 and ("context length" in said or "longer than the model" in said):
        return ContextFullError(text)
    return EngineError(text, kind="infrastructure" if status >= 500 else "user", status=status)


def _completion(data: Mapping[str, Any]) -> Completion:
    choice = data["choices"][0]
    said = {name: value for name, value in choice["message"].items() if value is not None}
    message = cast("Message", {"content": "", **said})  # whole: what is passed back must be what was said
    usage = data.get("usage")
    found = None
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        found = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
    return Completion(message, "length" if choice["finish_reason"] == "length" else "stop", found)
