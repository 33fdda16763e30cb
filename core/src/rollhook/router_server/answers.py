"""Answers in the forms that clients of OpenAI and of SGLang's router read."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web


def refusal(status: int, message: str, code: str) -> web.Response:
    """Return an error as SGLang's router and OpenAI have it; `code` is for programs."""
    error = {"type": HTTPStatus(status).phrase, "code": code, "message": message, "param": None}
    answer = json({"error": error}, status)
    answer.headers["X-SMG-Error-Code"] = code
    return answer


def json(data: Any, status: int = 200) -> web.Response:
    """Return data as JSON."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
