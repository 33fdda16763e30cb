"""task.toml as Harbor defines it (schema up to 1.4), with its legacy spellings; nothing is ignored."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from rollhook_tbench2 import network, templates
from rollhook_tbench2.legacy import environments, take_legacy
from rollhook_tbench2.network import Mode
from rollhook_tbench2.problems import TaskProblem, impossible, line_of

FILE = "task.toml"

#: what is larger is a mistake, and no clock or counter goes that far
_MOST_SECONDS, _MOST_MIB, _MOST = 1_000_000_000, 1 << 30, 1_000_000
Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=_MOST_SECONDS, allow_inf_nan=False)]
Mebibytes = Annotated[int, Field(gt=0, le=_MOST_MIB)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _is_user(value: str | int) -> str | int:
    """Return a name or number of a user, perhaps with a group."""
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and _USER.fullmatch(value):
        return value
    raise ValueError(f"{value!r} is no user")


User = Annotated[str | int, AfterValidator(_is_user)]

_VERIFIERS = ("/tests", "/solution", "/logs/verifier")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_PORTABLE = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]+')


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _WithEnv(_Table):
    env: dict[str, str] = {}

    @field_validator("env")
    @classmethod
    def _templates(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable")
            if "${" in value and templates.parse(value) is None:
                raise ValueError(
                    f"{name} takes a part of its value from the host; only a whole value can be, "
                    "as ${NAME} or ${NAME:-default}"
                )
        return env


class _WithNetwork(_Table):
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: list[str] | None) -> list[str] | None:
        return None if hosts is None else [network.host_name(host) for host in hosts]

    @model_validator(mode="after")
    def _hosts_need_the_mode(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts has an effect only with network_mode = 'allowlist'")
        return self

    @property
    def policy(self) -> network.Policy | None:
        """The network policy that this table asks for; None: none of its own."""
        if self.network_mode is None:
            return None
        return network.Policy(self.network_mode, tuple(self.allowed_hosts or ()))


class HealthCheck(_Table):
    """When a box is ready: a command that must end with 0, tried as Docker does.

    A failure within `start_period_sec` of the beginning does not count; `retries` in a row that do count
    are a sandbox that will not work.
    """

    command: str
    interval_sec: Wait = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Wait = 0.0
    start_interval_sec: Wait = 5.0
    retries: Annotated[int, Field(gt=0, le=_MOST)] = 3

    @property
    def longest(self) -> float:
        """Seconds after which it has been decided."""
        once = self.start_period_sec + self.timeout_sec + self.start_interval_sec
        return once + self.retries * (self.timeout_sec + self.interval_sec)


class EnvironmentTable(_WithEnv, _WithNetwork):
    """[environment]: the sandbox that the agent works in; None means the backend's default."""

    network_mode: Mode = "public"
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: Annotated[float | None, Field(gt=0, le=_MOST, allow_inf_nan=False)] = None
    memory_mb: Mebibytes | None = None
    storage_mb: Mebibytes | None = None
    workdir: Annotated[str | None, Field(pattern="^/")] = None
    healthcheck: HealthCheck | None = None

    @field_validator("docker_image")
    @classmethod
    def _is_image(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s-]\S*", value):
            raise ValueError(f"{value!r} is no name of an image")
        return value

    @field_validator("os", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class AgentTable(_WithNetwork):
    """[agent]: the agent's clock, user and network; None means the recipe's, the image's, the box's."""

    timeout_sec: Seconds | None = None
    user: User | None = None


class CollectHook(_Table):
    """[[verifier.collect]]: a command that runs after the agent, before artifacts are collected."""

    command: str
    service: Literal["main"] = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class VerifierTable(_WithEnv, _WithNetwork):
    """[verifier]: how tests/test.sh is run, and where."""

    timeout_sec: Seconds = 600.0
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectHook] = []

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' contradicts [verifier.environment]; keep one")
        return self

    @property
    def separate(self) -> bool | None:
        """Whether a box of its own is asked for; None: this table does not say."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


class SolutionTable(_WithEnv):
    """[solution]: how solution/solve.sh is run."""


class Author(_Table):
    """One of [task].authors."""

    name: str
    email: str | None = None


class TaskTable(_Table):
    """[task]: what a task is called; says nothing about how it runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str | None, Field(min_length=1)] = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class Artifact(_Table):
    """A file or directory of the sandbox that is kept, and that a separate verifier gets at the same place.

    `destination` is relative to the episode's artifacts; `exclude` are patterns of names below a directory.
    """

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: Literal["main"] | None = None

    @field_validator("source")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        if not value.strip("/") or ".." in PurePosixPath(value).parts:
            raise ValueError(f"{value!r} is no path of a file or directory without '..'")
        path = PurePosixPath(re.sub("^//+", "/", value))
        if any(path.is_relative_to(place) for place in _VERIFIERS):
            raise ValueError(f"{value!r} is where only the verifier may leave anything")
        return value

    @field_validator("destination")
    @classmethod
    def _relative(cls, value: str | None) -> str | None:
        if not value:
            return None
        parts = PurePosixPath(value).parts
        if "\\" in value or value.startswith("/") or ".." in parts or not parts:
            raise ValueError(f"{value!r} is no relative path with forward slashes and without '..'")
        return _beside_the_list(value)

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        _beside_the_list(str(self.place))
        return self

    @property
    def place(self) -> PurePosixPath:
        """Where it goes below the episode's artifacts."""
        return PurePosixPath(self.destination or self.source.lstrip("/"))


def _beside_the_list(place: str) -> str:
    if PurePosixPath(place).parts[0] == "manifest.json":
        raise ValueError("'manifest.json' is the name of the list of what was collected")
    return place


def _entry(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


#: an entry may be no more than its source
Artifacts = list[Annotated[Artifact, BeforeValidator(_entry)]]


class StepTable(_Table):
    """[[steps]]: one of the stretches of a task, with files below steps/<name>/."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: Finite | dict[str, Finite] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: Artifacts = []

    @field_validator("name")
    @classmethod
    def _portable(cls, name: str) -> str:
        if not _PORTABLE.fullmatch(name) or name.strip(" ") != name or name.endswith("."):
            raise ValueError(f"{name!r} is no portable name of a directory")
        return name


class TaskToml(_Table):
    """A whole task.toml."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    source: str | None = None
    task: TaskTable | None = None
    metadata: dict[str, Any] = {}
    environment: EnvironmentTable = EnvironmentTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    artifacts: Artifacts = []
    steps: list[StepTable] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.multi_step_reward_strategy and not self.steps:
            raise ValueError("multi_step_reward_strategy has an effect only with [[steps]]")
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return self

    @property
    def host_ok(self) -> bool:
        """Whether the task says that it may run on a sandbox without images."""
        return self.metadata.get("host_ok") is True

    @property
    def family(self) -> str:
        """What the task is counted under: metadata.family, else metadata.category."""
        family = self.metadata.get("family", self.metadata.get("category", ""))
        return family if isinstance(family, str) else ""


#: what pydantic adds to the location of a value that may be of several types
_UNIONS = ("str", "int", "float", "dict[str,float]")
#: key of [environment] or [verifier.environment] -> (value that means "not used", what the feature is)
_UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "gpus": (0, "GPUs"),
    "gpu_types": ([], "GPU types"),
    "tpu": (None, "TPUs"),
    "mcp_servers": ([], "MCP servers"),
    "skills_dir": (None, "skills"),
}


def parse_task_toml(text: str) -> tuple[TaskToml | None, list[TaskProblem]]:
    """Return the task's configuration, or everything that is wrong with it."""
    try:
        raw = tomllib.loads(text)
        unusable = list(impossible(raw, []))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        return None, [
            TaskProblem(FILE, "", int(line[1]) if line else text.count("\n") + 1, f"not TOML: {error}")
        ]
    except RecursionError:
        return None, [TaskProblem(FILE, "", 0, "not TOML: it is nested too deep")]
    except ValueError as error:
        return None, [TaskProblem(FILE, "", 0, f"not TOML: {error}")]
    if unusable:
        return None, [TaskProblem(FILE, ".".join(map(str, p)), line_of(text, p), why) for p, why in unusable]
    problems = [
        TaskProblem(FILE, ".".join(map(str, path)), line_of(text, path), reason)
        for path, reason in [*take_legacy(raw), *_take_unsupported(raw)]
    ]
    try:
        config = TaskToml.model_validate(raw)
    except ValidationError as error:
        return None, [*problems, *_distinct(_problem(text, item) for item in error.errors())]
    return (None, problems) if problems else (config, [])


def _take_unsupported(raw: dict[str, Any]) -> list[tuple[Sequence[str | int], str]]:
    """Remove the keys of features that are not supported; return those that are in use."""
    found: list[tuple[Sequence[str | int], str]] = []
    for path, table in environments(raw):
        for key, (unused, feature) in _UNSUPPORTED.items():
            if key in table and (value := table.pop(key)) not in (unused, None):
                found.append(([*path, key], f"{feature} ({key} = {_short(value)}): not supported"))
        if isinstance(value := table.get("os"), str) and value.lower() == "windows":
            del table["os"]
            found.append(([*path, "os"], f"Windows (os = {value!r}): not supported"))
    return found


def _problem(text: str, item: Any) -> TaskProblem:
    location = tuple(part for part in item["loc"] if part not in _UNIONS)
    key = ".".join(str(part) for part in location)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = get_close_matches(str(location[-1]), _keys(location[:-1]), n=1)
        message = "unknown key" + (f", did you mean {near[0]!r}?" if near else "")
    elif item["type"] == "missing":
        message = "missing"
    elif item["type"] == "model_type":
        message = f"must be a table, not {_short(item['input'])}"
    elif not item["type"].startswith("value_error"):
        message = f"{message[0].lower()}{message[1:]}, not {_short(item['input'])}"
    return TaskProblem(FILE, key, line_of(text, location), message)


def _distinct(problems: Iterable[TaskProblem]) -> list[TaskProblem]:
    return list(dict.fromkeys(problems))


def _keys(location: tuple[Any, ...]) -> list[str]:
    model: Any = TaskToml
    for part in location:
        if not isinstance(part, int):
            field = model.model_fields.get(part)
            model = next(_models(field.annotation), None) if field else None
        if model is None:
            return []
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation such as `list[Annotated[Artifact, ...]]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
