"""OpenAI's chat completions: bodies of requests, what replies hold, and what errors mean."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import orjson

from rollhook.engine.messages import Completion, MessageRequest, Usage
from rollhook.messages import Message, ToolCall
from rollhook_openai import OpenAIConfig

#: statuses that another try may mend
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_VERSION = re.compile(r"v\d\w*")
_CONTEXT_FULL = re.compile(
    r"context (length|window|size)|(prompt|input) is too long|input token count", re.IGNORECASE
)
_SENT = ("role", "content", "name", "tool_call_id", "tool_calls")


def base_url(given: str) -> str:
    """Return the URL below which `/chat/completions` is."""
    url = given.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    versioned = any(_VERSION.fullmatch(part) for part in urlsplit(url).path.split("/"))
    return url if versioned else f"{url}/v1"


def chat_body(request: MessageRequest, config: OpenAIConfig) -> bytes:
    """Return the body of a chat completion. Raises TypeError for text that is no Unicode."""
    sampling = request.sampling
    sent = (*_SENT, "reasoning_content") if config.send_reasoning else _SENT
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{key: each[key] for key in sent if key in each} for each in request.messages],  # type: ignore[literal-required]
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        config.limit_key: sampling.max_new_tokens,
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if sampling.top_k != -1:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    body |= config.extra_body
    return orjson.dumps({key: value for key, value in body.items() if value is not None})


def parse_completion(data: Any) -> Completion:
    """Return what a reply holds. Raises ValueError, KeyError, IndexError or TypeError for a malformed one."""
    choice = data["choices"][0]
    said = choice["message"]
    text = _text(said.get("content")) or _text(said.get("refusal"))
    message: Message = {"role": "assistant", "content": text}
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if said.get("tool_calls"):
        message["tool_calls"] = [_call(number, call) for number, call in enumerate(said["tool_calls"])]
    reason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Completion(message, reason, _usage(data.get("usage")))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") in ("text", "output_text"))
    if not isinstance(content, str | None):
        raise TypeError(f"content is {type(content).__name__}")
    return content or ""


def _call(number: int, call: Any) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(function["name"], str):
        raise TypeError("a tool call has no name")
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, Mapping) else None
    return Usage(prompt, completion, cached or 0)


def _count(data: Mapping[str, Any], key: str) -> int | None:
    count = data.get(key)
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def error_parts(raw: bytes) -> tuple[str, str]:
    """Return (code, reason) of an error's body, whatever it is."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "", raw.decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return "", str(error)
    reason = error.get("message") or error.get("detail") or error
    return str(error.get("code") or error.get("type") or ""), str(reason)


def context_is_full(code: str, reason: str) -> bool:
    """Return whether a refusal says that conversation and reply do not fit into the model's context."""
    return code == "context_length_exceeded" or _CONTEXT_FULL.search(reason) is not None


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds that an endpoint asks to wait: a number, or a date that is compared with `now`."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            seconds = float(milliseconds) / 1000
        elif (text := headers.get("Retry-After")) is None:
            return None
        elif re.fullmatch(r"\s*[\d.]+\s*", text):
            seconds = float(text)
        else:
            seconds = parsedate_to_datetime(text).timestamp() - now()
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def models_of(data: Any) -> dict[str, Mapping[str, Any]] | None:
    """Return the models of a list by name; None where that is no list of models."""
    rows = data.get("data") if isinstance(data, Mapping) else data
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return None
    return {str(row["id"]): row for row in rows if isinstance(row, Mapping) and "id" in row}


def context_length(row: Mapping[str, Any]) -> int | None:
    """Return the context that a model's row states, as vLLM, SGLang, OpenRouter and others name it."""
    for key in ("max_model_len", "context_length", "context_window", "max_context_length"):
        if isinstance(row.get(key), int) and row[key] > 0:
            return int(row[key])
    return None
