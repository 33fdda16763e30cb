"""An engine that is any OpenAI-compatible endpoint, for evaluation: it takes messages and gives no tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook.secrets import Secret

_HEADER = r"^[!-~]+$"
_NO_URL = "is no base URL; an example: https://api.openai.com/v1"


def _usable(url: str) -> str:
    """Refuse what is no base URL; the message repeats nothing of it, which may hold a secret."""
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        raise ValueError(_NO_URL) from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("holds a user, a password or a query; a key belongs into api_key, as a reference")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise ValueError(_NO_URL)
    return url


def _ours(extra: dict[str, Any]) -> dict[str, Any]:
    for key in ("model", "messages", "tools", "stream", "n"):
        if key in extra:
            raise ValueError(f"may not hold {key!r}: the engine sets it, or needs it as it is")
    return extra


class OpenAIConfig(Config):
    """Keys of the openai engine."""

    base_url: Annotated[
        str,
        AfterValidator(_usable),
        Field(description="where the endpoint is; /v1 is added where the path names no version"),
    ]
    model: Annotated[str, Field(min_length=1, description="the model's name at the endpoint")]
    api_key: Annotated[
        Secret | None, Field(description="secret that the endpoint wants: env:NAME or file:PATH")
    ] = None
    organization: Annotated[str | None, Field(pattern=_HEADER, description="sent as OpenAI-Organization")] = (
        None
    )
    project: Annotated[str | None, Field(pattern=_HEADER, description="sent as OpenAI-Project")] = None
    extra_body: Annotated[
        dict[str, Any],
        AfterValidator(_ours),
        Field(
            default_factory=dict, description="keys of every request beside ours; null leaves one of ours out"
        ),
    ]
    limit_key: Annotated[
        Literal["max_tokens", "max_completion_tokens"],
        Field(description="what the endpoint calls the limit of a reply"),
    ] = "max_tokens"
    send_reasoning: Annotated[
        bool, Field(description="give the endpoint the reasoning_content of its earlier replies back")
    ] = False
    timeout_seconds: Annotated[PositiveFloat, Field(description="of one request")] = 600.0
    max_retries: Annotated[
        NonNegativeInt, Field(description="further tries of a request that may yet be answered")
    ] = 6
    retry_seconds: Annotated[
        NonNegativeFloat, Field(description="that one request waits between its tries, in all")
    ] = 300.0
    max_concurrent_requests: Annotated[PositiveInt, Field(description="requests at once")] = 32


@hookimpl
def rollhook_engines() -> list[Component]:
    """Supply the engine."""
    return [
        Component(
            "openai",
            OpenAIConfig,
            "rollhook_openai.engine:OpenAIEngine",
            "any OpenAI-compatible endpoint, for evaluation only",
        )
    ]
