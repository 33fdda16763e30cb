"""What is sent to Ray's job API for a job, and the small jobs of our own that look at and end one.

Ray's job supervisor takes its stop signal and its patience from the job's runtime environment
(RAY_JOB_STOP_SIGNAL, RAY_JOB_STOP_WAIT_TIME_S), and expands `${NAME}` there, an unset one to nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollhook.job_script import FILES, KILL_SECONDS, SCRIPT, script_files
from rollhook.launcher import Job
from rollhook.ray_jobs import TELLS_ALL, RayNode
from rollhook.ray_package import EXCLUDE

if TYPE_CHECKING:
    from rollhook_ray import RayLauncherConfig

#: in a plan, what stands for the URI of an upload, whose name is the hash of its content
UPLOADED = "gcs://_ray_pkg_<hash of the upload>.zip"
#: below the uploaded directory: where the job's files are, when they are carried
CARRIED = ".rollhook"
#: of a resource, what our own small jobs take: they fit beside anything
SHARE = 0.001

SEEN, UNSEEN, UNWRITABLE, NO_PYTHON, NO_CODE = 0, 10, 11, 12, 13
_LOOK = """\
cat -- {marker} >/dev/null 2>&1 || exit {unseen}
( umask 077; : > {written} ) 2>/dev/null || exit {unwritable}
rm -f -- {written}
"""
_LOOK_UP = """\
directory={directory}
while [ ! -d "$directory" ]; do directory=$(dirname -- "$directory"); done
[ -w "$directory" ] || exit {unwritable}
"""
_CANCEL = (
    "import ray; ray.init(log_to_driver=False, configure_logging=False); "
    'ray.kill(ray.get_actor("_ray_internal_job_actor_{id}", namespace="SUPERVISOR_ACTOR_RAY_NAMESPACE"))'
)
_KILL = """\
for round in 1 2 3; do
    for each in $(grep -lzxF {mark} /proc/[0-9]*/environ 2>/dev/null); do
        pid=${{each#/proc/}}
        kill -KILL "${{pid%/environ}}" 2>/dev/null
    done
    sleep 0.2
done
exit 0
"""


def driver_resources(config: RayLauncherConfig, job: Job) -> dict[str, float]:
    """Return the custom resources of a job's driver."""
    return dict(job.resources.driver_resources) | dict(config.entrypoint_resources)


def driver_cpus(config: RayLauncherConfig, job: Job) -> float:
    """Return the CPUs of a job's driver."""
    cpus = config.entrypoint_num_cpus
    return job.resources.driver_cpus if cpus is None else cpus


def demand(config: RayLauncherConfig, job: Job) -> dict[str, float]:
    """Return all that the driver takes of its node, by the names that Ray's nodes have it."""
    found = {"CPU": driver_cpus(config, job), "GPU": config.entrypoint_num_gpus}
    return {name: value for name, value in (found | driver_resources(config, job)).items() if value}


def fits(demand: Mapping[str, float], node: RayNode) -> bool:
    """Return whether a node, empty, could run a driver that takes `demand`."""
    return all(node.resources.get(name, 0) >= value for name, value in demand.items())


def may_land_on_head(demand: Mapping[str, float], nodes: Sequence[RayNode]) -> bool:
    """Return whether a driver may be placed on the head node; one that takes nothing always is."""
    return not demand or any(fits(demand, node) for node in nodes if node.head and node.alive)


def files(config: RayLauncherConfig, job: Job) -> dict[str, str]:
    """Return the files of a job, by path below its directory."""
    workers = next(iter(driver_resources(config, job)), None)
    env = {"ROLLHOOK_WORKER_RESOURCE": workers} if workers else {}
    # Ray leaves an empty entry where nothing was set before: that would be the working directory
    setup = 'PYTHONPATH="${PYTHONPATH:-}"; PYTHONPATH="${PYTHONPATH%:}"\n' + job.setup
    changed = setup if "PYTHONPATH" in environment(config, job) else job.setup
    return script_files(replace(job, env=env | dict(job.env), setup=changed))


def environment(config: RayLauncherConfig, job: Job) -> dict[str, str]:
    """Return runtime_env.env_vars: what Ray's processes on all nodes get. No secret is ever there."""
    found = dict(config.env_vars)
    if job.code.source == "path":
        before = found.get("PYTHONPATH", "${PYTHONPATH}")
        found["PYTHONPATH"] = f"{job.code.path}:{before}"
    found["RAY_JOB_STOP_SIGNAL"] = "SIGTERM" if job.stop_signal == "TERM" else "SIGINT"
    # after the grace the script itself ends the job, and keeps the exit code; Ray must not be faster
    found["RAY_JOB_STOP_WAIT_TIME_S"] = str(math.ceil(job.stop_grace_seconds) + KILL_SECONDS + 10)
    return found


def mark(job_directory: str) -> str:
    """Return the variable by which all processes of a job's script are found on its node."""
    return f"ROLLHOOK_JOB_DIR={job_directory}"


def request(config: RayLauncherConfig, job: Job) -> dict[str, Any]:
    """Return the body of Ray's JobSubmitRequest for a job."""
    script = f"{FILES}/{SCRIPT}"
    path = f"{job.directory}/{script}" if config.shared else f"{CARRIED}/{script}"
    runtime: dict[str, Any] = {"env_vars": environment(config, job)}
    if upload(config, job) is not None:
        runtime["working_dir"] = UPLOADED
    found: dict[str, Any] = {
        "submission_id": job.id,
        "entrypoint": shlex.join(["exec", "env", TELLS_ALL, mark(job.directory), "bash", path]),
        "entrypoint_num_cpus": driver_cpus(config, job),
        "entrypoint_resources": driver_resources(config, job),
        "runtime_env": runtime,
        "metadata": {"rollhook_run_id": job.run_id, "rollhook_attempt": str(job.attempt)},
    }
    if config.entrypoint_num_gpus:
        found["entrypoint_num_gpus"] = config.entrypoint_num_gpus
    return found


def upload(config: RayLauncherConfig, job: Job) -> dict[str, Any] | None:
    """Return what of this machine goes along: a directory of code, the job's files, both, or None."""
    code = job.code.path if job.code.source == "upload" else None
    if code is None and config.shared:
        return None
    return {
        "directory": code,
        "exclude": [*EXCLUDE, *config.upload_exclude] if code is not None else [],
        "files": None if config.shared else CARRIED,
    }


def by_hand(address: str, body: Mapping[str, Any]) -> list[str]:
    """Return the command line of Ray's own client that sends the same."""
    command = ["ray", "job", "submit", "--address", address, "--submission-id", body["submission_id"]]
    command += ["--no-wait", "--runtime-env-json", _json(body["runtime_env"])]
    command += ["--entrypoint-num-cpus", f"{body['entrypoint_num_cpus']:g}"]
    if "entrypoint_num_gpus" in body:
        command += ["--entrypoint-num-gpus", f"{body['entrypoint_num_gpus']:g}"]
    if body["entrypoint_resources"]:
        command += ["--entrypoint-resources", _json(body["entrypoint_resources"])]
    if body.get("metadata"):
        command += ["--metadata-json", _json(body["metadata"])]
    return [*command, "--", *shlex.split(body["entrypoint"])]


def looking(job: Job, marker: str | None, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return a job that looks from a node whether it sees a job's directory; its exit code is the answer.

    `marker` is a file that was written from here, None where this machine does not see the directory.
    """
    codes = {"unseen": UNSEEN, "unwritable": UNWRITABLE}
    quoted, written = (shlex.quote(marker), shlex.quote(f"{marker}.node")) if marker else ("", "")
    template = _LOOK if marker else _LOOK_UP
    text = template.format(marker=quoted, written=written, directory=shlex.quote(job.directory), **codes)
    text += f"command -v python3 >/dev/null || exit {NO_PYTHON}\n"
    if job.code.source == "path":
        text += f"[ -d {shlex.quote(job.code.path)} ] || exit {NO_CODE}\n"
    return _small(f"{job.id}-look", text, {name: min(value, SHARE) for name, value in resources.items()})


def cancelling(job_id: str, setup: str) -> dict[str, Any]:
    """Return a job, on the head node, that ends one which has not started yet: Ray's API cannot."""
    text = f"{setup.rstrip()}\nexec python3 -c {shlex.quote(_CANCEL.format(id=job_id))}\n"
    return _small(f"{job_id}-cancel", text, {})


def killing(job_id: str, directory: str, node_ip: str) -> dict[str, Any]:
    """Return a job, on the driver's node, that kills all processes of a job's script."""
    text = _KILL.format(mark=shlex.quote(mark(directory)))
    return _small(f"{job_id}-kill", text, {f"node:{node_ip}": SHARE})


def is_small_job_of(job_id: str, other: str) -> bool:
    """Return whether `other` is the id of one of the small jobs for `job_id`."""
    name, _, _ = other.removeprefix(f"{job_id}-").partition("-")
    return other.startswith(f"{job_id}-") and name in {"look", "cancel", "kill"}


def _small(name: str, text: str, resources: Mapping[str, float]) -> dict[str, Any]:
    return {
        "submission_id": f"{name}-{secrets.token_hex(4)}",
        "entrypoint": f"exec bash -c {shlex.quote(text)}",
        "entrypoint_num_cpus": 0,
        "entrypoint_resources": dict(resources),
    }


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
