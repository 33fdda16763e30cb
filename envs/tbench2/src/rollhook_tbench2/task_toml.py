"""task.toml as Harbor defines it (schema up to 1.4), with its legacy spellings; nothing is ignored."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollhook_tbench2.problems import TaskProblem, line_of

FILE = "task.toml"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _WithEnv(_Table):
    env: dict[str, str] = {}

    @field_validator("env")
    @classmethod
    def _literal(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if "${" in value:
                raise ValueError(f"{name} takes a value from the host ({value}), which is not supported")
        return env


class EnvironmentTable(_WithEnv):
    """[environment]: the sandbox that the agent works in; None means the backend's default."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    memory_mb: Annotated[int | None, Field(gt=0)] = None
    storage_mb: Annotated[int | None, Field(gt=0)] = None
    workdir: Annotated[str | None, Field(pattern="^/")] = None
    network_mode: Literal["public", "no-network"] = "public"


class AgentTable(_Table):
    """[agent]: the agent's clock; None means the recipe's."""

    timeout_sec: Seconds | None = None


class VerifierTable(_WithEnv):
    """[verifier]: how tests/test.sh is run."""

    timeout_sec: Seconds = 600.0
    user: str | int | None = None
    environment_mode: Literal["shared"] = "shared"


class SolutionTable(_WithEnv):
    """[solution]: how solution/solve.sh is run."""


class TaskTable(BaseModel):
    """[task]: what a task is called; says nothing about how it runs."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str | None = None


class TaskToml(_Table):
    """A whole task.toml."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    source: str | None = None
    task: TaskTable = TaskTable()
    metadata: dict[str, Any] = {}
    environment: EnvironmentTable = EnvironmentTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()

    @property
    def host_ok(self) -> bool:
        """Whether the task says that it may run on a sandbox without images."""
        return self.metadata.get("host_ok") is True

    @property
    def family(self) -> str:
        """What the task is counted under: metadata.family, else metadata.category."""
        family = self.metadata.get("family", self.metadata.get("category", ""))
        return family if isinstance(family, str) else ""


#: key path -> (value that means "not used", what the feature is)
_UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "environment.gpus": (0, "GPUs"),
    "environment.gpu_types": ([], "GPU types"),
    "environment.tpu": (None, "TPUs"),
    "environment.mcp_servers": ([], "MCP servers"),
    "environment.skills_dir": (None, "skills"),
    "environment.healthcheck": (None, "health checks"),
    "environment.allowed_hosts": ([], "a network allowlist"),
    "agent.user": (None, "a user of the agent's own"),
    "agent.network_mode": (None, "a network policy of the agent's own"),
    "agent.allowed_hosts": ([], "a network allowlist"),
    "verifier.network_mode": (None, "a network policy of the verifier's own"),
    "verifier.allowed_hosts": ([], "a network allowlist"),
    "verifier.environment": (None, "a verifier environment of its own"),
    "verifier.collect": ([], "collect hooks"),
    "artifacts": ([], "artifacts"),
    "steps": ([], "tasks of several steps"),
    "multi_step_reward_strategy": (None, "tasks of several steps"),
}
_UNSUPPORTED_VALUES: Mapping[tuple[str, Any], str] = {
    ("environment.os", "windows"): "Windows",
    ("environment.network_mode", "allowlist"): "a network allowlist",
    ("verifier.environment_mode", "separate"): "a separate verifier environment",
}


def parse_task_toml(text: str) -> tuple[TaskToml | None, list[TaskProblem]]:
    """Return the task's configuration, or everything that is wrong with it."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        return None, [
            TaskProblem(FILE, "", int(line[1]) if line else text.count("\n") + 1, f"not TOML: {error}")
        ]
    except RecursionError:
        return None, [TaskProblem(FILE, "", 0, "not TOML: it is nested too deep")]
    problems = [
        TaskProblem(FILE, path, line_of(text, path.split(".")), reason)
        for path, reason in [*_take_legacy(raw), *_take_unsupported(raw)]
    ]
    try:
        config = TaskToml.model_validate(raw)
    except ValidationError as error:
        return None, [*problems, *(_problem(text, item) for item in error.errors())]
    return (None, problems) if problems else (config, [])


def _take_legacy(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rewrite legacy spellings in place; yield (key, reason) of conflicts."""
    if "version" in raw:
        yield from _rewrite(raw, "", "version", "schema_version", raw.pop("version"))
    raw.pop("multi_step_reward_mode", None)
    environment = raw.get("environment")
    if not isinstance(environment, dict):
        return
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in environment:
            value = environment.pop(old)
            megabytes = _megabytes(value)
            if megabytes is None:
                yield f"environment.{old}", f"{value!r} is not a size such as '512M' or '2G'"
            else:
                yield from _rewrite(environment, "environment.", old, new, megabytes)
    if "allow_internet" in environment:
        allowed = environment.pop("allow_internet")
        if not isinstance(allowed, bool):
            yield "environment.allow_internet", f"{allowed!r} is neither true nor false"
        else:
            mode = "public" if allowed else "no-network"
            yield from _rewrite(environment, "environment.", "allow_internet", "network_mode", mode)


def _rewrite(table: dict[str, Any], prefix: str, old: str, new: str, value: Any) -> Iterator[tuple[str, str]]:
    if table.setdefault(new, value) != value:
        yield f"{prefix}{old}", f"says {value!r} where {prefix}{new} says {table[new]!r}; keep one"


def _megabytes(size: Any) -> int | None:
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", size.strip(), re.I) if isinstance(size, str) else None
    )
    if match is None:
        return None
    scale = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]
    return max(1, math.ceil(float(match[1]) * scale))


def _take_unsupported(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove the keys of features that are not supported; yield those that are in use."""
    for path, (unused, feature) in _UNSUPPORTED.items():
        *tables, key = path.split(".")
        table: Any = raw
        for name in tables:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict) and key in table:
            value = table.pop(key)
            if value not in (unused, None):
                yield path, f"{feature} ({key} = {_short(value)}): not supported"
    for (path, value), feature in _UNSUPPORTED_VALUES.items():
        table_name, _, key = path.partition(".")
        table = raw.get(table_name)
        if isinstance(table, dict) and table.get(key) == value:
            del table[key]
            yield path, f"{feature} ({key} = {value!r}): not supported"


def _problem(text: str, item: Any) -> TaskProblem:
    location = item["loc"]
    key = ".".join(str(part) for part in location)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = get_close_matches(str(location[-1]), _keys(location[:-1]), n=1)
        message = "unknown key" + (f", did you mean {near[0]!r}?" if near else "")
    elif not item["type"].startswith("value_error"):
        message = f"{message[0].lower()}{message[1:]}, not {_short(item['input'])}"
    return TaskProblem(FILE, key, line_of(text, location), message)


def _keys(location: tuple[Any, ...]) -> list[str]:
    model: Any = TaskToml
    for part in location:
        field = model.model_fields.get(part)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
