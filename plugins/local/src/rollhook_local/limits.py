"""Limits of a sandbox: control groups v2, else v1, else rlimits; what is in force is said."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollhook.errors import SandboxError

_PERIOD = 100_000
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Wanted:
    """What a sandbox may use; None: no limit."""

    memory_bytes: int | None = None
    pids: int | None = None
    cpus: float | None = None
    file_bytes: int | None = None


class Limits(ABC):
    """One way to limit a sandbox."""

    #: capabilities that it gives
    capabilities: frozenset[str] = frozenset()
    #: what `describe` says
    name: str = ""

    def rlimits(self, wanted: Wanted) -> dict[str, list[int]]:
        """Return the resource limits of every process in the sandbox."""
        if wanted.file_bytes is None:
            return {}
        return {"RLIMIT_FSIZE": [wanted.file_bytes, wanted.file_bytes]}

    @abstractmethod
    def make(self, sandbox_id: str, wanted: Wanted) -> tuple[list[Path], list[int]]:
        """Return the groups made for a sandbox, and open files that move into them who writes "0"."""


class NoGroups(Limits):
    """Resource limits only: memory per process, none on the whole, no share of processors."""

    name = "rlimits (memory per process; no limit on processes and processors)"

    def rlimits(self, wanted: Wanted) -> dict[str, list[int]]:
        """Return the resource limits of every process in the sandbox."""
        limits = super().rlimits(wanted)
        if wanted.memory_bytes is not None:
            limits["RLIMIT_DATA"] = [wanted.memory_bytes, wanted.memory_bytes]
        return limits

    def make(self, sandbox_id: str, wanted: Wanted) -> tuple[list[Path], list[int]]:
        """Make nothing."""
        return [], []


class Groups(Limits):
    """Control groups, one below each parent directory."""

    capabilities = frozenset({"memory_limit", "pids_limit", "cpu_limit"})

    def __init__(self, parents: Mapping[str, Path]) -> None:
        self._parents = parents

    @abstractmethod
    def settings(self, wanted: Wanted) -> dict[str, list[tuple[str, str]]]:
        """Return per controller what to write into which file; a controller without any is left out."""

    def make(self, sandbox_id: str, wanted: Wanted) -> tuple[list[Path], list[int]]:
        """Make the groups and set their limits; on an error nothing is left."""
        made: list[Path] = []
        opened: list[int] = []
        try:
            for controller, values in self.settings(wanted).items():
                group = self._parents[controller] / f"rollhook-{sandbox_id}"
                if group not in made:
                    group.mkdir()
                    made.append(group)
                    opened.append(os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                for name, value in values:
                    (group / name).write_text(value)
        except OSError as error:
            for fd in opened:
                os.close(fd)
            remove_groups(made)
            raise SandboxError(f"the limits of a sandbox could not be set: {error}") from error
        return made, opened


class GroupsV1(Groups):
    """The older hierarchy: one directory per controller."""

    name = "cgroup v1"

    def settings(self, wanted: Wanted) -> dict[str, list[tuple[str, str]]]:
        """Return per controller what to write."""
        values: dict[str, list[tuple[str, str]]] = {}
        if wanted.memory_bytes is not None:
            values["memory"] = [("memory.limit_in_bytes", str(wanted.memory_bytes))]
        if wanted.pids is not None:
            values["pids"] = [("pids.max", str(wanted.pids))]
        if wanted.cpus is not None:
            values["cpu"] = [
                ("cpu.cfs_period_us", str(_PERIOD)),
                ("cpu.cfs_quota_us", str(max(1000, int(wanted.cpus * _PERIOD)))),
            ]
        return values


class GroupsV2(Groups):
    """The unified hierarchy."""

    name = "cgroup v2"

    def __init__(self, parents: Mapping[str, Path], controllers: frozenset[str]) -> None:
        super().__init__(parents)
        self._controllers = controllers
        self.capabilities = frozenset(f"{name}_limit" for name in controllers & {"memory", "pids", "cpu"})

    def settings(self, wanted: Wanted) -> dict[str, list[tuple[str, str]]]:
        """Return what to write, all of it in one group."""
        values: list[tuple[str, str]] = []
        if wanted.memory_bytes is not None:
            values += [("memory.max", str(wanted.memory_bytes)), ("memory.swap.max", "0")]
        if wanted.pids is not None:
            values.append(("pids.max", str(wanted.pids)))
        if wanted.cpus is not None and "cpu" in self._controllers:
            values.append(("cpu.max", f"{max(1000, int(wanted.cpus * _PERIOD))} {_PERIOD}"))
        return {"unified": values} if values else {}


def detect(root: Path = CGROUP_ROOT, membership: str | None = None) -> Limits:
    """Return the best way that works for this process. Reads files, makes nothing.

    `membership` is the text of /proc/self/cgroup.
    """
    if membership is None:
        membership = Path("/proc/self/cgroup").read_text()
    rows = [line.split(":", 2) for line in membership.splitlines()]
    places = {name: path for _, names, path in rows for name in names.split(",")}
    if (root / "cgroup.controllers").exists() and "" in places:
        found = _delegated(root / places[""].lstrip("/"), root)
        return GroupsV2({"unified": found[0]}, found[1]) if found else NoGroups()
    parents: dict[str, Path] = {}
    for controller in ("memory", "pids", "cpu"):
        if controller in places:
            base = root / controller
            group = base / places[controller].lstrip("/")
            parents[controller] = group if group.is_dir() else base
    if len(parents) == 3 and all(os.access(path, os.W_OK) for path in parents.values()):
        return GroupsV1(parents)
    return NoGroups()


def _delegated(group: Path, root: Path) -> tuple[Path, frozenset[str]] | None:
    """Return the nearest group upwards below which limited groups may be made, and its controllers."""
    for place in (group, *group.parents):
        try:
            handed_on = frozenset((place / "cgroup.subtree_control").read_text().split())
        except OSError:
            handed_on = frozenset()
        if {"memory", "pids"} <= handed_on and os.access(place, os.W_OK):
            return place, handed_on
        if place == root:
            return None
    return None


def remove_groups(groups: list[Path], seconds: float = 2.0) -> None:
    """Remove groups whose processes are gone; SandboxError when they are not. May block for a moment."""
    deadline = time.monotonic() + seconds
    for group in groups:
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SandboxError(f"{group} could not be removed: {error}") from error
                time.sleep(0.001)
            else:
                break
