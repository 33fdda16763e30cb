"""Each fault by itself, and that a seed brings the same ones again."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.sandbox.deletions import PoolTimes
from rollhook.sandbox.pool import SandboxPool
from rollhook.testing.fakes_sandbox import FakeSandbox, FakeSandboxes
from rollhook.testing.scripted import ListJournal
from rollhook_chaos import ChaosConfig
from rollhook_chaos.backend import ChaosSandboxes
from rollhook_chaos.weather import GARBAGE, ChaosError, CommandFate, CreateFate, Weather

RATES = ("throttled", "lost_replies", "deaths", "cut_streams", "garbage", "full_disks")


class Bench:
    """Chaos over fakes."""

    def __init__(self, **keys: Any) -> None:
        self.provider: dict[str, FakeSandbox] = {}
        self.inner = FakeSandboxes(self.provider)
        config = ChaosConfig.model_validate({"over": "fake", **keys})
        scratch = Path()
        context = BuildContext(
            logging.getLogger("test"), scratch, scratch, build=lambda kind, use: self.inner
        )
        self.backend = ChaosSandboxes(config, context)

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        raw = await self.backend.create(SandboxSpec())
        sandbox = Sandbox(raw, capabilities=self.backend.capabilities, delete=self.backend.delete)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await self.backend.aclose()


def weather(**keys: Any) -> Weather:
    return Weather(ChaosConfig.model_validate({"over": "fake", **keys}))


@given(st.integers(), st.integers(0, 999), st.integers(0, 999))
def test_a_seed_brings_the_same_faults_whatever_was_drawn_before(seed: int, one: int, two: int) -> None:
    rates = dict.fromkeys(RATES, 0.5)
    first, again = weather(seed=seed, **rates), weather(seed=seed, **rates)
    for number in range(5):
        again.create(number)
        again.command(one + 1, number)
    assert first.create(one) == again.create(one)
    assert first.command(one, two) == again.command(one, two)


def test_another_seed_brings_others() -> None:
    fates = [[weather(seed=seed, lost_replies=0.5).create(n).lost for n in range(64)] for seed in (1, 2)]
    assert fates[0] != fates[1]


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_rates_are_kept(rate: float) -> None:
    drawn = weather(**dict.fromkeys(RATES, rate))
    creates = [drawn.create(number) for number in range(2000)]
    commands = [drawn.command(number // 10, number % 10) for number in range(2000)]
    shares = [
        sum(each) / 2000
        for each in (
            [fate.throttled for fate in creates],
            [fate.lost for fate in creates],
            [fate.full_after is not None for fate in creates],
            [fate.death is not None for fate in commands],
            [fate.cut is not None for fate in commands],
            [fate.garbage for fate in commands],
        )
    ]
    assert shares == pytest.approx([rate] * 6, abs=0.0 if rate in (0.0, 1.0) else 0.03)


def test_in_fair_weather_nothing_befalls() -> None:
    assert weather().create(0) == CreateFate()
    assert weather().command(0, 0) == CommandFate()


async def test_a_refused_create_makes_nothing_and_says_when_to_come_again() -> None:
    bench = Bench(throttled=1.0, retry_after=7.0)
    with pytest.raises(ChaosError, match="too many creates") as raised:
        await bench.backend.create(SandboxSpec())
    assert bench.provider == {}
    assert raised.value.retry_after == 7.0
    assert bench.backend.retryable(raised.value)
    assert not bench.backend.ambiguous(raised.value)


async def test_a_lost_reply_leaves_a_sandbox() -> None:
    bench = Bench(lost_replies=1.0)
    with pytest.raises(ChaosError, match="before the reply") as raised:
        await bench.backend.create(SandboxSpec(labels={"a": "b"}))
    assert len(await bench.backend.list({"a": "b"})) == 1
    assert bench.backend.retryable(raised.value)
    assert bench.backend.ambiguous(raised.value)


async def test_a_sandbox_dies_while_a_command_runs() -> None:
    bench = Bench(deaths=1.0)
    async with bench.sandbox() as sandbox:
        with pytest.raises(SandboxDead):
            await sandbox.exec(["sleep", "60"], timeout=30)
        assert not await sandbox.alive()
        assert bench.provider == {}


async def test_a_cut_stream_is_an_error_and_not_a_result() -> None:
    bench = Bench(cut_streams=1.0)
    async with bench.sandbox() as sandbox:
        with pytest.raises(SandboxError, match="the connection was cut") as raised:
            await sandbox.shell("echo x >> ran; head -c 100000 /dev/zero", timeout=30)
        assert raised.value.kind == "retryable"
        assert await sandbox.alive()
        assert (await sandbox.exec(["true"], timeout=30)).ok, "what writes nothing is not cut"
        assert await sandbox.read("ran") == b"x\n", "a command that was cut is not sent again"


async def test_what_was_written_before_the_cut_arrives() -> None:
    bench = Bench(cut_streams=1.0)
    async with bench.sandbox() as sandbox:
        process = await sandbox.spawn(["head", "-c", "100000", "/dev/zero"])
        received = b"".join([chunk async for chunk in process.stdout()])
        with pytest.raises(ChaosError):
            await process.wait()
        await process.aclose()
        assert len(received) == bench.backend._weather.command(0, 0).cut


async def test_output_that_is_no_utf8_arrives_as_it_is() -> None:
    bench = Bench(garbage=1.0)
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec(["echo", "fine"], timeout=30)
        assert result.stdout == GARBAGE + b"fine\n"
        assert result.text.endswith("\nfine\n")
    with pytest.raises(UnicodeDecodeError):
        GARBAGE.decode()


async def test_a_full_disk_takes_no_more_writes() -> None:
    bench = Bench(full_disks=1.0)
    async with bench.sandbox() as sandbox:
        room = bench.backend._weather.create(0).full_after
        assert room is not None
        for number in range(room):
            await sandbox.write(f"f{number}", b"x")
        with pytest.raises(OSError, match="no space left") as raised:
            await sandbox.write("one more", b"x")
        assert raised.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="no space left"):
            await sandbox.write("again", b"x")


async def test_calls_take_longer() -> None:
    bench = Bench(latency=0.02)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(20):
        await bench.backend.list({})
    assert 0.1 < loop.time() - begun < 20


async def test_a_pool_gets_its_sandboxes_all_the_same_and_leaves_none() -> None:
    bench = Bench(seed=3, throttled=0.3, lost_replies=0.3, retry_after=0.001)
    times = PoolTimes(backoff_first=0.01, look_again=0.05)
    pool = SandboxPool(bench.backend, run_id="demo", attempt=1, journal=ListJournal(), times=times)
    boxes = await asyncio.gather(*(pool.acquire(SandboxSpec(), episode_id=f"e{n}") for n in range(12)))
    assert len({box.id for box in boxes}) == 12
    stats = pool.stats()
    assert stats["sandbox/create_retries"] > 0
    assert stats["sandbox/adopted"] > 0
    await pool.aclose()
    assert bench.provider == {}


def test_what_the_other_misses_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    assert list(bench.backend.missing()) == []
    monkeypatch.setattr(bench.inner, "missing", lambda: ["no engine"], raising=False)
    assert bench.backend.missing() == ["no engine"]


def test_it_says_what_is_in_force() -> None:
    described = Bench(seed=7, deaths=0.25).backend.describe()
    assert described == {"over": "fake", "weather": "seed 7, deaths 0.25"}
    assert Bench().backend.describe()["weather"] == "none"


@pytest.mark.parametrize("key", RATES)
def test_a_rate_is_a_share(key: str) -> None:
    for value in (-0.1, 1.1):
        with pytest.raises(ValueError, match=key):
            ChaosConfig.model_validate({"over": "fake", key: value})
