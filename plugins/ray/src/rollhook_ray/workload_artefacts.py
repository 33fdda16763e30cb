"""What the directory of a job shows of its submission, `<shared_root>/jobs/<id>/config/`."""

from __future__ import annotations

import shlex
from pathlib import Path

import orjson

from rollhook.durable import cannot_write, write_atomic
from rollhook.launcher import Plan
from rollhook_ray import jobs
from rollhook_ray.workload import Request
from rollhook_ray.workload_render import Rendered


def artefacts(request: Request, rendered: Rendered, plan: Plan) -> dict[str, bytes]:
    """Return the files of config/: name -> content. A JSON spec is kept byte for byte, a YAML one beside it.

    No secret is in them: a job spec and a base config hold references, and Ray is sent no secret.
    """
    body = plan.requests["submit"]
    files = {
        "job_spec.json": request.text,
        "runtime_env.json": _json(body["runtime_env"]),
        "submit_cmd.txt": (shlex.join(jobs.by_hand(rendered.config.address, body)) + "\n").encode(),
    }
    if not request.name.endswith(".json"):
        files["job_spec.yaml"] = request.text
        files["job_spec.json"] = _json(request.spec.model_dump(mode="json", exclude_unset=True))
    if request.base_text:
        files["base.yaml"] = request.base_text
    return files


def write_artefacts(directory: Path, attempt: int, files: dict[str, bytes]) -> None:
    """Write config/ in the directory of a job, and its logs/ and debug/, which are those of the attempt.

    Raises RunError when the disk is full or not writable.
    """
    try:
        (directory / "config").mkdir(exist_ok=True)
        for name in ("logs", "debug"):
            target = Path("attempts", str(attempt), name)
            (directory / target).mkdir(parents=True, exist_ok=True)
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(target)
    except OSError as error:
        raise cannot_write(directory, error) from error
    for name, content in files.items():
        write_atomic(directory / "config" / name, content)


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
