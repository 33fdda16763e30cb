"""`rollhook doctor`: what works on this machine, and the way to get what does not; or how a run stands."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

import rollhook
from rollhook.cli.output import as_json, table
from rollhook.installed import installed

State = Literal["ok", "warn", "fail"]
_GIB = 1024**3
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Ray keeps objects
#: Ray's sockets live below its temporary directory; a Unix socket's path has at most 107 bytes
_RAY_SOCKET_SUFFIX = 60


@dataclass(frozen=True)
class Row:
    """One thing that was looked at; `fix` is the way out when it is not ok."""

    name: str
    state: State
    text: str
    fix: str = ""


def doctor(
    run: Annotated[
        str | None, typer.Argument(help="id or path of a run: say how it stands", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works on this machine, and how to get what does not; exit code 1 if something fails.

    With RUN: say whether it lives, what each of its episodes waits for and which deadline is next; for one
    that died or failed what is left and how to go on, with exit code 1.
    """
    if run is not None:
        from rollhook.cli.doctor_run import doctor_run

        raise typer.Exit(doctor_run(run, json))
    rows = [row for probe in PROBES for row in probe()]
    if json:
        as_json([dataclasses.asdict(row) for row in rows])
    else:
        table([(row.state, row.name, row.text + (f": {row.fix}" if row.fix else "")) for row in rows])
    raise typer.Exit(1 if any(row.state == "fail" for row in rows) else 0)


def python() -> Iterator[Row]:
    """The interpreter and Rollhook itself."""
    text = f"{platform.python_version()} at {sys.executable}, rollhook {rollhook.__version__}"
    if sys.platform != "linux":
        yield Row("python", "fail", f"{text} on {sys.platform}", "local sandboxes and Ray need Linux")
    else:
        yield Row("python", "ok", text)


def plugins() -> Iterator[Row]:
    """Which distributions supply plugins."""
    found = sorted({f"{entry.distribution} {entry.version}" for entry in installed()})
    if found:
        yield Row("plugins", "ok", ", ".join(found))
    else:
        yield Row("plugins", "fail", "none installed", "pip install rollhook-local rollhook-agents ...")


def processors() -> Iterator[Row]:
    """CPUs that this process may use, and the threads that torch would take."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    state: State = "ok" if cpus >= 2 else "warn"
    fix = "" if cpus >= 2 else "trainer and engine will share one CPU"
    yield Row("cpu", state, f"{cpus} of {os.cpu_count()} usable", fix)


def memory() -> Iterator[Row]:
    """Memory that is free now, with the limit of the cgroup where there is one."""
    free = _memory_free()
    if free is None:
        return
    state: State = "ok" if free >= 4 * _GIB else "warn"
    yield Row(
        "memory",
        state,
        f"{free / _GIB:.1f} GiB free",
        "" if state == "ok" else "the quickstart takes up to 4 GiB",
    )


def disk() -> Iterator[Row]:
    """Room where runs, caches and temporary files go."""
    from rollhook.packs import cache_directory

    for name, path in {
        "runs": Path("runs").absolute(),
        "cache": cache_directory(),
        "temporary": Path(tempfile.gettempdir()),
    }.items():
        there = next(each for each in (path, *path.parents) if each.exists())
        free = shutil.disk_usage(there).free
        text = f"{free / _GIB:.1f} GiB free in {there}"
        if not os.access(there, os.W_OK):
            yield Row(
                f"disk {name}", "fail", f"{there} cannot be written", "change to a directory of your own"
            )
        elif free < 2 * _GIB:
            yield Row(f"disk {name}", "warn", text, "make room: a run wants 2 GiB")
        else:
            yield Row(f"disk {name}", "ok", text)


def sandbox() -> Iterator[Row]:
    """The local sandbox: started, described, one made, one command run in it."""
    if not any((entry.kind, entry.name) == ("sandbox", "local") for entry in installed()):
        yield Row("sandbox local", "fail", "not installed", "pip install rollhook-local")
        return
    from rollhook.component import BuildContext
    from rollhook.errors import RollhookError
    from rollhook.plugins import load

    with tempfile.TemporaryDirectory(prefix="rollhook-doctor-") as scratch:
        context = BuildContext(
            logging.getLogger("rollhook.doctor"), scratch=Path(scratch), cache=Path(scratch)
        )
        try:
            backend = load([("sandbox", "local")]).build("sandbox", "local", {}, context)
            described = asyncio.run(_try_sandbox(backend))
        except (RollhookError, OSError) as error:
            yield Row("sandbox local", "fail", " ".join(str(error).split()))
            return
    yield Row(
        "sandbox local", "ok", ", ".join(f"{key} {value}" for key, value in described.items()) or "works"
    )


def ray() -> Iterator[Row]:
    """Ray, on which training runs: installed, and with room for its sockets and its object store."""
    release = _version("ray")
    if release is None:
        yield Row("ray", "warn", "not installed", "training needs it: pip install 'rollhook[ray]'")
        return
    fix = ""
    if len(tempfile.gettempdir()) + _RAY_SOCKET_SUFFIX > 107:
        fix = "its socket paths get too long: set TMPDIR to a shorter directory"
    shared = _SHARED_MEMORY
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    if room < _GIB // 4:
        fix = fix or f"{shared} has {room / _GIB:.2f} GiB free, so objects go to disk: enlarge it"
    yield Row("ray", "warn" if fix else "ok", f"{release}, {room / _GIB:.1f} GiB of shared memory", fix)


def torch() -> Iterator[Row]:
    """Torch and the threads it takes by default; not imported, which takes seconds."""
    release = _version("torch")
    if release is None:
        yield Row(
            "torch",
            "warn",
            "not installed",
            "engine transformers and trainer torch need it: pip install rollhook-torch",
        )
        return
    said = os.environ.get("OMP_NUM_THREADS")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = f"{said} threads (OMP_NUM_THREADS)" if said else f"{cpus} threads by default"
    device = "an NVIDIA driver" if Path("/proc/driver/nvidia/version").exists() else "no GPU"
    yield Row("torch", "ok", f"{release}, {threads}, {device}")


#: what is looked at, in order
PROBES = [python, plugins, processors, memory, disk, sandbox, ray, torch]


async def _try_sandbox(backend: object) -> dict[str, str]:
    """Make a sandbox, run a command in it and delete it; return what the backend says of itself."""
    from rollhook.errors import SandboxError
    from rollhook.sandbox.backend import SandboxBackend, SandboxSpec

    assert isinstance(backend, SandboxBackend)
    try:
        await backend.start()
        made = await backend.create(SandboxSpec(lifetime_seconds=60))
        try:
            process = await made.start(["/bin/sh", "-c", "exit 7"])
            code = await asyncio.wait_for(process.wait(), 30)
            await process.aclose()
        finally:
            await backend.delete(made.id)
        if code != 7:
            raise SandboxError(f"a command that exits with 7 came back with {code}")
        return dict(backend.describe())
    finally:
        await backend.aclose()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _memory_free() -> int | None:
    """Return bytes free for this process: the smaller of the machine's and the cgroup's; None if unknown."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    cgroup = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        numbers = [line for name in (limit, used) for line in _lines(cgroup / name)[:1] if line.isdigit()]
        if len(numbers) == 2:
            found.append(int(numbers[0]) - int(numbers[1]))
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
