"""Job specs of verl workloads: what a user writes down, and the base config of a site.

Two files, YAML or JSON. The job spec says what is trained, the base config where; what both name, the spec
decides.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, NonNegativeFloat, ValidationInfo, field_validator

from rollhook import Config
from rollhook.errors import UsageError
from rollhook.recipe.problem import Problem, RecipeError
from rollhook.recipe.reading import MAX_BYTES, read_text
from rollhook.recipe.validate import validate
from rollhook.rundir import RUN_ID, new_run_id
from rollhook.secrets import Secret
from rollhook_ray import RayLauncherConfig
from rollhook_ray.snapshot import SHARED_ROOT

M = TypeVar("M", bound=BaseModel)
Workload = Literal["ppo", "grpo", "sft"]
Overrides = dict[str, Any] | list[str]

_ROOT = re.compile(r"\$\{(shared_root|SHARED_ROOT)\}")
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL)S?(_|$)", re.IGNORECASE
)


class RayKeys(Config):
    """`ray` of a job spec."""

    address: Annotated[
        str | None, Field(description="the Ray dashboard as the submitting machine reaches it")
    ] = None


class ResourceKeys(Config):
    """`resources` of a job spec: what the driver takes of a node."""

    entrypoint_resources: Annotated[
        dict[str, NonNegativeFloat] | None,
        Field(description="custom resources of the driver, which only worker nodes have"),
    ] = None
    entrypoint_num_cpus: Annotated[NonNegativeFloat | None, Field(description="CPUs of the driver")] = None
    entrypoint_num_gpus: Annotated[NonNegativeFloat | None, Field(description="GPUs of the driver")] = None


class JobSpec(Config):
    """One training job. `${shared_root}` in a value stands for that key's."""

    submission_id: Annotated[
        str | None, Field(description="id of the job, and of its directory; empty: a new one is made")
    ] = None
    workload: Annotated[Workload, Field(description="what verl runs: ppo, grpo or sft")]
    shared_root: Annotated[str, Field(description="directory that all nodes see under this path")] = (
        SHARED_ROOT
    )
    code_path: Annotated[str, Field(description="directory that holds the package verl, as the nodes see it")]
    reward_fn_path: Annotated[
        str | None, Field(description="Python file below shared_root with the reward, or FILE:FUNCTION")
    ] = None
    model: Annotated[str, Field(description="directory of the model, below shared_root")]
    dataset: Annotated[
        str, Field(description="directory with train.parquet, or a .parquet file, below shared_root")
    ]
    ray: RayKeys = RayKeys()
    resources: ResourceKeys = ResourceKeys()
    trainer_overrides: Annotated[
        Overrides,
        Field(
            default_factory=dict,
            description="verl's keys, a mapping or a list of Hydra overrides; a bare name is of trainer",
        ),
    ]
    env_vars: Annotated[
        dict[str, str],
        Field(
            default_factory=dict,
            description="runtime_env.env_vars, of driver, tasks and actors; a secret is a reference",
        ),
    ]

    @field_validator("shared_root", "code_path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if ":" in value:
            raise ValueError(f"{value!r} has a colon, which ends a directory of PYTHONPATH")
        return _absolute(value)

    @field_validator("model", "dataset", "reward_fn_path")
    @classmethod
    def _on_the_shared_root(cls, value: str | None, info: ValidationInfo) -> str | None:
        root = info.data.get("shared_root")
        if value is None or root is None:
            return value
        path = _absolute(value)
        if not path.startswith(root.rstrip("/") + "/"):
            raise ValueError(f"{value!r} is not below shared_root {root}, so not all nodes see it")
        return path

    @field_validator("reward_fn_path")
    @classmethod
    def _has_an_effect(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("workload") == "sft":
            raise ValueError("has no effect: sft knows no reward")
        return value

    @field_validator("submission_id")
    @classmethod
    def _an_id(cls, value: str | None) -> str | None:
        return check_id(value) if value else None

    @field_validator("trainer_overrides")
    @classmethod
    def _overrides(cls, value: Overrides) -> Overrides:
        return _check_overrides(value)

    @field_validator("env_vars")
    @classmethod
    def _no_values_of_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        return _check_env(value)


class BaseConfig(RayLauncherConfig):
    """The site: the keys of `launcher: {use: ray}`, and overrides for all jobs."""

    nodes: Annotated[int, Field(ge=1, description="nodes of a job: trainer.nnodes")] = 2
    gpus_per_node: Annotated[int, Field(ge=0, description="GPUs of each: trainer.n_gpus_per_node")] = 4
    trainer_overrides: Annotated[
        Overrides, Field(default_factory=dict, description="as in a job spec, which has the last word")
    ]

    @field_validator("code", "code_path")
    @classmethod
    def _not_here(cls, value: str | None) -> str | None:
        raise ValueError("belongs to the job spec: code_path")

    @field_validator("trainer_overrides")
    @classmethod
    def _overrides(cls, value: Overrides) -> Overrides:
        return _check_overrides(value)

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if is_secret(name):
                raise ValueError(f"{name} holds a secret in clear; give a reference to it under `secrets`")
        return value


@dataclass(frozen=True)
class Request:
    """A job spec and its base config; `text` and `base_text` are the files byte for byte."""

    spec: JobSpec
    base: BaseConfig
    id: str
    name: str
    text: bytes
    base_text: bytes = b""


def read_request(spec: Path, base: Path | None = None, *, submission_id: str | None = None) -> Request:
    """Read a job spec and its base config; an id is made if neither the caller nor the spec gives one.

    Raises RecipeError with all that is wrong in both files, each with the key's path and line.
    """
    problems: list[Problem] = []
    text, data, lines = _read(spec, problems)
    base_text, base_data, base_lines = _read(base, problems) if base is not None else (b"", {}, {})
    data = _expand(data, str(data.get("shared_root", SHARED_ROOT)))
    job = _validated(JobSpec, data, str(spec), lines, problems) if data else None
    site = _validated(BaseConfig, base_data, str(base), base_lines, problems)
    if problems or job is None or site is None:
        raise RecipeError(problems)
    made = submission_id or job.submission_id
    try:
        job_id = check_id(made) if made else new_run_id(job.workload)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Request(job, site, job_id, spec.name, text, base_text)


def read_base(path: Path) -> BaseConfig:
    """Read a base config. Raises RecipeError with all that is wrong in it."""
    problems: list[Problem] = []
    _, data, lines = _read(path, problems)
    site = _validated(BaseConfig, data, str(path), lines, problems)
    if problems or site is None:
        raise RecipeError(problems)
    return site


def check_id(text: str) -> str:
    """Return an id that is a run id too. Raises ValueError with one that would be."""
    if RUN_ID.fullmatch(text):
        return text
    stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    stem = stem if stem[:1].isalpha() else f"job-{stem}".rstrip("-")
    raise ValueError(
        f"{text!r} is no id of a job: 1 to 40 of a-z, 0-9 and '-', starting with a letter, "
        f"not ending with '-'; try {stem[:40].rstrip('-')!r}"
    )


def _read(path: Path, problems: list[Problem]) -> tuple[bytes, dict[str, Any], Mapping[Any, int]]:
    """Return a file's bytes, its data and the lines of its keys; what is wrong is added to `problems`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            problems.append(Problem("", f"is larger than {MAX_BYTES} bytes", str(path)))
            return b"", {}, {}
        data = path.read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        problems.append(Problem("", "is not UTF-8 text", str(path)))
        return b"", {}, {}
    except OSError as error:
        problems.append(Problem("", f"cannot be read: {error.strerror}", str(path)))
        return b"", {}, {}
    if path.suffix == ".json":
        return data, _read_json(text, path, problems), {}
    document = read_text(text, str(path))
    problems += document.problems
    return data, {} if document.problems else document.data, document.lines


def _read_json(text: str, path: Path, problems: list[Problem]) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in {name for name in names if names.count(name) > 1}:
            problems.append(Problem(name, "is given twice", str(path)))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problems.append(Problem("", f"is not JSON: {error}", str(path)))
        return {}
    if not isinstance(value, dict) or not value:
        problems.append(Problem("", "is not a mapping of keys", str(path)))
        return {}
    return value


def _validated(
    model: type[M],
    data: dict[str, Any],
    name: str,
    lines: Mapping[Any, int],
    problems: list[Problem],
) -> M | None:
    instance, found = validate(model, data)
    for each in found:
        line = lines.get(tuple(each.key.split(".")))
        source = f"{name}:{line}" if line else name
        problems.append(Problem(each.key, each.message, source, each.allowed, each.nearest, each.hint))
    return instance


def _expand(value: Any, root: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(each, root) for key, each in value.items()}
    if isinstance(value, list):
        return [_expand(each, root) for each in value]
    return _ROOT.sub(lambda _: root, value) if isinstance(value, str) else value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/") or "\0" in value or "\n" in value:
        raise ValueError(f"{value!r} is not an absolute path without '..'")
    return os.path.normpath(value)


def _check_overrides(value: Overrides) -> Overrides:
    for each in value if isinstance(value, list) else ():
        if "=" not in each and not each.startswith("~"):
            raise ValueError(f"{each!r} is no Hydra override: write KEY=VALUE")
    return value


def _check_env(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of a variable")
        if is_secret(name) and not _is_reference(value):
            raise ValueError(
                f"{name} holds a secret in clear, and Ray shows env_vars to whoever asks; "
                f"write a reference: env:NAME or file:PATH, as the node finds it"
            )
    return variables


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret; its value is then a reference."""
    return _SECRET_NAME.search(name) is not None


def _is_reference(value: str) -> bool:
    try:
        Secret.parse(value)
    except ValueError:
        return False
    return True
