"""The tools agent: native function calling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl


class ToolsConfig(Config):
    """Keys of the tools agent."""

    call_timeout: Annotated[
        PositiveFloat, Field(description="seconds of one call, within the budget's command")
    ] = 120.0
    calls: Annotated[
        PositiveInt, Field(description="calls of one reply that are made; further ones get an error")
    ] = 16
    parallel: Annotated[PositiveInt, Field(description="calls of one reply under way at once")] = 8
    output_limit: Annotated[
        PositiveInt, Field(description="characters of a result that are shown; the middle is cut")
    ] = 8000
    show_budget: Annotated[
        bool,
        Field(description="say in a turn's last result what is left of turns, tokens and seconds"),
    ] = False


@hookimpl
def rollhook_agents() -> list[Component]:
    """Supply the agent."""
    return [Component("tools", ToolsConfig, "rollhook_tools.agent:ToolCalling", "native function calling")]
