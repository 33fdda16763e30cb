"""A client of SGLang's endpoints: every call has a deadline, every failure says which engine and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollhook.engine.base import Generation, GenerationRequest, PauseMode
from rollhook.engine.generation import generate_body, parse_generation, version_number
from rollhook.engine.server_info import (
    RankLoad,
    ServerInfo,
    dp_rank_field,
    parse_loads,
    parse_server_info,
)
from rollhook.engine.streaming import OUTSIDE, CutStreamError, TokenSink, read_generation
from rollhook.errors import EngineError, Kind
from rollhook.router import Worker

_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_ERROR_TEXT = 300
#: tries of a flush that is refused because requests are queued, one second apart
FLUSH_TRIES = 60
FLUSH_WAIT = 1.0
#: tries of a continue that does not get through: an engine that stays paused is lost
CONTINUE_TRIES = 3
CONTINUE_WAIT = 0.5


class EngineClient:
    """Talks to engines by base URL; `Worker.dp_rank` travels in the request's body, never in the URL.

    All methods raise EngineError: `kind` is `retryable` for what another try or worker may mend (no
    connection, a deadline, 5xx, 429), `user` for a request that the engine refused as wrong, and
    `infrastructure` for an answer that breaks the protocol. Pass a session to share its connections;
    otherwise the client makes one and `aclose` closes it. Times are seconds. Control calls go to the base
    URL, whatever the worker's rank. A token that is not below `vocab_size` breaks the protocol.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession | None = None,
        *,
        generate_timeout: float = 3600.0,
        control_timeout: float = 30.0,
        update_timeout: float = 900.0,
        connect_timeout: float = 10.0,
        vocab_size: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._owned = session is None
        self._generate_timeout = generate_timeout
        self._control_timeout = control_timeout
        self._update_timeout = update_timeout
        self._connect_timeout = connect_timeout
        self._vocab_size = vocab_size
        self._sleep = sleep
        self._infos: dict[str, ServerInfo] = {}

    async def generate(
        self, worker: Worker, request: GenerationRequest, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Generate one completion: exact ids and log-probabilities, the stop token included.

        With `on_tokens` the engine streams and it is given the ids as they come; a stream that ends early
        raises CutStreamError with what came.
        """
        body = generate_body(request, stream=on_tokens is not None)
        if worker.dp_rank is not None:
            body[await self._rank_field(worker)] = worker.dp_rank
        if request.cache_key is not None:
            body["extra_key"] = request.cache_key
        try:
            try:
                generation = await self._generation(worker, body, on_tokens)
            except CutStreamError as cut:
                partial = self._checked(cut.partial, request)
                raise CutStreamError(f"{worker.url}/generate was cut: {cut}", partial) from cut
            return self._checked(generation, request)
        except OUTSIDE as error:
            raise _outside(worker, "/generate", error) from error

    async def _generation(
        self, worker: Worker, body: Mapping[str, Any], on_tokens: TokenSink | None
    ) -> Generation:
        limit = self._generate_timeout
        async with self._answer("POST", worker.url, "/generate", body, timeout=limit) as response:
            if on_tokens is not None and response.content_type == "text/event-stream":
                return await read_generation(response.content.iter_any(), on_tokens)
            generation = parse_generation(_decoded(await response.read()))
        if on_tokens is not None:
            on_tokens(generation.token_ids)
        return generation

    def _checked(self, generation: Generation, request: GenerationRequest) -> Generation:
        """Return a generation that cannot have had more tokens in a cache than its prompt has.

        Raises ValueError for more tokens than were asked for, and for one that the model does not have.
        """
        count, most = len(generation.token_ids), request.sampling.max_new_tokens
        if count > most:
            raise ValueError(f"{count} tokens where at most {most} were asked for")
        last = max(generation.token_ids, default=0)
        if self._vocab_size is not None and last >= self._vocab_size:
            raise ValueError(f"token id {last} where the model has {self._vocab_size}")
        cached = max(0, min(generation.cached_tokens, len(request.input_ids)))
        return replace(generation, cached_tokens=cached)

    async def health(self, worker: Worker) -> bool:
        """Return whether the engine says that it is healthy; False when it cannot be reached."""
        try:
            await self._call("GET", worker.url, "/health", timeout=min(5.0, self._control_timeout))
        except EngineError:
            return False
        return True

    async def health_generate(self, worker: Worker, timeout: float = 60.0) -> bool:
        """Return whether the engine generates a token within `timeout` seconds; it cannot while paused."""
        try:
            await self._call("GET", worker.url, "/health_generate", timeout=timeout)
        except EngineError:
            return False
        return True

    async def server_info(self, worker: Worker) -> ServerInfo:
        """Return the engine's description of itself."""
        path, data = await self._either(worker, "/server_info", "/get_server_info")
        try:
            info = parse_server_info(_mapping(data, worker, path))
        except (TypeError, ValueError) as error:
            raise _outside(worker, path, error) from error
        self._infos[worker.url] = info
        return info

    async def load(self, worker: Worker) -> list[RankLoad]:
        """Return the load of each rank of the engine."""
        path, data = await self._either(worker, "/v1/loads?include=core", "/get_load")
        try:
            return parse_loads(data)
        except (KeyError, TypeError, ValueError) as error:
            raise _outside(worker, path, error) from error

    async def metrics(self, worker: Worker) -> str:
        """Return the engine's metrics in Prometheus' text format."""
        return (await self._request("GET", worker.url, "/metrics")).decode(errors="replace")

    async def pause(self, worker: Worker, mode: PauseMode = "in_place") -> None:
        """Stop generating: requests end (`abort`), queue again (`retract`) or freeze (`in_place`).

        Undone by `continue_`, also after an error of this call: see `rollhook.engine.weights.paused`.
        """
        await self._control(worker, "/pause_generation", {"mode": mode})

    async def continue_(self, worker: Worker) -> None:
        """Go on generating after a pause; tried again where the call does not get through."""
        for left in reversed(range(CONTINUE_TRIES)):
            try:
                await self._control(worker, "/continue_generation", {})
                return
            except EngineError as error:
                if not left or error.kind != "retryable":
                    raise
            await self._sleep(CONTINUE_WAIT)

    async def update_weights_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a weight directory and call it `version`.

        The cache is left alone, `flush` is for that: SGLang flushes after loading where it is not told
        otherwise, and releases before 0.5.21 end themselves when requests in the queue forbid the flush.
        """
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": False}
        await self._control(worker, "/update_weights_from_disk", body, timeout=self._update_timeout)

    async def update_weight_version(self, worker: Worker, version: int) -> None:
        """Call the weights that are served `version`."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control(worker, "/update_weight_version", body)

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the version that the engine serves; None when it has none of ours yet."""
        path, data = await self._either(worker, "/model_info", "/get_weight_version")
        return version_number(_mapping(data, worker, path).get("weight_version"))

    async def flush(self, worker: Worker, tries: int = FLUSH_TRIES) -> None:
        """Drop the prefix cache; refused while requests are queued, and then asked again each second."""
        for left in reversed(range(tries)):
            try:
                await self._control(worker, "/flush_cache", {})
                return
            except EngineError as error:
                if error.kind != "user":
                    raise
                if not left:
                    raise EngineError(
                        f"{worker.url} refused {tries} times to flush its cache: {error}",
                        kind="infrastructure",
                    ) from error
            await self._sleep(FLUSH_WAIT)

    async def abort(self, worker: Worker, rid: str | None = None) -> None:
        """End one request, or all of them when no id is given; one that is unknown is a success."""
        await self._control(worker, "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def aclose(self) -> None:
        """Close the connections if they are the client's own; safe to call twice."""
        if self._owned and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _control(
        self, worker: Worker, path: str, body: Mapping[str, Any], *, timeout: float | None = None
    ) -> None:
        data = await self._call("POST", worker.url, path, body, timeout=timeout)
        if isinstance(data, dict) and data.get("success") is False:
            reason = str(data.get("error_message") or data.get("message") or "no reason given")
            raise EngineError(f"{worker.url}{path} failed: {reason[:_ERROR_TEXT]}", kind="infrastructure")

    async def _rank_field(self, worker: Worker) -> str:
        """Return the field that takes the rank; an engine that was not asked for its release is, once."""
        if worker.url not in self._infos:
            await self.server_info(worker)
        return dp_rank_field(self._infos[worker.url].version)

    async def _either(self, worker: Worker, path: str, older: str) -> tuple[str, Any]:
        """Return the answer of the first of two paths that the engine has, and which one it was."""
        try:
            return path, await self._call("GET", worker.url, path)
        except AbsentError:
            return older, await self._call("GET", worker.url, older)

    async def _call(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the decoded answer, None for an empty or non-JSON one."""
        return _decoded(await self._request(method, url, path, body, timeout=timeout))

    async def _request(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes:
        """Return the body of a good answer."""
        async with self._answer(method, url, path, body, timeout=timeout) as response:
            return await response.read()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give a good answer whose body is still to be read."""
        payload = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        limit = self._control_timeout if timeout is None else timeout
        try:
            async with self._http().request(
                method,
                url + path,
                data=payload,
                headers={"Content-Type": "application/json"} if payload is not None else None,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=self._connect_timeout),
            ) as response:
                if response.status >= 300:
                    status, raw = response.status, await response.read()
                    kind = AbsentError if status == 404 else EngineError
                    raise kind(
                        f"{url}{path} answered {status}: {_reason(raw)}", kind=_kind(status), status=status
                    )
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineError(
                f"{url}{path}: no connection within {self._connect_timeout:g} s", kind="retryable"
            ) from error
        except TimeoutError as error:
            raise EngineError(f"{url}{path} did not answer within {limit:g} s", kind="retryable") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"{url}{path} cannot be reached: {reason}", kind="retryable") from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # no limit of connections: the number of requests is bounded by the episodes in flight
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


class AbsentError(EngineError):
    """The engine has no such endpoint."""


def _decoded(raw: bytes) -> Any:
    """Return decoded JSON, None for an empty or non-JSON body."""
    try:
        return orjson.loads(raw) if raw.strip() else None
    except orjson.JSONDecodeError:
        return None


def _outside(worker: Worker, path: str, error: Exception) -> EngineError:
    return EngineError(
        f"{worker.url}{path} answered outside the protocol: {type(error).__name__}: {error}",
        kind="infrastructure",
    )


def _mapping(data: Any, worker: Worker, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise EngineError(f"{worker.url}{path} did not answer with a JSON object", kind="infrastructure")
    return data


def _kind(status: int) -> Kind:
    if status in _RETRYABLE:
        return "retryable"
    return "user" if status < 500 else "infrastructure"


def _reason(raw: bytes) -> str:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        text = raw.decode(errors="replace").strip()
    else:
        error = data.get("error", data) if isinstance(data, dict) else data
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return text[:_ERROR_TEXT] or "no reason given"
