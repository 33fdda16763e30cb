"""The limit on creating, which all processes of a host share."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.errors import SandboxError
from rollhook.recipe.schema import SandboxUse
from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.pool import SandboxPool
from rollhook.sandbox.rate import CreateRate, bucket_path
from rollhook.testing.scripted import FakeTime, ListJournal, ScriptedBackend


async def starts(rate: CreateRate, clock: FakeTime, count: int) -> list[float]:
    """Let so many begin one after the other; return when."""
    begun = []
    for _ in range(count):
        await rate.wait()
        begun.append(clock.now - 1000.0)
    return begun


async def test_a_burst_and_then_an_even_pace(tmp_path: Path) -> None:
    clock = FakeTime()
    rate = CreateRate(tmp_path / "b", 2.0, 3, clock=clock.clock, sleep=clock.sleep)
    assert await starts(rate, clock, 6) == [0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    clock.now += 100.0
    assert await starts(rate, clock, 4) == [101.5, 101.5, 101.5, 102.0]


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0.5, 20.0),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 3.0)), min_size=1, max_size=25),
)
async def test_no_window_holds_more_than_burst_and_rate_allow(
    tmp_path_factory: Any, per_second: float, burst: int, calls: list[tuple[int, float]]
) -> None:
    """Three processes share one file, with clocks that agree."""
    path, clock = tmp_path_factory.mktemp("rate") / "b", FakeTime()
    rates = [CreateRate(path, per_second, burst, clock=clock.clock, sleep=clock.sleep) for _ in range(3)]
    begun = []
    for which, pause in calls:
        clock.now += pause
        await rates[which].wait()
        begun.append(clock.now)
    for first, start in enumerate(begun):
        for last in range(first, len(begun)):
            assert last - first + 1 <= burst + (begun[last] - start) * per_second + 1e-6


#: argv: the bucket's file, how many creates; prints when it asked first, and when each began
CHILD = """
import asyncio, sys, time
from pathlib import Path
from rollhook.sandbox.rate import CreateRate

async def run():
    rate = CreateRate(Path(sys.argv[1]), 20.0, 2)
    print(time.monotonic())
    for _ in range(int(sys.argv[2])):
        await rate.wait()
        print(time.monotonic())

asyncio.run(run())
"""


def test_processes_share_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "b"), "8"]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    times = [float(word) for text in said for word in text.split()]
    assert len(times) == 27
    assert max(times) - min(times) >= (24 - 2) / 20.0


HERE = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@pytest.mark.parametrize(
    "content",
    ["", "torn {", '{"boot": "another", "due": 1e12}', '{"boot": 1}', "[]", "[" * 4000]
    + [json.dumps({"boot": HERE, "due": due}) for due in (1e12, float("inf"), float("nan"), 10**400)],
)
async def test_a_file_of_another_boot_or_a_damaged_one_starts_anew(tmp_path: Path, content: str) -> None:
    clock = FakeTime()
    (tmp_path / "b").write_text(content)
    rate = CreateRate(tmp_path / "b", 1.0, clock=clock.clock, sleep=clock.sleep)
    assert await starts(rate, clock, 2) == [0.0, 1.0]
    assert json.loads((tmp_path / "b").read_text()[:256])["due"] == 1002.0


async def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rate = CreateRate(tmp_path / "file" / "b", 1.0)
    with pytest.raises(SandboxError, match=r"sandbox\.create_rate: .* set XDG_CACHE_HOME") as raised:
        await rate.wait()
    assert raised.value.kind == "user"
    with pytest.raises(SandboxError, match="set XDG_CACHE_HOME"):
        rate.check()


async def test_looking_whether_it_can_be_used_takes_no_turn(tmp_path: Path) -> None:
    clock = FakeTime()
    rate = CreateRate(tmp_path / "b", 1.0, clock=clock.clock, sleep=clock.sleep)
    rate.check()
    assert await starts(rate, clock, 1) == [0.0]
    rate.check()
    assert await starts(rate, clock, 2) == [1.0, 2.0]


async def test_the_loop_goes_on_while_another_process_holds_the_file(tmp_path: Path) -> None:
    import fcntl

    rate = CreateRate(tmp_path / "b", 1000.0, 100)
    await rate.wait()
    with open(tmp_path / "b", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = asyncio.create_task(rate.wait())
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        fcntl.flock(held, fcntl.LOCK_UN)
        await asyncio.wait_for(waiting, 10)


async def test_every_try_of_a_create_takes_a_turn(tmp_path: Path) -> None:
    clock, backend = FakeTime(), ScriptedBackend()
    pool = SandboxPool(
        backend,
        run_id="demo",
        attempt=1,
        journal=ListJournal(),
        rate=CreateRate(tmp_path / "b", 0.1, clock=clock.clock, sleep=clock.sleep),
        create_concurrency=1,
        clock=clock.clock,
        sleep=clock.sleep,
    )
    await asyncio.gather(*(pool.acquire(SandboxSpec(), episode_id=f"e{n}") for n in range(4)))
    assert clock.now == 1030.0
    blocked = asyncio.create_task(pool.acquire(SandboxSpec(), episode_id="late"))
    await asyncio.sleep(0)
    await blocked
    await pool.aclose()
    assert backend.live == {}


def test_buckets_are_kept_apart_by_account(tmp_path: Path) -> None:
    paths = {bucket_path(tmp_path, account) for account in ("daytona", "e2b", "e2b https://here")}
    assert len(paths) == 3
    assert "https" not in str(paths)


def test_a_number_is_a_rate_per_second() -> None:
    use = SandboxUse.model_validate({"use": "local", "create_rate": 2.5})
    assert use.create_rate is not None
    assert (use.create_rate.per_second, use.create_rate.burst) == (2.5, 1)
    assert SandboxUse.model_validate({"use": "local"}).create_rate is None
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.0001"):
        SandboxUse.model_validate({"use": "local", "create_rate": 0})
