"""What a local sandbox costs, beside bare bubblewrap: `python benchmarks/sandbox_local.py [rounds]`.

One episode is create, one command, a file written and read, quiesce, remove, close; one after the other,
then several at once. CPU is what this process, the keeper and all their children used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
        report(f"{mode}: whole episode", whole, driver + keeper, rounds)
        for part in PARTS:
            report(f"  {part}", times[part])
        print(f"  CPU {driver / rounds * 1e3:.1f} ms here, {keeper / rounds * 1e3:.1f} ms in the keeper")
        print(f"  wall {statistics.median(whole) / bare:.2f} of bare bubblewrap with the same command")
        started = time.perf_counter()
        gate = asyncio.Semaphore(8)

        async def limited() -> None:
            async with gate:
                await episode(backend, times)

        await asyncio.gather(*(limited() for _ in range(rounds)))
        print(f"  8 at once: {rounds / (time.perf_counter() - started):.0f} episodes/s")
        await backend.aclose()


def report(name: str, times: list[float], cpu: float | None = None, rounds: int = 1) -> None:
    line = f"{name:28} p50 {statistics.median(times) * 1e3:6.2f} ms  best {min(times) * 1e3:6.2f} ms"
    print(line + (f"  CPU {cpu / rounds * 1e3:6.2f} ms" if cpu is not None else ""))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    bare, cpu = timed(lambda: subprocess.run([*BARE, COMMAND], check=True), rounds)
    report("bare bubblewrap", bare, cpu, rounds)
    plain, cpu = timed(lambda: subprocess.run(["/bin/sh", "-c", COMMAND], check=True), rounds)
    report("bare /bin/sh", plain, cpu, rounds)
    for mode in sys.argv[2:] or ["bubblewrap"]:
        asyncio.run(ours(mode, rounds, statistics.median(bare)))


if __name__ == "__main__":
    main()
