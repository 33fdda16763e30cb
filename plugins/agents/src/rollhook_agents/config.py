"""Keys of the command agent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from rollhook.component import Config
from rollhook.secrets import Secret


class CommandConfig(Config):
    """Keys of the command agent."""

    argv: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="the program and its arguments; {task}, {task_file}, {url} (of the session), {model}"
            " and {workdir} in them are replaced",
        ),
    ]
    where: Annotated[
        Literal["sandbox", "host"],
        Field(description="sandbox: in the phase's sandbox; host: on this machine, beside it"),
    ] = "sandbox"
    task: Annotated[
        Literal["argv", "file", "env", "stdin"],
        Field(
            description="how it is told what to do: argv: {task} in argv; file: the file that {task_file} and"
            " ROLLHOOK_TASK_FILE name; env: ROLLHOOK_TASK; stdin"
        ),
    ] = "env"
    env: Annotated[
        dict[str, str], Field(description="environment variables; {url}, {model} and so on are replaced")
    ] = Field(default_factory=dict)
    secrets: Annotated[
        dict[str, Secret],
        Field(
            description="environment variables that hold secrets: NAME: env:NAME; the program sees the values"
        ),
    ] = Field(default_factory=dict)
    workdir: Annotated[
        str | None,
        Field(description="where it starts; default: the sandbox's, or a directory of the episode's own"),
    ] = None
    model: Annotated[str, Field(description="what it is told that the model is called")] = "policy"
    done_codes: Annotated[
        tuple[int, ...],
        Field(description="exit codes with which it is done; any other is an infra_error of the agent"),
    ] = (0,)
    reach: Annotated[
        Literal["auto", "relay", "url"],
        Field(
            description="how it reaches the session from a sandbox: relay: over the streams of a forwarder"
            " in it, which needs python3 and no network; url: at gateway.public_url; auto: url where there is"
            " one, else relay"
        ),
    ] = "auto"
    python: Annotated[
        str, Field(description="the Python (3.8 or later) in the sandbox that runs the forwarder")
    ] = "python3"
    output_limit: Annotated[
        PositiveInt, Field(description="bytes of its stdout and of its stderr that the record keeps")
    ] = 4000

    @model_validator(mode="after")
    def _is_told(self) -> CommandConfig:
        text = " ".join(self.argv)
        if self.task == "argv" and "{task}" not in text:
            raise ValueError("task: argv puts the task where argv says {task}, and it nowhere does")
        if self.task != "argv" and "{task}" in text:
            raise ValueError("argv says {task}, which has a meaning with task: argv only")
        return self
