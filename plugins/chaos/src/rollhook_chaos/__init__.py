"""A sandbox backend that wraps another and lets things go wrong, by a seed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from rollhook import Component, ComponentRef, Config, hookimpl
from rollhook.recipe.schema import Use

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class ChaosConfig(Config):
    """Keys of `sandbox: {use: chaos, over: local}`; every rate is a share from 0 to 1, 0 by default."""

    over: Annotated[Use, ComponentRef("sandbox"), Field(description="the backend behind, with its keys")]
    seed: Annotated[int, Field(description="what goes wrong, and where: the same for the same calls")] = 0
    latency: Annotated[
        NonNegativeFloat, Field(description="mean seconds that calls take longer: exponential, at most 10x")
    ] = 0.0
    throttled: Annotated[Rate, Field(description="creates that are refused as one too many")] = 0.0
    retry_after: Annotated[
        NonNegativeFloat, Field(description="seconds until the next try that such a refusal asks for")
    ] = 0.1
    lost_replies: Annotated[
        Rate, Field(description="creates that make their sandbox and then fail as if they had not")
    ] = 0.0
    deaths: Annotated[
        Rate, Field(description="commands within 0.2 s of whose start the sandbox is deleted")
    ] = 0.0
    cut_streams: Annotated[
        Rate, Field(description="commands that are cut off after up to 4 KiB of output, exit code unknown")
    ] = 0.0
    garbage: Annotated[
        Rate, Field(description="commands whose output begins with a line that is no UTF-8")
    ] = 0.0
    full_disks: Annotated[
        Rate,
        Field(description="sandboxes whose disk is full after 64 KiB, or after up to 8 writes from outside"),
    ] = 0.0


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [
        Component(
            name="chaos",
            config=ChaosConfig,
            load="rollhook_chaos.backend:ChaosSandboxes",
            summary="another backend in bad weather, by a seed",
        )
    ]
