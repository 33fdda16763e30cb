"""`rollhook drive`: the driver as a job on a node, as `rollhook.job_script` starts it for every launcher.

From the environment it takes ROLLHOOK_JOB_DIR (`<run>/attempts/<n>`, which says that it is a job),
ROLLHOOK_JOB_FILES (what the submitter sent), ROLLHOOK_ATTEMPT, RAY_ADDRESS (GCS `host:port` of the cluster
to join; without it the driver starts a Ray of its own) and ROLLHOOK_WORKER_RESOURCE (a resource of the nodes
that may take actors).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rollhook.durable import cannot_write, write_atomic
from rollhook.errors import RunError, UsageError
from rollhook.packs import SHARED_CACHE
from rollhook.rundir import SUBMITTED, RunDir
from rollhook.secrets import K8S_VARIABLE

if TYPE_CHECKING:
    from rollhook.cluster import Cluster
    from rollhook.recipe.schema import Recipe
    from rollhook.runtime.launch import Stop
    from rollhook.runtime.progress import Display

#: below an attempt's directory: what the submitter sent
FILES = "job"
#: what Python and secrets need on every node, beside the variables that the launcher's keys name
CARRIED = ("PYTHONPATH", "HF_HOME", SHARED_CACHE, K8S_VARIABLE)


def settle(lock: Path, into: Path) -> RunDir:
    """Return the run in directory `into`, made of the job's files where it does not exist yet.

    Raises RunError when a run of this id is there that was begun with another lock.
    """
    into = into.expanduser().absolute()
    try:
        text = lock.read_bytes()
        name = yaml.safe_load(text)["recipe"]["name"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or "it is damaged"
        raise UsageError(f"{lock} cannot be read as a lock: {why}") from None
    there = into / lock.name
    if there.exists():
        known = [there, *into.glob(f"attempts/*/{FILES}/{lock.name}")]
        if all(each.read_bytes() != text for each in known):
            raise RunError(
                f"run {into.name} exists at {into} and was begun with another lock; choose another run id"
            )
    run = RunDir.settle(into, str(name))
    _keep_files(run)
    if not run.lock_path.exists():
        recipe = lock.with_name(run.recipe_path.name)
        write_atomic(run.recipe_path, recipe.read_bytes() if recipe.exists() else text)
        write_atomic(run.lock_path, text)  # last: with it the run can be driven
    return run


def wanted_attempt() -> int | None:
    """Return the attempt as which this job was submitted; None outside a job."""
    text = os.environ.get("ROLLHOOK_ATTEMPT", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _keep_files(run: RunDir) -> None:
    """Copy what the submitter sent into the attempt's directory, where it did not see that directory."""
    source, number = os.environ.get("ROLLHOOK_JOB_FILES"), wanted_attempt()
    if not source or number is None or not os.path.isdir(source):
        return
    attempt = run.path / "attempts" / str(number)
    target = attempt / FILES
    if target.exists():
        return
    try:
        target.mkdir(parents=True)
        for path in sorted(Path(source).iterdir()):  # mounts of Kubernetes have links to directories as well
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, attempt / SUBMITTED if path.name == SUBMITTED else target / path.name)
    except OSError as error:
        raise cannot_write(target, error) from error


def joins() -> bool:
    """Return whether this process is a job on a Ray cluster that is there."""
    return bool(os.environ.get("ROLLHOOK_JOB_DIR") and os.environ.get("RAY_ADDRESS"))


def share_cache(root: Path) -> None:
    """Keep packs, which the driver makes and others read, below the directory of runs, unless told where."""
    os.environ.setdefault(SHARED_CACHE, str(root / ".cache"))


@asynccontextmanager
async def joined_cluster(
    recipe: Recipe, scratch: Path, display: Display
) -> AsyncIterator[tuple[Cluster, Stop]]:
    """Give the Ray cluster that this job runs on, with signals handled; what is placed ends with it."""
    from rollhook.cluster import Cluster
    from rollhook.runtime.launch import Stop

    address, keys = os.environ["RAY_ADDRESS"], recipe.launcher.keys
    stop = Stop(display)
    with stop.watching():
        display.say(f"Joining the Ray cluster at {address} ...")
        names = [*CARRIED, *(keys.get("env") or {})]
        cluster = await Cluster.attach(
            address,
            scratch,
            os.environ.get("ROLLHOOK_WORKER_RESOURCE") or None,
            env={name: os.environ[name] for name in names if os.environ.get(name)},
            secrets=keys.get("secrets") or {},
        )
        stop.handle()  # Ray's native code has put its own handler of SIGTERM there
        try:
            yield cluster, stop
        finally:
            await asyncio.shield(cluster.stop())
