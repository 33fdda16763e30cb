"""One streamed reply: the session's text as server-sent events, at the pace at which the client reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from aiohttp import web

from rollhook.agent import Reply
from rollhook.errors import RollhookError
from rollhook.reply.parser import Delta
from rollhook.session.dialect import ChatRequest, Events, Left, RefusedError, failure
from rollhook.session.face import PolicySession

log = logging.getLogger(__name__)

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream_reply(
    request: web.Request, session: PolicySession, chat: ChatRequest, events: Events, *, stall: float
) -> web.StreamResponse:
    """Answer a request with the stream of one turn.

    What fails before the first piece of text is raised, so it gets a status of its own; later the stream ends
    with an error. A client that goes away, or does not read for `stall` seconds, ends the turn: it is aborted
    at the engine and nothing is committed.
    """
    pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
    turn = asyncio.ensure_future(
        session.chat(chat.messages, tools=chat.tools, max_tokens=chat.max_tokens, on_delta=pieces.put_nowait)
    )
    turn.add_done_callback(lambda done: pieces.put_nowait(None))
    try:
        piece = await pieces.get()
        if piece is None:
            turn.result()
        left = Left(session.turns_left, session.tokens_left)
        response = web.StreamResponse(headers={**HEADERS, **left.headers()})
        await response.prepare(request)
        try:
            await _write(response, events.begin(), stall)
            while piece is not None:
                await _write(response, events.delta(piece), stall)
                piece = await pieces.get()
            await _write(response, _ending(turn, session, events), stall)
        except TimeoutError:
            log.warning(
                "session %s: a client has not read its stream for %g s and is left", session.id, stall
            )
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            log.debug("session %s: a client has left its stream", session.id)
        return response
    finally:
        turn.cancel()
        await asyncio.wait({turn})


def _ending(turn: asyncio.Task[Reply], session: PolicySession, events: Events) -> Iterable[bytes]:
    try:
        reply = turn.result()
    except (RefusedError, RollhookError) as error:
        return events.failed(*failure(error))
    except Exception as error:
        log.exception("a streamed reply failed unexpectedly")
        return events.failed(*failure(error))
    return events.end(reply, Left(session.turns_left, reply.tokens_left))


async def _write(response: web.StreamResponse, events: Iterable[bytes], stall: float) -> None:
    async with asyncio.timeout(stall):
        await response.write(b"".join(events))
