"""What would make a job fail, as far as a machine of the cluster can see before it is submitted."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from rollhook.errors import LauncherError
from rollhook.launcher import Plan
from rollhook.secrets import Secret
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.render import BATCH, FOLDER
from rollhook_slurm.slurm import call, count_gpus

#: file systems that no other machine sees
_LOCAL = frozenset({"tmpfs", "ramfs", "overlay", "squashfs"})


async def problems(plan: Plan, config: SlurmLauncherConfig) -> list[str]:
    """Return all problems at once, a sentence each."""
    found = await asyncio.to_thread(_files, plan, config)
    try:
        found += await _partition(plan, config)
    except LauncherError as error:
        return [*found, str(error)]
    if not any("partition" in each for each in found):
        found += await _refusal(plan)
    return found


async def _partition(plan: Plan, config: SlurmLauncherConfig) -> list[str]:
    """Return what is wrong with the partition, or with the number of its nodes that are as wanted."""
    said = await call(["sinfo", "--noheader", "--Node", "--format=%P|%a|%N|%t|%c|%G"])
    if said.code != 0:
        return [f"Slurm cannot be asked (sinfo: {said.err}); is slurmctld up? (scontrol ping)"]
    rows = [line.split("|", 5) for line in said.out.splitlines() if line.count("|") >= 5]
    names = {row[0].rstrip("*") for row in rows}
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
    wanted = (config.partition or default or "").split(",")
    if wanted == [""]:
        return [f"Slurm has no default partition here; set launcher.partition: {', '.join(sorted(names))}"]
    if unknown := [name for name in wanted if name not in names]:
        return [f"launcher.partition: there is no {unknown[0]} here; there are {', '.join(sorted(names))}"]
    mine = [row for row in rows if row[0].rstrip("*") in wanted]
    if all(row[1] != "up" for row in mine):
        return [
            f"the partition {', '.join(wanted)} is {mine[0][1]}; choose another one in launcher.partition"
        ]
    resources = plan.job.resources
    found = []
    usable = {
        row[2]: row
        for row in mine
        if not row[3].startswith(("down", "drain", "drng", "fail", "maint", "boot"))
    }
    if len(usable) < resources.nodes:
        found.append(
            f"the job wants {resources.nodes} nodes (launcher.nodes), and {len(usable)} of the "
            f"{len({row[2] for row in mine})} of partition {', '.join(wanted)} are up"
        )
    if resources.gpus_per_node and config.gpu_request != "none":
        counted = {name: count_gpus(row[5]) for name, row in usable.items()}
        kind = config.gpu_type
        have = {name: each.get(kind, 0) if kind else sum(each.values()) for name, each in counted.items()}
        enough = sum(number >= resources.gpus_per_node for number in have.values())
        if enough < resources.nodes:
            most, of = max(have.values(), default=0), f" of type {kind}" if kind else ""
            found.append(
                f"the job wants {resources.nodes} nodes with {resources.gpus_per_node} GPUs{of} each, and "
                f"{enough} in {', '.join(wanted)} have them (the most: {most}; launcher.gpus_per_node)"
            )
    return found


async def _refusal(plan: Plan) -> list[str]:
    """Return what the scheduler itself says against the script: account, qos, limits; nothing is queued."""
    script = plan.files[f"{FOLDER}/{BATCH}"]
    said = await call(["sbatch", "--test-only"], stdin=script)
    if said.code == 0:
        return []
    lines = [line.partition(": ")[2] or line for line in said.err.splitlines() if line.strip()]
    return [f"sbatch would refuse the job: {'; '.join(lines) or said.code}"]


def _files(plan: Plan, config: SlurmLauncherConfig) -> list[str]:
    """Return what is wrong with the job's directory, the credentials and the user's own settings."""
    found = []
    if plan.job.resources.nodes > 1 and (kind := _file_system(Path(plan.job.directory))) in _LOCAL:
        found.append(
            f"{plan.job.directory} is on {kind}, which no node sees; put storage.root on a shared one"
        )
    names: set[str] | None = set()
    for each in config.credentials:
        names = None if (said := _credentials(Path(each), found)) is None or names is None else names | said
    for name, reference in plan.job.secrets.items():
        secret = Secret.parse(reference)
        if secret.scheme == "env" and names is not None and secret.name not in names:
            found.append(
                f"the secret {name} is {secret}, and no file of launcher.credentials sets {secret.name}"
            )
    for name in sorted(os.environ):
        if name.startswith("SBATCH_"):
            found.append(
                f"{name} is set here and would change what the plan says; unset it, and use launcher's keys"
            )
    secrets = [Secret.parse(each) for each in (*plan.job.secrets.values(), *plan.job.references)]
    for name in config.export:
        if name in {*plan.job.secrets, *(each.name for each in secrets if each.scheme == "env")}:
            found.append(
                f"launcher.export would put the secret {name} into Slurm's record; use launcher.credentials"
            )
    return found


def _credentials(path: Path, found: list[str]) -> set[str] | None:
    """Return the names that a file sets, or None where it is not seen from here; append what is wrong."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        found.append(f"the credentials file {path} cannot be read: {error.strerror}")
        return None
    if mode & 0o077:
        found.append(f"the credentials file {path} may be read by others (mode {mode:o}): chmod 600 {path}")
    names = (line.strip().removeprefix("export ").partition("=")[0].strip() for line in text.splitlines())
    return {name for name in names if name.isidentifier()}


def _file_system(path: Path) -> str:
    """Return the type of the file system that a directory is or will be on; empty where that is not known."""
    path = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        _, where, this, *_ = line.split(" ")
        where = where.replace("\\040", " ")
        if len(where) >= len(best) and path.resolve().is_relative_to(where):
            best, kind = where, this
    return kind
