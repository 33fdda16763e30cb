"""The files of a submission: the batch script, and what runs on each node."""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import PurePosixPath

from rollhook.errors import UsageError
from rollhook.job_script import environment_lines
from rollhook.launcher import Job
from rollhook_slurm.config import ContainerKeys, SlurmLauncherConfig

#: below the job's directory
FOLDER = "slurm"
BATCH, NODE, SETTINGS = "batch.sh", "node.sh", "settings.json"
#: the modules that run on the nodes; they import nothing but each other
MODULES = ("machine.py", "supervise.py")
#: below FOLDER, written by the batch script: the directories of the attempts, one a line
ATTEMPTS = "attempts"
#: below FOLDER of each attempt: what its nodes tell each other
UP = "up"
BATCH_LOG = "logs/slurm.log"

#: a search path for this one process, which its children do not inherit
_RUN = """import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("rollhook_slurm.supervise", run_name="__main__")"""


def render_files(job: Job, config: SlurmLauncherConfig) -> dict[str, str]:
    """Return the launcher's own files: path below the job's directory -> text."""
    return {
        f"{FOLDER}/{BATCH}": _batch(job, config),
        f"{FOLDER}/{NODE}": _node(job, config),
        **{f"{FOLDER}/rollhook_slurm/{name}": _text(name) for name in MODULES},
        f"{FOLDER}/rollhook_slurm/__init__.py": "",
        f"{FOLDER}/{SETTINGS}": json.dumps(_settings(job, config), indent=2) + "\n",
    }


def directives(job: Job, config: SlurmLauncherConfig) -> list[str]:
    """Return the arguments of sbatch, as they stand in the script's head."""
    gpus, nodes = job.resources.gpus_per_node, job.resources.nodes
    wanted: list[tuple[str, object]] = [
        ("job-name", job.id),
        ("nodes", f"{nodes}-{nodes}"),
        ("ntasks-per-node", 1),
        ("chdir", "/"),
        ("output", f"{job.directory}/{BATCH_LOG}".replace("%", "%%")),
        ("open-mode", "append"),
        ("export", ",".join(config.export) or "NONE"),
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("constraint", config.constraint),
        ("reservation", config.reservation),
        ("nodelist", config.nodelist),
        ("exclude", config.exclude),
        ("time", config.time),
        ("cpus-per-task", config.cpus_per_node),
        ("mem", config.memory),
    ]
    kind = f"{config.gpu_type}:" if config.gpu_type else ""
    if gpus and config.gpu_request == "gres":
        wanted.append(("gres", f"gpu:{kind}{gpus}"))
    elif gpus and config.gpu_request == "gpus-per-node":
        wanted.append(("gpus-per-node", f"{kind}{gpus}"))
    if config.signal_seconds:
        wanted.append(("signal", f"B:USR1@{config.signal_seconds}"))
    given = [f"--{name}={value}" for name, value in wanted if value is not None]
    given += ["--exclusive"] if config.exclusive else []
    return [*given, "--requeue" if config.requeues else "--no-requeue", *config.extra_args]


def container_arguments(job: Job, keys: ContainerKeys | None) -> tuple[list[str], list[str]]:
    """Return srun's arguments that unpack the container, and those of a step inside, as words of bash."""
    if keys is None:
        return [], []
    q = shlex.quote
    run = str(PurePosixPath(job.directory).parent.parent)
    inside = [
        q(f"--container-mounts={','.join([f'{run}:{run}', *keys.mounts])}"),
        "--container-mount-home" if keys.home else "--no-container-mount-home",
        *(["--container-writable"] if keys.writable else []),
        *([q(f"--container-workdir={keys.workdir}")] if keys.workdir else []),
        *map(q, keys.args),
    ]
    image, name = q(f"--container-image={keys.image}"), '"--container-name=rollhook_$SLURM_JOB_ID"'
    if not keys.pull:
        return [], [image, *inside]
    return [image, name, "--no-container-mount-home"], [name, *inside]


def _batch(job: Job, config: SlurmLauncherConfig) -> str:
    q = shlex.quote
    pull, container = container_arguments(job, config.container)
    remove = "enroot remove --force pyxis_rollhook_$ROLLHOOK_SLURM_JOB >/dev/null 2>&1 || true"
    values = {
        "base": q(job.directory),
        "first_attempt": str(job.attempt),
        "nodes": str(job.resources.nodes),
        "strategy": config.strategy,
        "requeues": str(config.requeues),
        "stopped_code": "" if job.stopped_code is None else str(job.stopped_code),
        "end_seconds": f"{config.end_seconds:.0f}",
        "ray_token": "1" if config.ray_token else "",
        "pull": f"({' '.join(pull)})",
        "container": f"({' '.join(container)})",
        "cleanup": q(remove) if pull else "",
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {_directive(each)}" for each in directives(job, config)),
            f"# Job {job.id}. Written by Rollhook: Ray on all nodes of this job, and its script on one.",
            *(f"{name}={value}" for name, value in values.items()),
            _text("batch.sh"),
        ]
    )


def _directive(argument: str) -> str:
    """Return an argument as sbatch reads it from a script: words are split, quotes and backslashes count."""
    if set(argument) & set("\n\r"):
        raise UsageError(
            f"{argument!r} has a line break, which a batch script cannot hold; rename the directory"
        )
    plain = not set(argument) & set(" \t\"'\\#")
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return argument if plain else f'"{escaped}"'


def _node(job: Job, config: SlurmLauncherConfig) -> str:
    lines = [
        "#!/usr/bin/env bash",
        f"# Each node of {job.id}: its environment, then supervise.py.",
        _text("node.sh"),
    ]
    lines += [f"credentials {shlex.quote(path)}" for path in config.credentials]
    lines += environment_lines(job)
    if setup := job.setup.rstrip():
        lines += ["_rh_doing=launcher.setup; set -e +u", setup, "set +e -u; _rh_doing="]
    lines += [
        '_rh_files=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        '[ "$_rh_role" = status ] || '
        f'exec python3 -c {shlex.quote(_RUN)} "$_rh_files" "$_rh_role" "$_rh_files/{SETTINGS}"',
        'read -r _rh_address < "$_rh_up/address" && exec ray status -v --address "$_rh_address"',
    ]
    return "\n".join(lines) + "\n"


def _settings(job: Job, config: SlurmLauncherConfig) -> dict[str, object]:
    return {
        "nodes": job.resources.nodes,
        "gpus_per_node": job.resources.gpus_per_node,
        **{
            name: getattr(config, name)
            for name in (
                "cpus_per_node",
                "dedicated_head",
                "first_port",
                "head_retries",
                "join_seconds",
                "last_port",
                "network",
                "object_store_bytes",
                "ports_per_node",
                "ray_args",
                "temp_dir",
                "worker_retries",
            )
        },
    }


def _text(name: str) -> str:
    return resources.files("rollhook_slurm").joinpath(name).read_text("utf-8")
