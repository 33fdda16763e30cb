"""OpenEnv servers as environments."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook.secrets import Secret


class OpenEnvConfig(Config):
    """Keys of `environment: {use: openenv}`."""

    url: Annotated[str | None, Field(pattern=r"^https?://", description="base URL of a server")] = None
    argv: Annotated[
        tuple[str, ...],
        Field(description="a server to start on this machine instead, one per process; {port} is replaced"),
    ] = ()
    env: Annotated[dict[str, str], Field(description="environment variables of that server")] = Field(
        default_factory=dict
    )
    headers: Annotated[
        dict[str, Secret], Field(description="headers of requests that hold secrets: NAME: env:NAME")
    ] = Field(default_factory=dict)
    tasks_file: Annotated[
        str | None, Field(description="JSONL file of tasks: what reset is given; default: `seeds`")
    ] = None
    seeds: Annotated[PositiveInt, Field(description="tasks without a tasks_file: seeds for reset")] = 1000
    heldout_percent: Annotated[int, Field(ge=0, lt=100, description="share of the seeds held out")] = 10
    act: Annotated[
        Literal["tool", "reply"],
        Field(description="tool: the action is the tool `step`; reply: a reply's text is its `reply_field`"),
    ] = "tool"
    reply_field: Annotated[str, Field(description="field of the action that gets a reply's text")] = "message"
    show: Annotated[
        tuple[str, ...],
        Field(description="fields of an observation that are shown; default: all that are filled"),
    ] = ()
    reward: Annotated[
        Literal["last", "sum", "max"], Field(description="what the rewards of the steps become")
    ] = "last"
    start_seconds: Annotated[
        PositiveFloat, Field(description="seconds until a server is there and takes a session, and for reset")
    ] = 120.0
    step_seconds: Annotated[PositiveFloat, Field(description="seconds of one step")] = 300.0
    message_bytes: Annotated[PositiveInt, Field(description="largest message of the server")] = 16 << 20
    system_prompt: Annotated[str, Field(description="first message; empty: none")] = ""

    @model_validator(mode="after")
    def _one_server(self) -> OpenEnvConfig:
        if bool(self.argv) == (self.url is not None):
            raise ValueError("a server is either argv, to be started, or url")
        if self.argv and not any("{port}" in part for part in self.argv):
            raise ValueError("argv must say {port} where the server takes its port")
        return self


@hookimpl
def rollhook_environments() -> list[Component]:
    """Supply environment.openenv."""
    return [Component("openenv", OpenEnvConfig, "rollhook_openenv.environment:OpenEnv", "any OpenEnv server")]
