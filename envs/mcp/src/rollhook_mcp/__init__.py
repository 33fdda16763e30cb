"""MCP servers as environments."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook.secrets import Secret


class McpConfig(Config):
    """Keys of `environment: {use: mcp}`."""

    tasks_file: Annotated[str, Field(description="JSONL file of tasks, one object a line")]
    argv: Annotated[
        tuple[str, ...],
        Field(description="a server on stdio: program and arguments, started here for each episode"),
    ] = ()
    url: Annotated[str | None, Field(pattern=r"^https?://", description="a server over HTTP instead")] = None
    env: Annotated[dict[str, str], Field(description="environment variables of a server on stdio")] = Field(
        default_factory=dict
    )
    secrets: Annotated[
        dict[str, Secret],
        Field(description="such that hold secrets; over HTTP: headers that do. NAME: env:NAME"),
    ] = Field(default_factory=dict)
    workdir: Annotated[
        str | None, Field(description="where a server on stdio starts; default: a fresh directory of its own")
    ] = None
    hidden: Annotated[
        tuple[str, ...],
        Field(description="tools that the agent does not get; nor does it a task's `check.tool`"),
    ] = ()
    start_seconds: Annotated[PositiveFloat, Field(description="seconds in which a server must be ready")] = (
        60.0
    )
    sessions: Annotated[
        bool,
        Field(description="the server keeps state by MCP session; false: it has none, or one of its own"),
    ] = True
    result_bytes: Annotated[
        PositiveInt, Field(description="bytes of a result that are taken; the rest is dropped")
    ] = 1 << 20
    system_prompt: Annotated[str, Field(description="first message; empty: none")] = ""

    @model_validator(mode="after")
    def _one_server(self) -> McpConfig:
        if bool(self.argv) == (self.url is not None):
            raise ValueError("a server is either argv (on stdio) or url (over HTTP)")
        return self


@hookimpl
def rollhook_environments() -> list[Component]:
    """Supply environment.mcp."""
    return [
        Component(
            "mcp", McpConfig, "rollhook_mcp.environment:McpEnvironment", "any MCP server with a task file"
        )
    ]
