"""One generation on the wire, in SGLang's form: the body of `/generate` and what its answer must hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollhook.engine.base import Generation, GenerationRequest


def generate_body(request: GenerationRequest, *, stream: bool = False) -> dict[str, Any]:
    """Return the body of `/generate` for a request."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {
        "rid": request.rid,
        "input_ids": np.asarray(request.input_ids, dtype=np.int32),
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
    }


def parse_generation(data: Any) -> Generation:
    """Return the generation of a `/generate` answer.

    Raises ValueError, KeyError, IndexError or TypeError when it breaks the protocol.
    """
    if not isinstance(data, dict):
        raise ValueError("the answer is not a JSON object")
    meta = data["meta_info"]
    reason = meta["finish_reason"]
    kind = str(reason["type"]) if isinstance(reason, dict) else str(reason)
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {kind!r} is unknown")
    rows = meta.get("output_token_logprobs")
    if rows is None:
        if kind != "abort":
            raise ValueError("output_token_logprobs are missing although they were asked for")
        rows = []
    logprobs, ids = parse_rows(rows)
    if kind != "abort":
        _check_tokens(data, meta, ids)
    numbers = _versions(meta.get("weight_versions"), len(ids))
    last = version_number(meta.get("weight_version"))
    _check_range("weight version", [*(numbers or ()), last or 0])
    queue = meta.get("queue_time")
    return Generation(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=kind,
        weight_version=last,
        versions=numbers,
        queue_seconds=None if queue is None else max(0.0, float(queue)),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        meta={key: meta[key] for key in ("e2e_latency", "prompt_tokens") if key in meta},
    )


def parse_rows(rows: Sequence[Any]) -> tuple[list[float], list[int]]:
    """Return the log-probabilities and the ids of rows; raises as `parse_generation` does."""
    logprobs = [float(row[0]) for row in rows]
    ids = [int(row[1]) for row in rows]
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise ValueError("a log-probability is not finite")
    _check_range("token id", ids)
    return logprobs, ids


def _versions(reported: Any, count: int) -> list[int] | None:
    """Return one version per token, from one per token or from SGLang's spans {version, start, end}.

    None where nothing is reported, or names that are no numbers (an engine that never got weights of ours).
    """
    if reported is None:
        return None
    if all(isinstance(span, dict) for span in reported):
        reported = [
            s["version"] for s in reported for _ in range(max(0, int(s["start"])), min(int(s["end"]), count))
        ]
    if len(reported) != count:
        raise ValueError(f"{len(reported)} weight_versions for {count} tokens")
    numbers = [version_number(version) for version in reported]
    return None if None in numbers else [number for number in numbers if number is not None]


def _check_tokens(data: Any, meta: Any, ids: list[int]) -> None:
    count = meta["completion_tokens"]
    if len(ids) != count:
        raise ValueError(f"{len(ids)} log-probabilities for {count} completion tokens")
    output = data.get("output_ids")
    if output is not None and list(output) != ids:
        raise ValueError("output_ids are not the ids of output_token_logprobs")


def _check_range(what: str, numbers: Sequence[int]) -> None:
    """Raise ValueError for a number that does not fit where such numbers are kept, int32."""
    for number in numbers:
        if not 0 <= number < 1 << 31:
            raise ValueError(f"{what} {number} is out of range")


def version_number(version: Any) -> int | None:
    """Return an engine's weight version as a number; None for `default` and the like."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return None
