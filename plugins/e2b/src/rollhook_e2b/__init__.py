"""Sandboxes of E2B, and of services that speak its protocol."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook.sandbox.prices import Prices
from rollhook.secrets import Secret


def _base(url: str) -> str:
    """Refuse what is no base URL without a path; the message repeats nothing of it: it may hold a secret."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("holds a user, a password or a query; a key belongs into api_key, as a reference")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no base URL; an example: https://api.e2b.app")
    if parts.path.strip("/"):
        raise ValueError("has a path, which the SDK would lose; give scheme, host and port alone")
    return url.rstrip("/")


def _domain(name: str) -> str:
    if "/" in name or ":" in name or not name.strip("."):
        raise ValueError("is no domain; an example: e2b.app")
    return name


class E2BConfig(Config):
    """Keys of `sandbox: {use: e2b}`."""

    api_key: Annotated[Secret, Field(description="key of the service: env:NAME or file:PATH")] = Secret(
        "env", "E2B_API_KEY"
    )
    domain: Annotated[
        str,
        AfterValidator(_domain),
        Field(
            description="domain of the service: its API is at api.<domain>, a sandbox at <port>-<id>.<domain>"
        ),
    ] = "e2b.app"
    api_url: Annotated[
        Annotated[str, AfterValidator(_base)] | None,
        Field(description="where the API is, for a service of your own; null: by `domain`"),
    ] = None
    sandbox_url: Annotated[
        Annotated[str, AfterValidator(_base)] | None,
        Field(description="where all sandboxes are reached, for a service of your own; null: by `domain`"),
    ] = None
    template: Annotated[
        str, Field(min_length=1, description="template of sandboxes whose task names no image and no size")
    ] = "base"
    template_prefix: Annotated[
        str,
        Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", description="templates are called <prefix>-<hash>"),
    ] = "rollhook"
    build_user: Annotated[
        str, Field(min_length=1, description="user of the first build command of a template")
    ] = "root"
    cpus: Annotated[PositiveInt | None, Field(description="processors; null: the service's default")] = None
    memory_mib: Annotated[
        PositiveInt | None, Field(description="memory in MiB; null: the service's default")
    ] = None
    least_memory_mib: Annotated[
        PositiveInt, Field(description="a task that asks for less memory gets this much, in MiB")
    ] = 512
    lease_seconds: Annotated[
        PositiveInt,
        Field(
            description="the service kills a sandbox for which nobody has asked this long (dead-man's switch)"
        ),
    ] = 900
    build_seconds: Annotated[
        PositiveFloat, Field(description="limit of a template's build, where the task has none")
    ] = 1800.0
    request_seconds: Annotated[PositiveFloat, Field(description="limit of one request to the service")] = 60.0
    transfer_seconds: Annotated[PositiveFloat, Field(description="limit of one file going up or down")] = (
        600.0
    )
    poll_seconds: Annotated[
        PositiveFloat,
        Field(description="an answer about a running command is waited for so long; less than gateways cut"),
    ] = 15.0
    max_concurrent_requests: Annotated[
        PositiveInt,
        Field(description="requests at once, without those that wait for commands"),
    ] = 128
    prices: Annotated[Prices, Field(description="what a sandbox costs")] = Prices()


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [
        Component(
            "e2b",
            E2BConfig,
            "rollhook_e2b.backend:E2BSandboxes",
            "sandboxes of E2B, or of a service that speaks its protocol",
        )
    ]
