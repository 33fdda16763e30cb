"""The task file: one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollhook.environment import Task
from rollhook.errors import UsageError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Call(_Strict):
    """A call of one of the server's tools."""

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Check(_Strict):
    """What earns the reward: the last reply, or what a tool of the server says.

    `equals` compares the whole last reply, space around it and case aside; `matches` is a regular expression
    that is searched in it. `tool` is called when the agent has ended: its result is a number, true or false,
    or an object with `reward`.
    """

    equals: str | None = None
    matches: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one(self) -> Check:
        if sum(each is not None for each in (self.equals, self.matches, self.tool)) != 1:
            raise ValueError("check has one of equals, matches, tool")
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except re.error as error:
                raise ValueError(f"matches is no regular expression: {error}") from None
        return self


class McpTask(_Strict):
    """A task. `setup` is called before the agent works, `solution` and `reply` are the reference solution."""

    id: Annotated[str, Field(min_length=1)]
    prompt: Annotated[str, Field(min_length=1)]
    check: Check
    split: str = "train"
    family: str = ""
    setup: tuple[Call, ...] = ()
    solution: tuple[Call, ...] = ()
    reply: str | None = None
    agent_seconds: Annotated[float | None, Field(gt=0)] = None


def read_tasks(path: Path, conditions: Sequence[str]) -> list[Task]:
    """Return the tasks of a file in its order; a line that makes no sense is a task with a problem.

    `conditions` are what else decides how a task is judged. Raises UsageError for a file that is not there.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"environment.tasks_file: {path} cannot be read: {reason}") from None
    found: dict[str, Task] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, f"{path.name}:{number}", conditions)
        if task.id in found:
            raise UsageError(f"environment.tasks_file: {path}:{number} says {task.id!r} a second time")
        found[task.id] = task
    return list(found.values())


def _task(line: str, where: str, conditions: Sequence[str]) -> Task:
    digest = hashlib.sha256("\n".join([*conditions, line]).encode()).hexdigest()
    try:
        task = McpTask.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return Task(where, digest, "train", problem=f"{where}: {key or 'the task'}: {first['msg']}")
    except (ValueError, RecursionError) as error:
        return Task(where, digest, "train", problem=f"{where} is not JSON: {error}")
    limits = {} if task.agent_seconds is None else {"agent": task.agent_seconds}
    return Task(task.id, digest, task.split, family=task.family, limits=limits, payload=task)
