"""A stand-in for miles' agentic generation, written from its documented contract; it holds no code of miles.

One session per sample; the agent function gets the session's base URL, and what it returns is merged into the
metadata of the sample that the session server assembles, which it does also when the function raised or
returned nothing. A session without a recorded turn gives an aborted sample.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        ABORTED = "aborted"

    index: int
    group_index: int
    prompt: Any
    metadata: dict[str, Any]
    status: Status = Status.PENDING
    reward: float | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class GenerateFnInput:
    args: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Any


async def generate(input: GenerateFnInput) -> GenerateFnOutput:  # noqa: A002
    module, _, name = input.args.custom_agent_function_path.rpartition(".")
    agent = getattr(importlib.import_module(module), name)
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{input.args.session_server}/sessions") as answer:
            session = (await answer.json())["session_id"]
        base_url, returned = f"{input.args.session_server}/sessions/{session}", None
        asked = {**input.sampling_params}
        asked["max_tokens"] = asked.pop("max_new_tokens")
        try:
            returned = await agent(
                base_url=base_url, prompt=input.sample.prompt, request_kwargs=asked,
                metadata={**input.sample.metadata, "max_seq_len": 4096},
            )  # fmt: skip
        except Exception as error:  # as miles: the samples are collected all the same
            input.args.failures.append(error)
        async with http.get(base_url) as answer:
            turns = (await answer.json())["records"]
        await http.delete(base_url)
    sample = copy.deepcopy(input.sample)
    if not turns:
        sample.status = Sample.Status.ABORTED
        return GenerateFnOutput(sample)
    sample.status, sample.turns = Sample.Status.COMPLETED, turns
    sample.metadata.update(returned or {})
    return GenerateFnOutput(sample)


def _add_arguments(parser: Any) -> None:
    parser.add_argument("--custom-agent-function-path", type=str)
    parser.add_argument("--max-seq-len", type=int)


generate.add_arguments = _add_arguments
