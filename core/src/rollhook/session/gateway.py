"""The HTTP face of sessions, for agents outside the process: OpenAI's chat completions, not streaming."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.errors import BudgetExceeded, EngineError, RollhookError, UsageError
from rollhook.session.common import SessionError
from rollhook.session.face import Policy, PolicySession
from rollhook.session.render import RenderError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionDefaults:
    """What a session opened over HTTP gets; a client may ask for less, not for more."""

    max_seq_len: int = 32768
    reply_tokens: int = 8192
    turns: int = 30
    sampling: SamplingParams = field(default_factory=SamplingParams)


class RefusedError(Exception):
    """A request that is answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gateway:
    """Serves `/sessions...` of one policy.

    `token` is the secret itself, resolved by the caller from its reference; without one, only a loopback
    address may be bound. Bodies over `max_body` bytes are refused. A client that goes away during a
    reply ends it: the request is aborted at the engine and nothing is committed.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        defaults: SessionDefaults | None = None,
        max_body: int = 16 << 20,
        max_sessions: int = 4096,
    ) -> None:
        if token is None and not _loopback(bind):
            raise UsageError(
                f"gateway.bind: {bind!r} is reachable from outside, so gateway.token must name a secret"
            )
        self._policy = policy
        self._bind = bind
        self._port = port
        self._token = token
        self._defaults = defaults or SessionDefaults()
        self._max_body = max_body
        self._max_sessions = max_sessions
        self._runner: web.AppRunner | None = None
        self.url = ""

    def app(self) -> web.Application:
        """Return the application, for a server of one's own."""
        app = web.Application(client_max_size=self._max_body, middlewares=[self._guard])
        one = "/sessions/{session_id}"
        app.add_routes(
            [
                web.get("/health", _health),
                web.post("/sessions", self._open),
                web.get(one, self._show),
                web.delete(one, self._close),
                web.post(one + "/v1/chat/completions", self._chat),
            ]
        )
        return app

    async def start(self) -> None:
        """Listen; `url` says where."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._bind, self._port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening; sessions stay open. Safe to call twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # -- endpoints

    async def _open(self, request: web.Request) -> web.Response:
        body = await self._body(request, empty_ok=True)
        if len(self._policy.sessions) >= self._max_sessions:
            raise RefusedError(429, f"{self._max_sessions} sessions are open; close some")
        defaults, sampling = self._defaults, self._defaults.sampling
        session_id = body.get("session_id", uuid4().hex)
        task_id = body.get("task_id", "")
        if not (isinstance(session_id, str) and isinstance(task_id, str) and _plain(session_id)):
            raise RefusedError(
                422, "session_id and task_id are text; an id has letters, digits and ._:- only"
            )
        session = self._policy.open(
            session_id,
            task_id=task_id,
            sampling=replace(
                sampling,
                temperature=_number(body, "temperature", sampling.temperature, 0.0, 100.0),
                top_p=_number(body, "top_p", sampling.top_p, 1e-6, 1.0),
            ),
            max_seq_len=_whole(body, "max_seq_len", defaults.max_seq_len, defaults.max_seq_len),
            reply_tokens=_whole(body, "reply_tokens", defaults.reply_tokens, defaults.reply_tokens),
            turns=_whole(body, "turns", defaults.turns, defaults.turns),
            seed=_whole(body, "seed", None, 2**63 - 1, least=0),
        )
        return _json({"session_id": session.id}, 201)

    async def _show(self, request: web.Request) -> web.Response:
        session = self._session(request)
        stats = session.stats
        return _json(
            {
                "session_id": session.id,
                "turns": stats.turns,
                "turns_left": session.turns_left,
                "tokens_left": session.tokens_left,
                "usage": _usage(stats.prompt_tokens, stats.completion_tokens),
                "branches": [
                    {"tokens": len(leaf.token_ids), "finish_reason": leaf.finish_reason}
                    for leaf in session.leaves()
                ],
            }
        )

    async def _close(self, request: web.Request) -> web.Response:
        await self._session(request).close()
        return web.Response(status=204)

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await self._body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RefusedError(400, "messages must be a list with at least one message")
        if body.get("stream"):
            raise RefusedError(400, "streaming is not supported; leave out stream")
        if body.get("n", 1) != 1:
            raise RefusedError(400, "one choice per request; leave out n")
        tools = body.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
            raise RefusedError(400, "tools must be a list of objects")
        limit = _whole(body, "max_completion_tokens", _whole(body, "max_tokens", None, 2**31), 2**31)
        reply = await session.chat([_joined(m) for m in messages], tools=tools or None, max_tokens=limit)
        return _json(_completion(session, reply, str(body.get("model", "policy"))))

    # -- around them

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token and turn every failure into an OpenAI-style error."""
        try:
            if self._token is not None and request.path != "/health":
                self._authorise(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {self._max_body} bytes")
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except (RefusedError, RollhookError) as error:
            status, code = _status(error)
            if status >= 500:
                log.warning("a request to the gateway failed: %s", error)
            return _error(status, str(error), code)
        except Exception:  # whatever a message makes a template do, the client gets an answer
            log.exception("a request to the gateway failed unexpectedly")
            return _error(500, "the gateway failed; its log says why", "server_error")

    def _authorise(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        expected = f"Bearer {self._token}"
        if not hmac.compare_digest(given.encode(errors="replace"), expected.encode()):
            raise RefusedError(401, "the gateway's token is required: Authorization: Bearer <token>")

    def _session(self, request: web.Request) -> PolicySession:
        session_id = request.match_info["session_id"]
        session = self._policy.sessions.get(session_id)
        if session is None:
            raise RefusedError(404, f"session {session_id!r} is unknown or closed")
        return session

    async def _body(self, request: web.Request, *, empty_ok: bool = False) -> dict[str, Any]:
        if (request.content_length or 0) > self._max_body:
            raise RefusedError(413, f"the body is larger than {self._max_body} bytes")
        raw = await request.read()
        if empty_ok and not raw.strip():
            return {}
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RefusedError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body must be a JSON object")
        return body


async def _health(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


def _loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _plain(session_id: str) -> bool:
    return 0 < len(session_id) <= 200 and all(
        c.isascii() and (c.isalnum() or c in "._:-") for c in session_id
    )


def _joined(message: Any) -> Any:
    """Return a message whose content parts, if it has any, are joined to one text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    if not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
    ):
        raise RefusedError(422, "only text parts are supported in content")
    return {**message, "content": "".join(part["text"] for part in content)}


def _whole(body: Mapping[str, Any], key: str, default: Any, most: int, *, least: int = 1) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RefusedError(422, f"{key} must be a whole number from {least} to {most}")
    return value


def _number(body: Mapping[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RefusedError(422, f"{key} must be a number from {least:g} to {most:g}")
    return float(value)


def _completion(session: PolicySession, reply: Reply, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid4().hex[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": reply.message, "finish_reason": reply.finish_reason}],
        "usage": _usage(reply.prompt_tokens, reply.completion_tokens),
        "rollhook": {"turns_left": session.turns_left, "tokens_left": reply.tokens_left},
    }


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _status(error: Exception) -> tuple[int, str | None]:
    """Return the HTTP status of an error and OpenAI's `code` for it."""
    if isinstance(error, RefusedError | SessionError):
        return error.status, None
    if isinstance(error, RenderError):
        return 422, None
    if isinstance(error, BudgetExceeded):
        return 403, "budget_exceeded"
    if isinstance(error, EngineError):
        return (422 if error.kind == "user" else 502), "engine_error"
    return 500, None


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
