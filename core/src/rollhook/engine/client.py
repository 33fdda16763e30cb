"""A client of SGLang's endpoints: every call has a deadline, every failure says which engine and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollhook.engine.base import Generation, GenerationRequest
from rollhook.engine.generation import generate_body, parse_generation, version_number
from rollhook.errors import EngineError, Kind
from rollhook.router import Worker

_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_ERROR_TEXT = 300


class EngineClient:
    """Talks to engines by base URL; `Worker.dp_rank` travels in the request's body, never in the URL.

    All methods raise EngineError: `kind` is `retryable` for what another try or worker may mend (no
    connection, a deadline, 5xx, 429), `user` for a request that the engine refused as wrong, and
    `infrastructure` for an answer that breaks the protocol. Pass a session to share its connections;
    otherwise the client makes one and `aclose` closes it. Times are seconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession | None = None,
        *,
        generate_timeout: float = 3600.0,
        control_timeout: float = 30.0,
        update_timeout: float = 900.0,
        connect_timeout: float = 10.0,
    ) -> None:
        self._session = session
        self._owned = session is None
        self._generate_timeout = generate_timeout
        self._control_timeout = control_timeout
        self._update_timeout = update_timeout
        self._connect_timeout = connect_timeout

    async def generate(self, worker: Worker, request: GenerationRequest) -> Generation:
        """Generate one completion: exact ids and log-probabilities, the stop token included."""
        body = generate_body(request, worker.dp_rank)
        data = await self._call("POST", worker.url, "/generate", body, timeout=self._generate_timeout)
        try:
            generation = parse_generation(data)
            if len(generation.token_ids) > request.sampling.max_new_tokens:
                count, most = len(generation.token_ids), request.sampling.max_new_tokens
                raise ValueError(f"{count} tokens where at most {most} were asked for")
            return generation
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise EngineError(
                f"{worker.url}/generate answered outside the protocol: {type(error).__name__}: {error}",
                kind="infrastructure",
            ) from error

    async def health(self, worker: Worker) -> bool:
        """Return whether the engine says that it is healthy; False when it cannot be reached."""
        try:
            await self._call("GET", worker.url, "/health", timeout=min(5.0, self._control_timeout))
        except EngineError:
            return False
        return True

    async def server_info(self, worker: Worker) -> dict[str, Any]:
        """Return the engine's description of itself (`dp_size`, its arguments, ...)."""
        return _mapping(await self._call("GET", worker.url, "/get_server_info"), worker, "/get_server_info")

    async def pause(self, worker: Worker, mode: str = "in_place") -> None:
        """Stop generating: requests end (`abort`), queue again (`retract`) or freeze (`in_place`)."""
        await self._control(worker, "/pause_generation", {"mode": mode})

    async def continue_(self, worker: Worker) -> None:
        """Go on generating after a pause."""
        await self._control(worker, "/continue_generation", {})

    async def update_weights_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a weight directory and call it `version`."""
        body = {"model_path": str(path), "weight_version": str(version)}
        await self._control(worker, "/update_weights_from_disk", body, timeout=self._update_timeout)

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the version that the engine serves; None when it has none of ours yet."""
        path = "/get_weight_version"
        data = await self._call("GET", worker.url, path, absent_ok=True)
        if data is None:
            path = "/model_info"
            data = await self._call("GET", worker.url, path)
        return version_number(_mapping(data, worker, path).get("weight_version"))

    async def flush(self, worker: Worker) -> None:
        """Drop the prefix cache; the engine refuses while requests are queued."""
        await self._control(worker, "/flush_cache", {})

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

    async def _call(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        absent_ok: bool = False,
    ) -> Any:
        """Return the decoded answer (None for an empty or non-JSON one, or a 404 that is fine)."""
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
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            raise EngineError(f"{url}{path} did not answer within {limit:g} s", kind="retryable") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"{url}{path} cannot be reached: {reason}", kind="retryable") from error
        if status == 404 and absent_ok:
            return None
        if status >= 300:
            raise EngineError(f"{url}{path} answered {status}: {_reason(raw)}", kind=_kind(status))
        try:
            return orjson.loads(raw) if raw.strip() else None
        except orjson.JSONDecodeError:
            return None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # no limit of connections: the number of requests is bounded by the episodes in flight
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


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
