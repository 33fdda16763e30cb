"""Sandboxes of Daytona."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook.sandbox.prices import Prices
from rollhook.secrets import Secret


def _api_url(url: str) -> str:
    """Refuse what is no address of an API; the message repeats nothing of it: it may hold a secret."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("holds a user, a password or a query; a key belongs into api_key, as a reference")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no address of an API; an example: https://app.daytona.io/api")
    return url.rstrip("/")


class DaytonaConfig(Config):
    """Keys of `sandbox: {use: daytona}`."""

    api_key: Annotated[Secret, Field(description="key of the service: env:NAME or file:PATH")] = Secret(
        "env", "DAYTONA_API_KEY"
    )
    api_url: Annotated[
        str, AfterValidator(_api_url), Field(description="where the API is, its path included")
    ] = "https://app.daytona.io/api"
    target: Annotated[
        str | None,
        Field(min_length=1, description="region in which sandboxes are made; null: the organisation's own"),
    ] = None
    image: Annotated[
        str, Field(min_length=1, description="image of a sandbox whose task names none; not :latest")
    ] = "debian:12"
    os_user: Annotated[
        str,
        Field(
            min_length=1,
            description="user of the service's daemon, which starts commands; other users need root here",
        ),
    ] = "root"
    min_cpus: Annotated[PositiveInt, Field(description="processors that a sandbox gets at least")] = 1
    min_memory_gib: Annotated[PositiveInt, Field(description="memory that it gets at least, in GiB")] = 2
    min_disk_gib: Annotated[PositiveInt, Field(description="disk that it gets at least, in GiB")] = 10
    auto_stop_minutes: Annotated[
        PositiveInt,
        Field(description="the service stops a sandbox that nobody used for so long: a dead driver's ends"),
    ] = 30
    auto_delete_minutes: Annotated[
        NonNegativeInt, Field(description="the service deletes a sandbox so long after it was stopped")
    ] = 120
    create_seconds: Annotated[
        PositiveFloat, Field(description="limit of making a sandbox whose image is there already")
    ] = 300.0
    build_seconds: Annotated[
        PositiveFloat, Field(description="limit of making one, added for its image when it names no limit")
    ] = 1800.0
    request_seconds: Annotated[
        PositiveFloat, Field(description="limit of any other request beyond what it is asked to wait")
    ] = 30.0
    poll_seconds: Annotated[
        PositiveFloat,
        Field(description="how long one request waits for news of a command; less than gateways cut at"),
    ] = 15.0
    quota_wait_seconds: Annotated[
        PositiveFloat, Field(description="pause before another create when a quota is used up")
    ] = 20.0
    context_bytes: Annotated[
        PositiveInt,
        Field(description="what COPY lines may add to a Dockerfile, compressed; it travels inside its text"),
    ] = 1 << 20
    max_requests: Annotated[PositiveInt, Field(description="requests under way at once")] = 512
    prices: Annotated[Prices, Field(description="what a sandbox costs")] = Prices()


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [
        Component(
            name="daytona",
            config=DaytonaConfig,
            load="rollhook_daytona.backend:DaytonaSandboxes",
            summary="cloud sandboxes of Daytona, from any image or Dockerfile",
        )
    ]
