"""What sandboxes cost: local ones beside bare bubblewrap and SWE-ReX, the others beside their bare calls.

One episode is create, one command, a file written and read, quiesce, remove, close; one after the other,
then eight at once. CPU is what this process, the keeper and all their children used. SWE-ReX 1.4.0 runs its
local runtime, which isolates nothing: with one command (its `execute`), and with a bash session.

Budget: create, exec and close take at most twice bare bubblewrap with the same command, or 10 ms more.

With --backend docker, daytona or e2b: create, one command, 1 MiB written and read, close, at rising
concurrency, and some with 100 MiB, beside the Engine API called directly, and beside the vendor's SDK called
bare on the same double of its service. Budget: at most 10 % of the bare call, or 2 ms, more; the loop never
held for 50 ms.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring
import sandbox_load

from rollhook.component import BuildContext
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook_local import LocalSandboxConfig
from rollhook_local.backend import LocalSandboxes

BARE = (
    *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
    *("--tmpfs", "/", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "/bin/sh", "-c"),
)
COMMAND = "echo hello > /tmp/rollhook-benchmark"
PARTS = ("create", "exec", "write", "read", "quiesce", "remove", "close")
BUDGETED = ("create", "exec", "close")
SWEREX = "swe-rex==1.4.0"


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process and its ended children, its living ones included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(tree_cpu(int(child)) for child in children)


def timed(act: Callable[[], object], rounds: int) -> tuple[list[float], float]:
    times = []
    before = os.times()
    for _ in range(rounds):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    after = os.times()
    return times, sum(after[:4]) - sum(before[:4])


async def episode(backend: LocalSandboxes, times: dict[str, list[float]]) -> None:
    clock = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        times[part].append(now - clock)
        clock = now

    raw = await backend.create(SandboxSpec())
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    lap("create")
    await sandbox.exec(["/bin/sh", "-c", COMMAND], timeout=30)
    lap("exec")
    await sandbox.write("file", b"x" * 1000)
    lap("write")
    await sandbox.read("file")
    lap("read")
    await sandbox.quiesce()
    lap("quiesce")
    await sandbox.remove(["/tests", "/logs"])
    lap("remove")
    await sandbox.close()
    lap("close")


async def ours(mode: str, rounds: int, bare: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        context = BuildContext(logging.getLogger("benchmark"), Path(scratch), Path(scratch))
        backend = LocalSandboxes(LocalSandboxConfig.model_validate({"mode": mode}), context)
        await backend.start()
        assert backend.keeper is not None
        times: dict[str, list[float]] = {part: [] for part in PARTS}
        await episode(backend, {part: [] for part in PARTS})
        driver, keeper = time.process_time(), tree_cpu(backend.keeper.pid)
        for _ in range(rounds):
            await episode(backend, times)
        driver, keeper = time.process_time() - driver, tree_cpu(backend.keeper.pid) - keeper
        whole = [sum(parts) for parts in zip(*times.values(), strict=True)]
        budgeted = [sum(parts) for parts in zip(*(times[part] for part in BUDGETED), strict=True)]
        rows = [
            row("create, exec, close", budgeted),
            row("whole episode", whole, (driver + keeper) / rounds),
            *(row(f"  {part}", times[part]) for part in PARTS),
        ]
        measuring.table(f"sandbox.local, {mode}", COLUMNS, rows)
        median = statistics.median(budgeted)
        print(f"create, exec, close: {median / bare:.2f} x bare bubblewrap, {(median - bare) * 1e3:+.1f} ms")
        here, there = driver / rounds * 1e3, keeper / rounds * 1e3
        print(f"CPU of an episode: {here:.1f} ms here, {there:.1f} ms in the keeper")
        started = time.perf_counter()
        gate = asyncio.Semaphore(8)

        async def limited() -> None:
            async with gate:
                await episode(backend, times)

        await asyncio.gather(*(limited() for _ in range(rounds)))
        print(f"eight at once: {rounds / (time.perf_counter() - started):.0f} episodes/s")
        await backend.aclose()


COLUMNS = ["", "median ms", "best ms", "CPU ms"]


def row(name: str, times: list[float], cpu: float | None = None) -> list[object]:
    return [name, statistics.median(times) * 1e3, min(times) * 1e3, "" if cpu is None else cpu * 1e3]


def swerex(rounds: int) -> None:
    """Measure the peer, if it can be had."""
    if (python := measuring.peer(SWEREX)) is None:
        return
    program = Path(__file__).parent / "peers/sandbox_swerex.py"
    found = measuring.measured([python, program, str(rounds), COMMAND])
    rows = [[name, value] for name, value in found.items()]
    measuring.table("SWE-ReX 1.4.0, local runtime (no isolation)", ["", "median ms"], rows)


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=100, help="episodes (default: 100)")
    parser.add_argument(
        "--mode", nargs="+", default=["bubblewrap"], choices=["bubblewrap", "unshare", "process"],
        help="of sandbox.local (default: bubblewrap)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="local", choices=["local", "docker", "daytona", "e2b"], help="(default: local)"
    )
    parser.add_argument(
        "--concurrency", nargs="+", type=int, default=[1, 8, 32, 128], help="(default: 1 8 32 128)"
    )
    parser.add_argument("--large", type=int, default=6, help="episodes with 100 MiB (default: 6)")
    options = parser.parse_args()
    if options.backend != "local":
        if options.quick:
            options.rounds, options.concurrency, options.large = 2, [1], 0
        asyncio.run(sandbox_load.run(options.backend, options))
        return
    rounds = 3 if options.quick else options.rounds
    bare, bare_cpu = timed(lambda: subprocess.run([*BARE, COMMAND], check=True), rounds)
    plain, plain_cpu = timed(lambda: subprocess.run(["/bin/sh", "-c", COMMAND], check=True), rounds)
    rows = [
        row("bare bubblewrap", bare, bare_cpu / rounds),
        row("bare /bin/sh", plain, plain_cpu / rounds),
    ]
    measuring.table("the limits: one command", COLUMNS, rows)
    for mode in options.mode:
        asyncio.run(ours(mode, rounds, statistics.median(bare)))
    if not options.quick:
        swerex(min(rounds, 50))


if __name__ == "__main__":
    main()
