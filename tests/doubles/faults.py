"""What goes wrong on purpose: rules that a test sets, applied around every request, and the journal of them.

A rule is a JSON object. Which requests it is for:
    surface   "daytona", "e2b_api", "e2b_envd" (absent: any)
    method    "POST" (absent: any)
    path      a part of the path with its query (absent: any)
    who       a part of the request's body or headers, e.g. a label or a sandbox id (absent: any)
    skip      how many such requests pass first (0)
    times     how many are hit after that (1; null: all)
What happens, one or several:
    delay_before, delay_after   seconds, before the effect or between it and the reply
    drop         "before" or "after" the effect: the connection is reset and nothing is answered
    status, body, headers       answered instead; `body` is JSON or a text (then text/html);
                 without effect, unless `after_effect` is true
    truncate     bytes of the reply's body that are sent before the connection is reset
    freeze       bytes of the reply's body that are sent before nothing follows, for ever
    cut          seconds after which an unanswered request is reset, as gateways do; the effect goes on
    hint         anything, for the handler itself: `request["hint"]` (frames of a stream, ...)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from doubles.world import World

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_KNOWN = frozenset(
    {
        "surface",
        "method",
        "path",
        "who",
        "skip",
        "times",
        "delay_before",
        "delay_after",
        "drop",
        "status",
        "body",
        "headers",
        "after_effect",
        "truncate",
        "freeze",
        "cut",
        "hint",
    }
)


class Faults:
    """The rules in force."""

    def __init__(self) -> None:
        self._rules: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def add(self, rule: dict[str, Any]) -> int:
        """Add a rule and return its number; KeyError for a word that is not known."""
        if unknown := set(rule) - _KNOWN:
            raise KeyError(", ".join(sorted(unknown)))
        number = next(self._numbers)
        self._rules[number] = {"skip": 0, "times": 1, "hits": 0, **rule}
        return number

    def clear(self) -> None:
        """Remove all rules; what is frozen stays so."""
        self._rules.clear()

    def hits(self, number: int) -> int:
        """Return how many requests a rule has hit."""
        return int(self._rules[number]["hits"]) if number in self._rules else 0

    async def match(self, surface: str, request: web.Request) -> dict[str, Any] | None:
        """Return the first rule for this request and count it."""
        for rule in self._rules.values():
            if rule.get("surface") not in (None, surface) or rule.get("method") not in (None, request.method):
                continue
            if rule.get("path", "") not in request.path_qs:
                continue
            if "who" in rule and not await _mentions(request, rule["who"]):
                continue
            if rule["skip"] > 0:
                rule["skip"] -= 1
                continue
            if rule["times"] is not None and rule["hits"] >= rule["times"]:
                continue
            rule["hits"] += 1
            return rule
        return None


async def _mentions(request: web.Request, who: str) -> bool:
    heads = " ".join(f"{name}: {value}" for name, value in request.headers.items())
    return who in request.path_qs or who in heads or who in (await request.read()).decode("utf-8", "replace")


def watch(world: World, surface: str) -> Any:
    """Return the middleware that keeps the journal of a surface and applies the rules to it."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.remote not in ("127.0.0.1", "::1"):
            raise web.HTTPForbidden(text="loopback only")
        entry: dict[str, Any] = {
            "n": len(world.journal) + 1,
            "surface": surface,
            "method": request.method,
            "path": request.path_qs,
            "at": time.time(),
            "status": None,
        }
        world.journal.append(entry)
        if request.match_info.http_exception is not None:
            entry["miss"] = True
            entry["status"] = request.match_info.http_exception.status
            return web.json_response({"message": f"MISS: the double has no {request.path}"}, status=404)
        rule = await world.faults.match(surface, request) or {}
        if rule:
            entry["fault"] = {name: value for name, value in rule.items() if name not in ("hits", "skip")}
        request["hint"], request["entry"] = rule.get("hint"), entry
        try:
            response = await _apply(world, rule, request, handler)
        except web.HTTPException as error:
            entry["status"] = error.status
            raise
        except ConnectionResetError:  # the client has gone amid its own request
            entry["status"] = 499
            return web.Response(status=499)
        except Exception as error:
            entry["status"], entry["failed"] = 500, repr(error)
            raise
        entry["status"], entry["seconds"] = response.status, round(time.time() - entry["at"], 4)
        return response

    return middleware


async def _apply(
    world: World, rule: dict[str, Any], request: web.Request, handler: Handler
) -> web.StreamResponse:
    await asyncio.sleep(rule.get("delay_before", 0))
    if rule.get("drop") == "before":
        return _reset(request)
    if "status" in rule and not rule.get("after_effect"):
        await request.read()
        return _instead(rule)
    if "cut" in rule:
        effect = world.spawn(_answer(request, handler))
        done, _ = await asyncio.wait({effect}, timeout=rule["cut"])
        if not done:
            return _reset(request)
        response: web.StreamResponse = effect.result()
    else:
        response = await _answer(request, handler)
    await asyncio.sleep(rule.get("delay_after", 0))
    if rule.get("drop") == "after":
        return _reset(request)
    if "status" in rule:
        return _instead(rule)
    if "truncate" in rule or "freeze" in rule:
        return await _partly(request, response, rule)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.Response(status=error.status, body=error.body, content_type=error.content_type)


def _instead(rule: dict[str, Any]) -> web.Response:
    body, headers = rule.get("body", {"message": "as a rule says"}), rule.get("headers", {})
    if isinstance(body, str):
        return web.Response(status=rule["status"], text=body, content_type="text/html", headers=headers)
    return web.Response(
        status=rule["status"], text=json.dumps(body), content_type="application/json", headers=headers
    )


def _reset(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)


async def _partly(
    request: web.Request, response: web.StreamResponse, rule: dict[str, Any]
) -> web.StreamResponse:
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        raise web.HTTPNotImplemented(text="only whole replies can be truncated or frozen; use a hint")
    body = response.body
    partial = web.StreamResponse(status=response.status)
    partial.content_type, partial.content_length = response.content_type, len(body)
    await partial.prepare(request)
    await partial.write(body[: rule.get("truncate", rule.get("freeze", 0))])
    if "freeze" in rule:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.05)
    _reset(request)
    return partial
