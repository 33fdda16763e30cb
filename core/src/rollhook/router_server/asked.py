"""What a request to the router asks for, as far as routing needs to know; its body stays as it came."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from rollhook.router import RouteRequest

#: headers that name a session, the first that is there counts; the second is that of SGLang's router
KEY_HEADERS = ("X-Rollhook-Session", "X-SMG-Routing-Key")
#: names of the rank in a body, over the versions of SGLang
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")


class BodyError(ValueError):
    """A body that is no JSON object."""


@dataclass(frozen=True)
class Asked:
    """One request: what policies see of it, whether a session was named, and a rank that the client chose."""

    route: RouteRequest
    keyed: bool
    rank: int | None
    body: bytes

    def for_rank(self, rank: int | None, field: str) -> bytes:
        """Return the body with a rank put in front of what the client wrote, which stays byte for byte."""
        if rank is None or self.rank is not None:
            return self.body
        inside = self.body[self.body.index(b"{") + 1 :]
        comma = b"" if inside.lstrip()[:1] == b"}" else b","
        return b'{"%s":%d%s%s' % (field.encode(), rank, comma, inside)


def read(headers: Mapping[str, str], body: bytes) -> Asked:
    """Read a request. Raises BodyError when the body is no JSON object."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BodyError("the body must be a JSON object")
    key = next((value for name in KEY_HEADERS if (value := headers.get(name))), None)
    prefix = _prefix(data)
    request = RouteRequest(key or uuid4().hex, "", prefix, len(prefix) + _new_tokens(data))
    return Asked(request, key is not None, _rank(data), body)


def _prefix(data: Mapping[str, Any]) -> Sequence[int]:
    """Return the ids of a prompt; of a text, whose ids are not known here, a number for every four bytes.

    Four bytes are about one token, and prompts that begin alike begin with the same numbers.
    """
    ids = data.get("input_ids", data.get("prompt"))
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return ids
    text = data.get("text", data.get("prompt"))
    if isinstance(text, str):
        return _numbers(text.encode(errors="replace"))
    messages = data.get("messages")
    return _numbers(orjson.dumps(messages)) if isinstance(messages, list) else ()


def _numbers(text: bytes) -> Sequence[int]:
    return array("I", text[: len(text) // 4 * 4])


def _new_tokens(data: Mapping[str, Any]) -> int:
    """Return how many tokens may be generated, 0 where the request does not say."""
    params = data.get("sampling_params")
    limits = (
        params.get("max_new_tokens") if isinstance(params, dict) else None,
        data.get("max_completion_tokens"),
        data.get("max_tokens"),
    )
    return next((limit for limit in limits if type(limit) is int and limit > 0), 0)


def _rank(data: Mapping[str, Any]) -> int | None:
    return next((data[name] for name in RANK_FIELDS if type(data.get(name)) is int), None)
