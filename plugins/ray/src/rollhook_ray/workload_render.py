"""A job spec as a job: verl's command line, the probe that runs before it, and the launcher's keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rollhook.errors import UsageError
from rollhook.launcher import Code, Job, Probe, Resources
from rollhook_ray import RayLauncherConfig
from rollhook_ray.snapshot import read_record
from rollhook_ray.workload import JobSpec, Overrides, Request, is_secret

PACKAGE = "verl"
MODULES = {
    "ppo": "verl.trainer.main_ppo",
    "grpo": "verl.trainer.main_ppo",
    "sft": "verl.trainer.sft_trainer_ray",
}
PRECHECK = "precheck.py"
#: text that Hydra takes for a string as it is, unless it is one of its words
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.@*?+%-]*")
_WORDS = {"null", "true", "false", "inf", "nan"}
#: in verl's SFT trainer: the device is handed to the group of workers
_PLACES_BY_DEVICE = re.compile(r"(?<![\w.])device_name\s*=\s*self\.config\.trainer\.device")


@dataclass(frozen=True)
class Rendered:
    """A job, the keys of its launcher, the trainer's command, and what a reader should know."""

    job: Job
    config: RayLauncherConfig
    command: Sequence[str]
    notes: Sequence[str] = ()


def render(request: Request, *, attempt: int = 1) -> Rendered:
    """Return what is submitted for a job spec. Looks at `code_path`, where that is seen, for verl's version.

    Raises UsageError for overrides that no cluster can have.
    """
    spec, base = request.spec, request.base
    device, notes = _device(spec) if spec.workload == "sft" else ("", [])
    overrides = [*defaults(request, device), *_overrides(base.trainer_overrides)]
    overrides += _overrides(spec.trainer_overrides)
    nodes = _whole(overrides, "trainer.nnodes", 1)
    gpus = _whole(overrides, "trainer.n_gpus_per_node", 0)
    config = _launcher_keys(request, nodes, gpus)
    command = ["python3", "-m", MODULES[spec.workload], *overrides]
    job = Job(
        run_id=request.id,
        attempt=attempt,
        directory=f"{run_directory(spec, request.id)}/attempts/{attempt}",
        script=_script(command),
        env=dict(base.env),
        secrets={name: str(secret) for name, secret in config.secrets.items()},
        files={PRECHECK: _precheck()},
        code=Code("path", spec.code_path),
        resources=Resources(
            nodes=nodes,
            gpus_per_node=gpus,
        ),
        probes=[Probe(PACKAGE, _probe(spec))],
        setup=base.setup,
        stop_grace_seconds=base.stop_grace_seconds,
        artefacts=[f"{run_directory(spec, request.id)}/checkpoints"],
    )
    return Rendered(job, config, command, notes)


def run_directory(spec: JobSpec, job_id: str) -> str:
    """Return the directory of a job, as all nodes see it."""
    return f"{spec.shared_root.rstrip('/')}/jobs/{job_id}"


def defaults(request: Request, device: str = "") -> list[str]:
    """Return the overrides that a workload starts from; those of base config and job spec come after them."""
    spec = request.spec
    train, other = data_files(spec)
    values: dict[str, Any] = {"data.train_files": train}
    if spec.workload == "sft":
        values |= {"model.path": spec.model, "trainer.total_training_steps": 20}
        values |= {"trainer.device": device} if device else {}
    else:
        values |= {
            "data.val_files": other,
            "actor_rollout_ref.model.path": spec.model,
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "algorithm.adv_estimator": "gae" if spec.workload == "ppo" else "grpo",
        }
        if spec.workload == "ppo":
            values["critic.model.path"] = spec.model
        else:
            values["actor_rollout_ref.rollout.n"] = 8  # advantages are taken within a group
        if spec.reward_fn_path is not None:
            file, _, function = spec.reward_fn_path.partition(":")
            values["custom_reward_function.path"] = file
            if function:
                values["custom_reward_function.name"] = function
    values |= {
        "trainer.project_name": f"rollhook-{spec.workload}",
        "trainer.experiment_name": request.id,
        "trainer.logger": ["console"],
        "trainer.nnodes": request.base.nodes,
        "trainer.n_gpus_per_node": request.base.gpus_per_node,
        "trainer.total_epochs": 1,
        "trainer.save_freq": 10,
        "trainer.default_local_dir": f"{run_directory(spec, request.id)}/checkpoints",
    }
    return [f"{key}={_hydra(value)}" for key, value in values.items()]


def data_files(spec: JobSpec) -> tuple[str, str]:
    """Return the files of a data set: the one that is trained on, and the one that is validated with."""
    if spec.dataset.endswith(".parquet"):
        return spec.dataset, spec.dataset
    return f"{spec.dataset}/train.parquet", f"{spec.dataset}/test.parquet"


def _overrides(given: Overrides) -> list[str]:
    """Return what a user wrote as Hydra overrides; a bare name is a key of `trainer`."""
    if isinstance(given, list):
        return [_qualified(*each.partition("=")) for each in given]
    pairs = _flat(given)
    return [_qualified(key, "" if key.startswith("~") else "=", _hydra(value)) for key, value in pairs]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        else:
            yield path, value


def _qualified(key: str, equals: str, value: str) -> str:
    name = key.lstrip("+~")
    prefix = key[: len(key) - len(name)]
    name = name if "." in name or "/" in name or "@" in name else f"trainer.{name}"
    return f"{prefix}{name}{equals}{value if equals else ''}"


def _hydra(value: Any) -> str:
    """Return a value in Hydra's grammar of overrides."""
    if value is None or isinstance(value, int | float):
        return "null" if value is None else repr(value)
    if isinstance(value, list):
        return f"[{','.join(_hydra(each) for each in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(each)}" for key, each in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # a backslash escapes a quote, and itself only in front of one
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def last(overrides: Sequence[str], key: str) -> str | None:
    """Return the value that a key has in the end; None if no override sets it."""
    found = None
    for each in overrides:
        name, equals, value = each.partition("=")
        if name.lstrip("+~") == key:
            found = value if equals else None
    return found


def _whole(overrides: Sequence[str], key: str, least: int) -> int:
    value = last(overrides, key) or ""
    if not value.isdigit() or int(value) < least:
        raise UsageError(f"{key}={value} of the trainer_overrides is not a whole number of at least {least}")
    return int(value)


def _launcher_keys(request: Request, nodes: int, gpus: int) -> RayLauncherConfig:
    spec, base = request.spec, request.base
    keys = {name: getattr(base, name) for name in RayLauncherConfig.model_fields}
    secrets = {name: value for name, value in spec.env_vars.items() if is_secret(name)}
    plain = {name: value for name, value in (base.env_vars | spec.env_vars).items() if not is_secret(name)}
    if path := _python_path(plain.pop("PYTHONPATH", ""), spec.code_path):
        plain["PYTHONPATH"] = path
    given = {
        "address": spec.ray.address,
        "entrypoint_resources": spec.resources.entrypoint_resources,
        "entrypoint_num_cpus": spec.resources.entrypoint_num_cpus,
        "entrypoint_num_gpus": spec.resources.entrypoint_num_gpus,
    }
    keys |= {name: value for name, value in given.items() if value is not None}
    keys |= {"nodes": nodes, "gpus_per_node": gpus, "code": "path", "code_path": spec.code_path}
    keys |= {"env_vars": plain, "secrets": dict(base.secrets) | secrets}
    return RayLauncherConfig.model_validate(keys)


def _python_path(given: str, code_path: str) -> str:
    """Return a user's PYTHONPATH without what the launcher puts first, in the form that Ray expands."""
    parts = [each.replace("$PYTHONPATH", "${PYTHONPATH}") for each in given.split(":")]
    return ":".join(each for each in parts if each not in {"", code_path})


def _script(command: Sequence[str]) -> str:
    words = " \\\n    ".join([shlex.join(command[:3]), *(shlex.quote(each) for each in command[3:])])
    # relative paths, such as Hydra's outputs/, are in the job's directory; a bare ray.init() joins
    return f'cd "$ROLLHOOK_JOB_DIR"\nexport RAY_ADDRESS="${{RAY_ADDRESS:-auto}}"\nexec {words}\n'


def _probe(spec: JobSpec) -> str:
    seen = shlex.join([spec.code_path, PACKAGE, spec.model, spec.dataset])
    return f'exec python3 "$ROLLHOOK_JOB_FILES/{PRECHECK}" {seen}'


def _precheck() -> str:
    return resources.files("rollhook_ray").joinpath("node", PRECHECK).read_text("utf-8")


def _device(spec: JobSpec) -> tuple[str, list[str]]:
    """Return trainer.device for the SFT trainer of the code at hand, empty to leave verl's own, and remarks.

    The driver has no GPU, and counts tokens on trainer.device. verl from January 2026 on (all releases that
    have this trainer) also names by it the resource that workers are placed by, and none is called `cpu`.
    """
    trainer = Path(spec.code_path) / "verl" / "trainer" / "sft_trainer_ray.py"
    try:
        text = trainer.read_text("utf-8")
    except OSError:
        return "cpu", [
            f"{trainer} is not seen from here: trainer.device=cpu fits verl before 0.7.0; "
            f"for 0.7.0 and later set trainer_overrides.device to cuda"
        ]
    version = _verl_version(spec.code_path)
    if not _PLACES_BY_DEVICE.search(text):
        return "cpu", []
    asked = last(_overrides(spec.trainer_overrides), "trainer.device")
    if asked == "cpu":
        raise UsageError(
            f"trainer_overrides.device: verl {version} places its workers by a resource of that name, so "
            f"with 'cpu' the job would wait forever; leave it out"
        )
    return "", [
        f"verl {version} places workers by trainer.device, so it stays at cuda; its driver then counts "
        f"tokens on a GPU that it was not given: if it fails with 'No CUDA GPUs are available', let it see "
        f"one by env: {{CUDA_VISIBLE_DEVICES: '0'}} in the base config"
    ]


def _verl_version(code_path: str) -> str:
    try:
        return (Path(code_path) / "verl" / "version" / "version").read_text("utf-8").strip()
    except OSError:
        return "of an unknown version"


def marker(code_path: str) -> str:
    """Return which snapshot a code path is; empty for a directory that is none."""
    return str(read_record(code_path).get("id", ""))
