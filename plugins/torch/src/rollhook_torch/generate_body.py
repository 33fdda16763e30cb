"""What a body of `/generate` asks for, and its answer; all that is wrong with it is said in a sentence."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollhook_torch.request import Request

#: a temperature below it is greedy, as SGLang has it
GREEDY_BELOW = 1e-6
_PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "max_new_tokens",
        "stop_token_ids",
        "sampling_seed",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
    }
)
_IGNORED_WHEN_NEUTRAL: Mapping[str, object] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop": None,
}


class BadRequestError(ValueError):
    """What the caller did wrong, in one sentence."""


def prompt_ids(body: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return the prompt. Raises BadRequestError."""
    ids = body.get("input_ids")
    if ids is None:
        raise BadRequestError("input_ids is missing: this server takes token ids, not text")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BadRequestError("input_ids must be one list of at least one integer")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequestError(f"input_ids holds ids outside 0 to {vocab_size - 1}")
    return ids


def extra_key(body: Mapping[str, Any]) -> str | None:
    """Return the namespace of the prefixes that a request may share. Raises BadRequestError."""
    key = body.get("extra_key")
    if key is not None and not isinstance(key, str):
        raise BadRequestError(f"extra_key must be a string, not {str(key)[:40]}")
    return key


def parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters, defaults filled in. Raises BadRequestError."""
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise BadRequestError("sampling_params must be an object")
    for name, value in given.items():
        if name in _PARAMETERS or (
            name in _IGNORED_WHEN_NEUTRAL and value in (None, [], _IGNORED_WHEN_NEUTRAL[name])
        ):
            continue
        raise BadRequestError(f"sampling_params.{name} = {value!r} is not supported by this server")
    stops = given.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(type(i) is int for i in stops):
        raise BadRequestError("sampling_params.stop_token_ids must be a list of integers")
    seed = given.get("sampling_seed")
    if seed is not None and type(seed) is not int:
        raise BadRequestError(f"sampling_params.sampling_seed must be an integer, not {seed!r}")
    temperature = _number(given, "temperature", 1.0, lambda v: v >= 0, "at least 0")
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_p": _number(given, "top_p", 1.0, lambda v: 0 < v <= 1, "above 0 and at most 1"),
        "top_k": int(_number(given, "top_k", -1, lambda v: v == -1 or v >= 1, "-1 (all) or at least 1")),
        "max_new_tokens": int(_number(given, "max_new_tokens", 128, lambda v: v >= 1, "at least 1")),
        "stop_token_ids": stops,
        "sampling_seed": seed,
        "ignore_eos": bool(given.get("ignore_eos", False)),
    }


def answer(row: Request, body: Mapping[str, Any], version: str, *, finished: bool = True) -> dict[str, Any]:
    """Return SGLang's answer with all tokens so far; `version` is that of the weights now.

    `row` may be generated on meanwhile, on another thread, unless it has finished.
    """
    now = time.perf_counter()
    count = len(row.versions)  # written last of a token: so many are complete
    ids, versions = row.ids[:count], row.versions[:count]
    meta: dict[str, Any] = {
        "id": row.rid,
        "finish_reason": row.finish if finished else None,
        "prompt_tokens": len(row.prompt),
        "completion_tokens": count,
        "cached_tokens": row.cached_tokens,
        "weight_version": versions[-1] if versions else version,
        "weight_versions": versions,
        "e2e_latency": now - row.submitted,
        "queue_time": (row.admitted or now) - row.submitted,
    }
    if body.get("return_logprob"):
        logprobs = row.logprobs[:count]
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, ids, strict=True)]
    return {"text": "", "output_ids": ids, "meta_info": meta}


def _number(
    given: Mapping[str, Any], name: str, default: float, valid: Callable[[float], bool], allowed: str
) -> float:
    value = given.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
        or not valid(value)
    ):
        raise BadRequestError(f"sampling_params.{name} must be {allowed}, not {str(value)[:40]}")
    return value
