"""The HTTP face of sessions, for agents outside the process: OpenAI's and Anthropic's clients drive one."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import orjson
from aiohttp import web

from rollhook.engine.base import SamplingParams
from rollhook.errors import RollhookError, UsageError
from rollhook.session.anthropic_messages import AnthropicMessages
from rollhook.session.chat_completions import ChatCompletions
from rollhook.session.dialect import Dialect, Left, RefusedError, failure, number, whole
from rollhook.session.face import Policy, PolicySession
from rollhook.session.sse import stream_reply

log = logging.getLogger(__name__)

_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/messages": AnthropicMessages(),
}
# what both OpenAI's and Anthropic's clients take for a list of models; a request may name any
_MODEL = {
    "id": "policy",
    "object": "model",
    "created": 0,
    "owned_by": "rollhook",
    "type": "model",
    "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z",
}
_MODELS = {"object": "list", "data": [_MODEL], "has_more": False, "first_id": "policy", "last_id": "policy"}


@dataclass(frozen=True)
class SessionDefaults:
    """What a session opened over HTTP gets; a client may ask for less, not for more."""

    max_seq_len: int = 32768
    reply_tokens: int = 8192
    turns: int = 30
    sampling: SamplingParams = field(default_factory=SamplingParams)


#: what POST /sessions takes
_OPENING = {"session_id", "task_id", "turns", "max_seq_len", "reply_tokens", "temperature", "top_p", "seed"}


class Gateway:
    """Serves `/sessions...` of one policy; the base URL of a session is what a client is given.

    `token` is the secret itself, resolved by the caller from its reference; without one, only a loopback
    address may be bound. Bodies over `max_body` bytes are refused, and those that take `stall` seconds to
    come. A client that goes away during a reply, or does not read its stream for `stall` seconds, ends it:
    the request is aborted at the engine and nothing is committed. A session that was opened here is closed
    when it has had no request for `idle_ttl` seconds (None: never).
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
        max_sessions: int = 16384,
        stall: float = 60.0,
        idle_ttl: float | None = 3600.0,
        now: Callable[[], float] = time.monotonic,
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
        self._stall = stall
        self._idle_ttl = idle_ttl
        self._now = now
        #: how machines elsewhere reach it; `{port}` in it is the port that it listens on
        self.public_address: str | None = None
        self._key = (token or secrets.token_hex(32)).encode()
        #: sessions that were opened here, and when each was used last
        self._used: WeakKeyDictionary[PolicySession, float] = WeakKeyDictionary()
        self._expiry: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def public_url(self) -> str | None:
        """How machines elsewhere reach it; None where nobody has said."""
        if self.public_address is None:
            return None
        return self.public_address.rstrip("/").replace("{port}", self.url.rpartition(":")[2])

    def session_token(self, session_id: str) -> str:
        """Return the token with which one session can be driven, and nothing else."""
        return hmac.digest(self._key, session_id.encode(), "sha256").hex()

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
                web.get(one + "/v1/models", self._models),
                *(web.post(one + path, self._chat) for path in _DIALECTS),
                web.post(one + "/v1/messages/count_tokens", self._count),
            ]
        )
        return app

    async def start(self) -> None:
        """Listen; `url` says where."""
        # without auto_decompress a small body cannot become a huge one before anybody has looked at it
        self._runner = web.AppRunner(
            self.app(),
            handler_cancellation=True,
            shutdown_timeout=1.0,
            auto_decompress=False,
            access_log=None,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._bind, self._port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._idle_ttl is not None:
            self._expiry = asyncio.create_task(self._expire(self._idle_ttl))

    async def stop(self) -> None:
        """Stop listening; sessions stay open. Safe to call twice."""
        if self._expiry is not None:
            self._expiry.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._expiry
            self._expiry = None
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # -- endpoints

    async def _open(self, request: web.Request) -> web.Response:
        body = await self._body(request, empty_ok=True)
        if len(self._policy.sessions) >= self._max_sessions:
            raise RefusedError(429, f"{self._max_sessions} sessions are open; close some")
        if strays := ", ".join(sorted(set(body) - _OPENING)):
            raise RefusedError(422, f"no such fields: {strays}; a session has {', '.join(sorted(_OPENING))}")
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
                temperature=number(body, "temperature", sampling.temperature, 0.0, 100.0),
                top_p=number(body, "top_p", sampling.top_p, 1e-6, 1.0),
            ),
            max_seq_len=whole(body, "max_seq_len", defaults.max_seq_len, defaults.max_seq_len),
            reply_tokens=whole(body, "reply_tokens", defaults.reply_tokens, defaults.reply_tokens),
            turns=whole(body, "turns", defaults.turns, defaults.turns),
            seed=whole(body, "seed", None, 2**63 - 1, least=0),
        )
        self._used[session] = self._now()
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
                "usage": {
                    "prompt_tokens": stats.prompt_tokens,
                    "completion_tokens": stats.completion_tokens,
                    "total_tokens": stats.prompt_tokens + stats.completion_tokens,
                },
                "branches": [
                    {"tokens": len(leaf.token_ids), "finish_reason": leaf.finish_reason}
                    for leaf in session.leaves()
                ],
            }
        )

    async def _close(self, request: web.Request) -> web.Response:
        await self._session(request).close()
        return web.Response(status=204)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _json(_MODELS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._session(request), _dialect(request)
        chat = dialect.request(await self._body(request), session.sampling)
        try:
            if chat.stream:
                return await stream_reply(request, session, chat, dialect.events(chat), stall=self._stall)
            reply = await session.chat(chat.messages, tools=chat.tools, max_tokens=chat.max_tokens)
        finally:
            self._touch(session)
        left = Left(session.turns_left, reply.tokens_left)
        return _json(dialect.reply(chat, reply, left), headers=left.headers())

    async def _count(self, request: web.Request) -> web.Response:
        session = self._session(request)
        chat = _dialect(request).request(await self._body(request), session.sampling)
        return _json({"input_tokens": await session.count_tokens(chat.messages, tools=chat.tools)})

    # -- sessions that nobody uses

    async def close_idle(self, idle_ttl: float) -> None:
        """Close the sessions opened here that have had no request for `idle_ttl` seconds."""
        for session, used in list(self._used.items()):
            is_open = self._policy.sessions.get(session.id) is session
            if is_open and not session.waits_for and self._now() - used >= idle_ttl:
                log.info("session %s had no request for %g s and is closed", session.id, idle_ttl)
                await session.close()

    async def _expire(self, idle_ttl: float) -> None:
        while True:
            await asyncio.sleep(min(60.0, idle_ttl / 4))
            try:
                await self.close_idle(idle_ttl)
            except Exception:  # a router policy may fail at the end of a session
                log.exception("sessions that nobody uses could not be closed")

    def _touch(self, session: PolicySession) -> None:
        if session in self._used:
            self._used[session] = self._now()

    # -- around them

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token and turn every failure into an error of the client's dialect."""
        try:
            if self._token is not None and request.path != "/health":
                self._authorise(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error(request, 413, f"the body is larger than {self._max_body} bytes")
        except web.HTTPException as error:
            return _error(request, error.status, error.reason)
        except (RefusedError, RollhookError) as error:
            if (answer := failure(error))[0] >= 500:
                log.warning("a request to the gateway failed: %s", error)
            return _error(request, *answer)
        except Exception as error:  # whatever a message makes a template do, the client gets an answer
            log.exception("a request to the gateway failed unexpectedly")
            return _error(request, *failure(error))

    def _authorise(self, request: web.Request) -> None:
        key = request.headers.get("X-Api-Key")
        given = f"Bearer {key}" if key is not None else request.headers.get("Authorization", "")
        fitting = [self._token or ""]
        session_id, path = request.match_info.get("session_id"), request.path
        if session_id is not None and path.startswith(f"/sessions/{session_id}/v1/"):
            fitting.append(self.session_token(session_id))
        raw = given.encode(errors="replace")
        if not any(hmac.compare_digest(raw, f"Bearer {token}".encode()) for token in fitting):
            raise RefusedError(
                401, "the gateway's token is required: Authorization: Bearer <token>, or X-Api-Key: <token>"
            )

    def _session(self, request: web.Request) -> PolicySession:
        session_id = request.match_info["session_id"]
        session = self._policy.sessions.get(session_id)
        if session is None:
            raise RefusedError(404, f"session {session_id!r} is unknown or closed")
        self._touch(session)
        return session

    async def _body(self, request: web.Request, *, empty_ok: bool = False) -> dict[str, Any]:
        if (request.content_length or 0) > self._max_body:
            raise RefusedError(413, f"the body is larger than {self._max_body} bytes")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedError(415, "the body must not be compressed")
        try:
            async with asyncio.timeout(self._stall):
                raw = await request.read()
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {self._stall:g} s") from None
        except web.RequestPayloadError as error:
            raise RefusedError(400, f"the body cannot be read: {error}") from None
        if empty_ok and not raw.strip():
            return {}
        if not request.content_type.endswith(("/json", "+json")):
            raise RefusedError(415, f"the body must be application/json, not {request.content_type}")
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
    if session_id in (".", ".."):  # clients take them out of a path
        return False
    return 0 < len(session_id) <= 200 and all(
        c.isascii() and (c.isalnum() or c in "._:-") for c in session_id
    )


def _dialect(request: web.Request) -> Dialect:
    """Return the dialect of a request, by its path or by what Anthropic's clients send everywhere."""
    for path, dialect in _DIALECTS.items():
        if request.path.endswith(path):
            return dialect
    anthropic = "Anthropic-Version" in request.headers or "/v1/messages" in request.path
    return _DIALECTS["/v1/messages" if anthropic else "/v1/chat/completions"]


def _error(request: web.Request, status: int, message: str, code: str | None = None) -> web.Response:
    # the official clients try a 409 again unless they are told
    headers = {"X-Should-Retry": "false"} if 400 <= status < 500 and status != 429 else None
    return _json(_dialect(request).error(status, message, code), status, headers)


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data), status=status, headers=headers, content_type="application/json"
    )
