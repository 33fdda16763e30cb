"""`engine.openai`: one endpoint over HTTP; retries and concurrency are the core's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

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
)
from rollhook.errors import AgentError, EngineError, UsageError
from rollhook_openai import OpenAIConfig, wire

#: bytes of a reply beyond which it is refused
MAX_BODY = 32 << 20
CONNECT_SECONDS = 30.0
START_SECONDS = 60.0
#: characters of an endpoint's words that a message quotes, and models that it lists
ERROR_TEXT = 300
LISTED = 10
#: a key shorter than this is a placeholder such as `EMPTY`, and may be a word of a reply
SECRET_LENGTH = 16


class OpenAIEngine(MessageEngine):
    """Asks `/chat/completions`, not streaming. What it raises quotes the endpoint, never the key."""

    config: OpenAIConfig

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self._url = wire.base_url(self.config.base_url)
        self._key = ""
        self._proxy: str | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def limits(self) -> RequestLimits:
        """What the endpoint may be asked."""
        config = self.config
        return RequestLimits(config.max_concurrent_requests, config.max_retries, config.retry_seconds)

    async def start(self) -> None:
        """Connect, and look for the model in the list that most endpoints have."""
        if self.config.api_key is not None:
            self._key = self.config.api_key.resolve().get_secret_value()
            if not (self._key.isascii() and self._key.isprintable()):
                raise UsageError(f"the secret {self.config.api_key} holds characters that no key has")
        self._proxy = _proxy(self._url)
        # no limit of connections: the core bounds the requests
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers())
        models = await self._models()
        if models is None:
            return
        row = models.get(self.config.model)
        if row is None and not await self._has_model():
            raise self._no_model(list(models))
        self.context_length = wire.context_length(row or {})

    async def stop(self) -> None:
        """Disconnect."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def complete(self, request: MessageRequest) -> Completion:
        """Ask once."""
        try:
            body = wire.chat_body(request, self.config)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the messages are no JSON: {error}", kind="user") from None
        status, raw, headers = await self._call(
            "POST", "/chat/completions", body, seconds=self.config.timeout_seconds
        )
        if status != 200:
            raise await self._failure(status, raw, headers)
        data = _json(raw)
        if data is None:
            raise EngineError(f"{self._url} answered with what is no JSON: {self._quoted(raw)!r}")
        try:
            return wire.parse_completion(data)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"{self._url} answered with no chat completion ({what}): {self._quoted(raw)!r}"
            ) from None

    # -- one request

    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float
    ) -> tuple[int, bytes, Any]:
        """Return status, body and headers. Raises BusyError where there is no whole answer in time."""
        if self._http is None:
            raise EngineError("engine openai was not started")
        try:
            async with self._http.request(
                method,
                self._url + path,
                data=body,
                headers={"Content-Type": "application/json"} if body is not None else None,
                allow_redirects=False,
                proxy=self._proxy,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                return response.status, await self._body(response), response.headers
        except TimeoutError:
            raise BusyError(f"{self._url} did not answer within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            reason = self._why(error.os_error)
            raise BusyError(
                f"{self._url} cannot be reached ({reason}); is it up, and is engine.base_url right?"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise BusyError(f"{self._url} broke off the connection ({self._why(error)})") from None

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body, in which the key never occurs, whatever the endpoint repeats."""
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > MAX_BODY:
                raise EngineError(f"{self._url} answered with more than {MAX_BODY >> 20} MiB")
            chunks.append(chunk)
        raw = b"".join(chunks)
        return raw.replace(self._key.encode(), b"***") if len(self._key) >= SECRET_LENGTH else raw

    def _headers(self) -> dict[str, str]:
        given = {
            "Authorization": f"Bearer {self._key}" if self._key else None,
            "OpenAI-Organization": self.config.organization,
            "OpenAI-Project": self.config.project,
        }
        return {name: value for name, value in given.items() if value}

    # -- what went wrong

    async def _failure(self, status: int, raw: bytes, headers: Any) -> EngineError:
        code, reason = wire.error_parts(raw)
        said = f"{self._url} answered {status}: {self._quoted(reason)}"
        if status == 401:
            return self._refused(raw)
        if status == 404:
            models = await self._models()
            if models is not None and self.config.model not in models:
                return self._no_model(list(models))
        if status in wire.RETRYABLE and code != "insufficient_quota":
            return BusyError(said, retry_after=wire.retry_after(headers))
        if status in (400, 413, 422) and wire.context_is_full(code, reason):
            return ContextFullError(
                f"{said}; lower budgets.reply_tokens, or set model.context_length to what the endpoint has"
            )
        if 300 <= status < 400 or status == 404:
            said += "; is engine.base_url right?"
        return EngineError(said, kind="user" if status < 500 else "infrastructure")

    def _refused(self, raw: bytes) -> EngineError:
        reason = self._quoted(wire.error_parts(raw)[1])
        key = self.config.api_key
        way = "set engine.api_key, e.g. env:OPENAI_API_KEY" if key is None else f"is the key in {key} right?"
        return EngineError(f"{self._url} answered 401: {reason}; {way}", kind="user")

    def _no_model(self, models: list[str]) -> EngineError:
        listed = ", ".join(sorted(models)[:LISTED]) or "none"
        more = f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
        return EngineError(
            f"{self._url} has no model {self.config.model!r}; set engine.model to one that it has:"
            f" {self._quoted(listed)}{more}",
            kind="user",
        )

    async def _models(self) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the endpoint's models by name, None where it shows none. Raises where the key is refused."""
        status, raw, _ = await self._call("GET", "/models", seconds=START_SECONDS)
        if status == 401:
            raise self._refused(raw)
        return wire.models_of(_json(raw)) if status == 200 else None

    async def _has_model(self) -> bool:
        """Return whether the endpoint knows the model by itself: aliases stand in no list."""
        path = f"/models/{quote(self.config.model, safe='')}"
        return (await self._call("GET", path, seconds=START_SECONDS))[0] == 200

    def _why(self, error: Exception) -> str:
        return self._quoted(str(error) or type(error).__name__)

    def _quoted(self, text: str | bytes) -> str:
        """Return text as a message may quote it: one short line, without the key."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        safe = text.replace(self._key, "***") if self._key else text
        return " ".join(safe.split())[:ERROR_TEXT] or "no reason given"


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL (HTTPS_PROXY, NO_PROXY and their like)."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
