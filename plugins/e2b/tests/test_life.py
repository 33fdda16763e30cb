"""The deadline, its heartbeat, lists over pages, limits, and what a process may cost."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import SandboxDead, SandboxError
from rollhook.rundir import RunDir
from rollhook.sandbox import SandboxSpec
from rollhook.testing.sandbox_case import eventually
from rollhook.testing.storm import make_pool


async def test_a_sandbox_that_nobody_touches_is_killed_by_the_service(make_e2b: Any) -> None:
    backend = make_e2b(lease_seconds=1)
    left = await backend.create(SandboxSpec(labels={"test": "left"}))
    kept = await backend.create(SandboxSpec(labels={"test": "left"}))
    for _ in range(6):
        await asyncio.sleep(0.4)
        await kept.touch()
    assert [info.id for info in await backend.list({"test": "left"})] == [kept.id]
    assert not await left.alive()
    assert await kept.alive()
    await backend.delete(kept.id)
    await backend.aclose()


async def test_no_touch_goes_beyond_the_lifetime(make_e2b: Any) -> None:
    backend = make_e2b(lease_seconds=2)
    raw = await backend.create(SandboxSpec(lifetime_seconds=1.0))
    started = time.monotonic()

    async def dead() -> bool:
        try:
            await raw.touch()
        except SandboxDead:
            return True
        return not await raw.alive()

    assert await eventually(dead)
    assert time.monotonic() - started < 5
    await backend.aclose()


async def test_a_paused_sandbox_is_dead_but_listed_and_deleted(make_e2b: Any, double: Any) -> None:
    backend = make_e2b()
    raw = await backend.create(SandboxSpec(labels={"test": "paused"}))
    await raw._box.pause()
    assert not await raw.alive()
    with pytest.raises(SandboxDead):
        await raw.read("/etc/passwd", limit=10_000)
    assert [info.id for info in await backend.list({"test": "paused"})] == [raw.id]
    await backend.delete(raw.id)
    await backend.delete(raw.id)
    assert await backend.list({"test": "paused"}) == []
    await backend.aclose()


async def test_lists_are_read_over_all_pages(make_e2b: Any, double: Any) -> None:
    double.options(page=2)
    backend = make_e2b()
    mark = {"odd key": "a/b&c=\u00fc %25", "test": "pages"}
    made = [await backend.create(SandboxSpec(labels=mark)) for _ in range(5)]
    stranger = await backend.create(SandboxSpec(labels={"test": "another"}))
    listed = await backend.list(mark)
    assert {info.id for info in listed} == {raw.id for raw in made}
    assert all(mark.items() <= info.labels.items() for info in listed)
    assert all(abs(time.time() - (info.created_at or 0)) < 60 for info in listed)
    assert len(double.requests("GET", "nextToken")) >= 2
    for raw in [*made, stranger]:
        await backend.delete(raw.id)
    await backend.aclose()


@pytest.mark.parametrize("episodes", [60, pytest.param(200, marks=pytest.mark.nightly)])
async def test_with_a_limit_of_20_all_have_their_turn(
    make_e2b: Any, double: Any, tmp_path: Path, episodes: int
) -> None:
    double.options(most_live=20)
    before = len(double.journal())
    attempt = RunDir.create(tmp_path / "runs", "many", run_id="many").claim()
    backend = make_e2b()
    pool = make_pool(backend, attempt, create_concurrency=24, create_retries=3)

    async def episode(number: int) -> str:
        sandbox = await pool.acquire(SandboxSpec(), episode_id=f"e{number}")
        try:
            return (await sandbox.exec(["echo", str(number)], timeout=60)).text
        finally:
            await pool.release(sandbox)

    said = await asyncio.gather(*(episode(number) for number in range(episodes)))
    assert said == [f"{number}\n" for number in range(episodes)]
    await pool.aclose()
    assert pool.stats()["sandbox/leaked"] == 0
    assert most_at_once(double.journal()[before:]) <= 20
    await backend.aclose()
    attempt.finish("done")


def most_at_once(entries: list[dict[str, Any]]) -> int:
    """Return how many sandboxes were there at once, by the journal of requests."""
    changes = []
    for entry in entries:
        if (entry.get("method"), entry.get("status")) == ("POST", 201) and "/v2/sandboxes" in entry["path"]:
            changes.append((entry["at"] + entry["seconds"], 1))
        elif (entry.get("method"), entry.get("status")) == ("DELETE", 204):
            changes.append((entry["at"], -1))
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    assert most > 1
    return most


async def test_descriptors_stay_flat(make_e2b: Any) -> None:
    backend = make_e2b()

    async def cycle() -> None:
        raw = await backend.create(SandboxSpec())
        process = await raw.start(["true"])
        assert await process.wait() == 0
        await process.aclose()
        await backend.delete(raw.id)

    for _ in range(3):
        await cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        await cycle()
    assert len(os.listdir("/proc/self/fd")) <= before + 5
    await backend.aclose()


async def test_the_loop_is_not_held_by_a_large_build_context_or_file(make_e2b: Any, tmp_path: Any) -> None:
    """The SDK alone blocks it for seconds with a large COPY: here that runs on a thread."""
    (tmp_path / "context").mkdir()
    (tmp_path / "context/large").write_bytes(os.urandom(1 << 20) * 40)
    backend = make_e2b()
    await backend.start()
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - before - 0.005)

    watching = asyncio.create_task(watch())
    spec = SandboxSpec(
        dockerfile="FROM debian:12\nCOPY large /large\n", context_dir=str(tmp_path / "context")
    )
    raw = await backend.create(spec)
    await raw.write("/work/file", (tmp_path / "context/large").read_bytes()[: 10 << 20])
    watching.cancel()
    size = len(await raw.read("/large", limit=50 << 20))
    assert size == 40 << 20
    await backend.delete(raw.id)
    await backend.aclose()
    assert worst < 1.0, f"the loop was held for {worst:.2f} s"


async def test_prices_follow_the_size(make_e2b: Any) -> None:
    backend = make_e2b(prices={"cpu_hour": 0.36, "gib_hour": 0.036}, cpus=2, memory_mib=1024)
    assert backend.price_per_second(SandboxSpec()) == pytest.approx(2 * 0.0001 + 0.00001)
    assert backend.price_per_second(SandboxSpec(cpus=4, memory_bytes=2 << 30)) == pytest.approx(0.00042)
    assert make_e2b().price_per_second(SandboxSpec(cpus=1)) is None
    await backend.aclose()


async def test_what_it_cannot_do_is_refused_before_anything_is_made(make_e2b: Any, double: Any) -> None:
    before = len(double.journal())
    backend = make_e2b()
    with pytest.raises(SandboxError, match="hosts") as raised:
        await backend.create(SandboxSpec(network_allow=("pypi.org",)))
    assert raised.value.kind == "user"
    assert len(double.journal()) == before
    await backend.aclose()
