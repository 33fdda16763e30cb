"""What Daytona's errors mean here: to wait, to try again, the caller's fault, or a sandbox that is gone.

Statuses, classes and texts are those of SDK 0.x and its API. What is not known may be tried again, with the
cause attached.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from rollhook.errors import SandboxDead, SandboxError

#: a quota of the organisation, which other sandboxes free again by ending
_QUOTA = re.compile(
    r"limit (was |is |has been )?(exceeded|reached)|quota|maximum number of|too many|throttl|exceeded"
    r"|no (available|suitable) runner|capacity|suspended: depleted",
    re.IGNORECASE,
)
#: never freed: what is asked of one sandbox is more than any may have
_NEVER = re.compile(r"per[- ]sandbox|must be (an integer|at most|less)", re.IGNORECASE)
_SHOWN = 400


class RefusedForNow(SandboxError):  # noqa: N818 - a state of the service
    """Nothing was made; another try after `retry_after` seconds may succeed; `wait`: once others end."""

    kind = "retryable"

    def __init__(self, message: str, retry_after: float, wait: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.wait = wait


def translate(error: BaseException, what: str, *, key: str, quota_wait: float = 20.0) -> SandboxError:
    """Return the error to raise for one of the SDK or of HTTP; `what` was being done.

    `key` is never repeated, should the service do so. 404 is SandboxDead: whoever names no sandbox of its
    own must judge it before.
    """
    if isinstance(error, SandboxError):
        return error
    status: int | None = getattr(error, "status_code", None) or getattr(error, "status", None)
    text = f"Daytona, {what}: {_said(error, key)}"
    if status == 429 or type(error).__name__ == "DaytonaRateLimitError":
        return RefusedForNow(text, retry_after(getattr(error, "headers", None) or {}, 1.0))
    if status in (400, 402, 403, 409, 422) and _QUOTA.search(text) and not _NEVER.search(text):
        return RefusedForNow(f"{text} (waiting for others to end)", quota_wait, wait=True)
    if status in (404, 410):
        return SandboxDead(text)
    if status == 401:
        text += "; the key of `sandbox.api_key` is not valid there"
    return SandboxError(text, kind="user" if status in (400, 401, 402, 403, 422) else "retryable")


class Refusal(Exception):  # noqa: N818 - an answer that is judged like an error
    """An HTTP answer that was no success."""

    def __init__(self, status: int, body: str, headers: Mapping[str, str]) -> None:
        message = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', body)
        super().__init__(f"HTTP {status}: {message[1] if message else body}")
        self.status = status
        self.headers = headers


def retry_after(headers: Mapping[str, Any], default: float) -> float:
    """Return the seconds that any `Retry-After` or `Retry-After-<throttler>` asks for, at most an hour."""
    asked = []
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            try:
                asked.append(float(value))
            except (TypeError, ValueError):
                continue
    wanted = [seconds for seconds in asked if 0 <= seconds < float("inf")]
    return min(max(wanted), 3600.0) if wanted else default


def _said(error: BaseException, key: str) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no answer in time"
    text = " ".join(str(error).split()) or type(error).__name__
    if key:
        text = text.replace(key, "***")
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
