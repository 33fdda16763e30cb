"""Slurm's commands: how they are called, and what their words mean."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollhook.errors import LauncherError
from rollhook.launcher import State

SECONDS = 60.0
#: the scheduler's state -> ours; `None`: what the job left in its directory decides
STATES: Mapping[str, State | None] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "STAGE_OUT": "running",
    "SIGNALING": "running",
    "RESIZING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": "stopped",
    "NODE_FAIL": "failed",
    "TIMEOUT": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "PREEMPTED": "failed",
    "REVOKED": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
}
WHY = {
    "NODE_FAIL": "Slurm lost a node of the job",
    "TIMEOUT": "the job ran into its time limit (launcher.time)",
    "OUT_OF_MEMORY": "a process of the job was killed for memory (launcher.memory)",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job could not end before its deadline",
    "PREEMPTED": "the job was preempted",
}
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_GRES = re.compile(r"(?:^|,)gpu(?::([A-Za-z][\w.-]*))?:(\d+)")


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


async def call(argv: Sequence[str], *, stdin: str | None = None, seconds: float = SECONDS) -> Said:
    """Run a command of Slurm with the user's settings of it, but for what would change a submission.

    Variables SBATCH_... go before what a script says, so they are left out, as is the allocation that the
    caller may be in. Raises LauncherError when it is not installed or gives no answer.
    """
    environ = {
        k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(("SBATCH_", "SLURM"))
    }
    environ |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"}
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
        )
    except FileNotFoundError:
        raise LauncherError(
            f"there is no `{argv[0]}` on PATH; submit from a machine that has Slurm's commands",
            kind="user",
        ) from None
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate(None if stdin is None else stdin.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise LauncherError(
            f"`{argv[0]}` gave no answer in {seconds:g} s; is slurmctld up? (scontrol ping)", kind="retryable"
        ) from None
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return Said(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace").strip())


async def show_job(job: str) -> dict[str, str] | None:
    """Return what Slurm knows of a job, in the words of `scontrol show job`; None if it does not know it.

    Slurm forgets an ended job after MinJobAge. Raises LauncherError when it cannot be asked.
    """
    said = await call(["scontrol", "--oneliner", "show", "job", job])
    if said.code == 0 and (fields := parse_record(said.out)):
        return fields
    if said.code == 0 or "Invalid job id" in said.err:
        return None
    raise LauncherError(f"Slurm cannot be asked for job {job}: {said.err or said.out}", kind="retryable")


def parse_record(text: str) -> dict[str, str]:
    """Return the fields of one record of `scontrol --oneliner show`; values may hold spaces, not ` Name=`."""
    line = text.strip().partition("\n")[0]
    found = list(_FIELD.finditer(line))
    ends = [*(each.start() for each in found[1:]), len(line)][: len(found)]
    return {each[1]: line[each.end() : end].strip() for each, end in zip(found, ends, strict=True)}


def state_word(fields: Mapping[str, str]) -> str:
    """Return the job's state without what Slurm adds to it, e.g. `CANCELLED`."""
    return re.split(r"[ +]", fields.get("JobState", ""), maxsplit=1)[0]


def count_gpus(gres: str) -> dict[str, int]:
    """Return type -> GPUs of a node's generic resources as sinfo's %G has them; no type is ``."""
    counted: dict[str, int] = {}
    for kind, number in _GRES.findall(gres):
        counted[kind] = counted.get(kind, 0) + int(number)
    return counted
