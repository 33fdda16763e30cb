"""Sandboxes in containers of Docker or Podman, through the Engine API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rollhook import Component, Config, Secret, hookimpl
from rollhook.sandbox.prices import Prices

#: what may be added: Docker grants these by default, nothing beyond them is ever granted
Capability = Literal["MKNOD", "NET_RAW", "SETFCAP"]


class DockerSandboxConfig(Config):
    """Keys of `sandbox: {use: docker}`."""

    host: Annotated[
        str | None,
        Field(
            description="the engine: unix:///path of a socket, tcp:// or https:// address; "
            "null: DOCKER_HOST, else the first socket of Docker or Podman that is there"
        ),
    ] = None
    tls_ca: Annotated[
        str | None, Field(description="file of the certificate that the engine's is checked with")
    ] = None
    tls_cert: Annotated[str | None, Field(description="file of this client's certificate")] = None
    tls_key: Annotated[str | None, Field(description="file of the key of tls_cert")] = None
    runtime: Annotated[
        str | None, Field(description="OCI runtime that the engine knows by this name, runsc for one")
    ] = None
    image: Annotated[str, Field(description="image of a sandbox that asks for none")] = (
        "docker.io/library/debian:bookworm-slim"
    )
    pull: Annotated[
        Literal["missing", "never", "always"], Field(description="when an image is fetched from its registry")
    ] = "missing"
    registry_auth: Annotated[
        dict[str, Secret],
        Field(
            default_factory=dict,
            description="registry host -> reference to a secret of the form user:password",
        ),
    ]
    build_seconds: Annotated[
        PositiveFloat, Field(description="limit of fetching or building an image that names none")
    ] = 1800.0
    memory_bytes: Annotated[PositiveInt | None, Field(description="memory of a sandbox; null: no limit")] = (
        None
    )
    cpus: Annotated[PositiveFloat | None, Field(description="processors of a sandbox; null: no limit")] = None
    pids: Annotated[PositiveInt, Field(description="processes and threads of a sandbox")] = 512
    disk_quota: Annotated[
        bool,
        Field(description="the engine's storage has quotas (overlay on xfs with pquota, for one): use them"),
    ] = False
    lifetime_seconds: Annotated[
        PositiveFloat, Field(description="after which a sandbox that asks for no lifetime ends by itself")
    ] = 86400.0
    capabilities: Annotated[
        tuple[Capability, ...], Field(description="Linux capabilities beyond the few that root inside has")
    ] = ()
    prices: Annotated[Prices, Field(description="what a sandbox costs")] = Prices()


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [
        Component(
            name="docker",
            config=DockerSandboxConfig,
            load="rollhook_docker.backend:DockerSandboxes",
            summary="containers of Docker or Podman",
        )
    ]
