"""What the SDK raises, in the terms of the core.

Beside its own exceptions the SDK lets through those of its libraries (httpx), a bare ValueError for a status
that it does not know, KeyError for a reply that lacks a field and JSONDecodeError for one that is no JSON.
What is not known here is taken for a fault of the way to the service: another try may help.
"""

from __future__ import annotations

import re

from rollhook.errors import Kind, SandboxDead, SandboxError

_LIMITS = re.compile(r"maximum number|concurrent|quota|a limit of the E2B account", re.IGNORECASE)
_OF_ACCOUNT = re.compile(rf"{_LIMITS.pattern}|limit", re.IGNORECASE)
#: not too fast, but too many: the same exception tells both
_AT_ONCE = re.compile(r"maximum number|concurrent|quota", re.IGNORECASE)
_TEXT = 1000

#: SDK exception -> kind, whether the service refused, status, what to say; the first that fits counts
_KNOWN: tuple[tuple[str, Kind, bool, int | None, str], ...] = (
    ("AuthenticationException", "user", True, 401, "E2B refused the key; see api_key"),
    ("RateLimitException", "retryable", True, 429, "E2B asks to wait"),
    ("ServiceBusyException", "retryable", True, 503, "E2B asks to wait"),
    ("InvalidArgumentException", "user", True, 400, "E2B refused"),
    ("TemplateException", "user", True, 400, "E2B refused"),
    ("NotEnoughSpaceException", "infrastructure", False, None, "the disk of the sandbox is full"),
    ("TimeoutException", "retryable", False, None, "no answer from E2B"),
)
_GONE = {"SandboxNotRunningException", "SandboxNotFoundException"}


class ServiceError(SandboxError):
    """The service refused, or could not be reached.

    `refused` says that it did not do what was asked (a limit, a bad request): nothing of it can be left.
    `status` is that of its answer, where the SDK tells it. `wait` says that other sandboxes must end first.
    """

    wait = False

    def __init__(
        self,
        message: str,
        *,
        kind: Kind = "retryable",
        refused: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.refused = refused
        self.wait = refused and kind == "retryable" and bool(_LIMITS.search(message))
        self.status = status


def translate(error: BaseException, what: str, secret: str) -> SandboxError:
    """Return the error of the core for one of the SDK; `what` was being done, `secret` is never repeated."""
    if isinstance(error, SandboxError):
        return error
    names = {each.__name__ for each in type(error).__mro__}
    said = _said(error, secret)
    if names & _GONE:
        return SandboxDead(f"{what}: the sandbox is gone ({said})")
    for name, kind, refused, status, words in _KNOWN:
        if name in names:
            found = ServiceError(f"{what}: {words} ({said})", kind=kind, refused=refused, status=status)
            found.wait = status == 429 and _AT_ONCE.search(said) is not None
            return found
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return _by_status(what, said, status)
    return ServiceError(f"{what}: no usable answer from E2B ({said})")


def _by_status(what: str, said: str, status: int) -> ServiceError:
    if status in (402, 403) and _OF_ACCOUNT.search(said):
        found = ServiceError(f"{what}: a limit of the E2B account is reached ({said})", refused=True)
        found.status, found.wait = status, True
        return found
    if status in (408, 409, 425) or status >= 500:
        return ServiceError(f"{what}: E2B failed ({said})", status=status)
    return ServiceError(f"{what}: E2B refused ({said})", kind="user", refused=True, status=status)


def _said(error: BaseException, secret: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    named = text if type(error).__name__ in text else f"{type(error).__name__}: {text}"
    named = named.replace(secret, "***") if secret else named
    return named if len(named) <= _TEXT else f"{named[:_TEXT]}..."
