"""The shell, chat, oracle and nop agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl
from rollhook_agents.config import CommandConfig


class ShellConfig(Config):
    """Keys of the shell agent."""

    command_timeout: Annotated[
        PositiveFloat, Field(description="seconds of one command, within the budget's command")
    ] = 900.0
    output_limit: Annotated[
        PositiveInt, Field(description="characters of a command's output that are shown; the middle is cut")
    ] = 4000
    parse: Annotated[
        Literal["strict", "fenced", "lenient"],
        Field(
            description="what is a command: strict, a reply that is one ```bash block and nothing else;"
            " fenced, the first fenced block of a reply; lenient, that or else the whole reply"
        ),
    ] = "fenced"
    corrections: Annotated[
        NonNegativeInt,
        Field(description="malformed replies of an episode that are answered; the next ends it"),
    ] = 3
    show_budget: Annotated[bool, Field(description="tell what is left of turns, tokens and seconds")] = True
    shell: Annotated[
        tuple[str, ...], Field(min_length=1, description="argv in front of the command's text")
    ] = ("bash", "-c")


class ChatConfig(Config):
    """chat has no keys."""


class OracleConfig(Config):
    """oracle has no keys."""


class NopConfig(Config):
    """nop has no keys."""


@hookimpl
def rollhook_agents() -> list[Component]:
    """Supply the agents."""
    return [
        Component("shell", ShellConfig, "rollhook_agents.shell:Shell", "one shell command per turn"),
        Component("chat", ChatConfig, "rollhook_agents.chat:Chat", "replies, and uses nothing else"),
        Component(
            "command",
            CommandConfig,
            "rollhook_agents.command:Command",
            "any program that speaks to the session",
        ),
        Component("oracle", OracleConfig, "rollhook_agents.plain:Oracle", "applies the reference solution"),
        Component(
            "nop", NopConfig, "rollhook_agents.plain:Nop", "does nothing: what a task scores untouched"
        ),
    ]
