"""Rollhook's sandboxes beside the bare calls, at rising concurrency; batches of both take turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import measuring
from sandbox_bare import FILE, BareDaytona, BareDocker, BareE2B, Calls

from rollhook import plugins
from rollhook.component import BuildContext
from rollhook.runtime.watchdog import Watchdog
from rollhook.sandbox import Sandbox, SandboxBackend, SandboxSpec

MIB = 1 << 20
COMMAND = "echo hello"
Times = dict[str, list[float]]


class Ours:
    """A backend under the core's sandbox, as episodes have it."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend

    async def open(self) -> None:
        await self._backend.start()

    async def create(self) -> Sandbox:
        raw = await self._backend.create(SandboxSpec(lifetime_seconds=3600.0))
        return Sandbox(raw, capabilities=self._backend.capabilities, delete=self._backend.delete)

    async def exec(self, box: Sandbox, command: str) -> bytes:
        result = await box.shell(command, timeout=60)
        assert result.ok
        return result.stdout

    async def write(self, box: Sandbox, data: bytes) -> None:
        await box.write(FILE, data)

    async def read(self, box: Sandbox) -> bytes:
        return await box.read(FILE, limit=200 * MIB)

    async def close(self, box: Sandbox) -> None:
        await box.close()

    async def aclose(self) -> None:
        await self._backend.aclose()


async def episode(calls: Calls, data: bytes, times: Times) -> None:
    """Create, one command, a file in and out, close; seconds of each."""
    clock = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal clock
        times[part].append(time.perf_counter() - clock)
        clock = time.perf_counter()

    size = f"{len(data) // MIB} MiB"
    box = await calls.create()
    try:
        lap("create")
        assert (await calls.exec(box, COMMAND)).strip() == b"hello"
        lap("exec")
        await calls.write(box, data)
        lap(f"write {size}")
        assert len(await calls.read(box)) == len(data)
        lap(f"read {size}")
    finally:
        clock = time.perf_counter()
        await calls.close(box)
    lap("close")


async def rounds(calls: Calls, count: int, concurrency: int, data: bytes, times: Times) -> float:
    """Run episodes, so many at once; returns seconds."""
    gate = asyncio.Semaphore(concurrency)

    async def limited() -> None:
        async with gate:
            await episode(calls, data, times)

    started = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(count)))
    return time.perf_counter() - started


def quantile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def verdict(bare: float, ours: float) -> str:
    """Say whether the overhead keeps its budget: 10 % of the bare call, or 2 ms."""
    return "within" if ours - bare <= max(0.1 * bare, 2.0) else "over"


async def compare(title: str, ours: Calls, bare: Calls, options: Any) -> None:
    """Measure both, and print a table for each concurrency."""
    for calls in (ours, bare):
        await calls.open()
    try:
        for calls in (bare, ours):
            await episode(calls, bytes(MIB), defaultdict(list))
        for concurrency in options.concurrency:
            await _one_table(title, ours, bare, concurrency, max(options.rounds, concurrency), MIB)
        if options.large:
            await _one_table(title, ours, bare, 1, options.large, 100 * MIB)
    finally:
        for calls in (ours, bare):
            await calls.aclose()


async def _one_table(title: str, ours: Calls, bare: Calls, concurrency: int, count: int, size: int) -> None:
    data = os.urandom(MIB) * (size // MIB)
    seen: dict[str, Times] = {"bare": defaultdict(list), "ours": defaultdict(list)}
    seconds, cpu = {"bare": 0.0, "ours": 0.0}, {"bare": 0.0, "ours": 0.0}
    blocked = 0.0
    batches = 4 if count >= 4 * concurrency else 2
    each = max(1, count // batches)
    for batch in range(batches):
        turns = [("bare", bare), ("ours", ours)]
        for name, calls in turns if batch % 2 == 0 else reversed(turns):
            before = time.process_time()
            with Watchdog(limit=0.05, interval=0.01, report=name == "ours") as watchdog:
                seconds[name] += await rounds(calls, each, concurrency, data, seen[name])
            cpu[name] += time.process_time() - before
            if name == "ours":
                blocked = max(blocked, watchdog.longest)
    rows = []
    for part, times in seen["ours"].items():
        other = seen["bare"][part]
        b, o = statistics.median(other) * 1e3, statistics.median(times) * 1e3
        rows.append([part, b, o, o - b, quantile(other, 0.99), quantile(times, 0.99), verdict(b, o)])
    head = ["", "bare p50", "ours p50", "more", "bare p99", "ours p99", "budget"]
    load = os.getloadavg()[0]
    measuring.table(
        f"{title}, {concurrency} at once, {each * batches} episodes (ms; load {load:.0f})", head, rows
    )
    speed = {name: each * batches / passed for name, passed in seconds.items()}
    print(f"episodes per second: bare {speed['bare']:.2f}, ours {speed['ours']:.2f}")
    spent = {name: used / (each * batches) * 1e3 for name, used in cpu.items()}
    print(f"CPU of this process for an episode: bare {spent['bare']:.1f} ms, ours {spent['ours']:.1f} ms")
    print(f"longest that the loop did not answer: {blocked * 1e3:.0f} ms", flush=True)


def build(name: str, keys: dict[str, Any], scratch: Path, key: str = "") -> Any:
    """Build an installed backend."""
    context = BuildContext(logging.getLogger("benchmark"), scratch, scratch / "cache", secret=lambda _: key)
    return plugins.load([("sandbox", name)]).build("sandbox", name, keys, context)


@asynccontextmanager
async def docker(scratch: Path) -> AsyncIterator[tuple[Calls, Calls]]:
    """Both on the engine of DOCKER_HOST, or on a Podman service of our own."""
    from rollhook.testing.podman import container_engine

    with container_engine() as engine:
        backend = build("docker", {"host": engine.host, "image": engine.image}, scratch)
        container = backend._container(engine.image, SandboxSpec(lifetime_seconds=3600.0))
        yield Ours(backend), BareDocker(engine.host, container)


@asynccontextmanager
async def vendor(name: str, scratch: Path) -> AsyncIterator[tuple[Calls, Calls]]:
    """Both on one double of the vendor's service."""
    sys.path.insert(0, str(measuring.ROOT / "tests"))
    from doubles.client import vendors

    os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    with vendors() as double:
        if name == "daytona":
            backend = build(name, {"api_url": double.url("daytona") + "/api"}, scratch, double.key)
            yield Ours(backend), BareDaytona(double.url("daytona"), double.key)
        else:
            urls = {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")}
            yield Ours(build(name, urls, scratch, double.key)), BareE2B(**urls, key=double.key)


async def run(name: str, options: Any) -> None:
    """Measure one backend."""
    titles = {
        "docker": "sandbox.docker beside the Engine API",
        "daytona": "sandbox.daytona beside its SDK, on the double",
        "e2b": "sandbox.e2b beside its SDK, on the double",
    }
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with contextlib.chdir(scratch):
            async with docker(scratch) if name == "docker" else vendor(name, scratch) as (ours, bare):
                await compare(titles[name], ours, bare, options)
