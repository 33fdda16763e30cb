"""`rollhook router` as a program: real policies, real sockets, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from rollhook.cli.main import main
from rollhook.testing.fake_engine import FakeEngine

BODY = {"input_ids": list(range(200)), "sampling_params": {"max_new_tokens": 4}, "rid": "r"}
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextlib.asynccontextmanager
async def router(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run the command until its address is known."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollhook.cli.main", "router", "--port", "0", *options),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", line)
        assert found, line + (await process.stderr.read()).decode()
        yield process, found[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_sessions_keep_their_ranks_and_sigterm_lets_requests_finish() -> None:
    keys = ("--set", "prefix_cache.chunk=16", "--set", "sticky.rebalance=null")  # engines join one by one
    policy = ("--policy", "sticky+prefix_cache", *keys)
    async with FakeEngine(dp_size=2) as one, FakeEngine(dp_size=2) as two, router(*policy) as (process, url):
        async with aiohttp.ClientSession(url) as client:
            for engine in (one, two):
                async with client.post("/workers", json={"url": engine.url}) as response:
                    assert response.status == 202
            async with asyncio.timeout(30):
                while len((await (await client.get("/workers")).json())["workers"]) < 4:
                    await asyncio.sleep(0.01)
            for _ in range(3):
                for key in "abcd":
                    headers = {"X-SMG-Routing-Key": key}
                    async with client.post(
                        "/generate", json={**BODY, "key": key}, headers=headers
                    ) as response:
                        assert response.status == 200
            places = {
                key: {
                    (engine.url, body["data_parallel_rank"])
                    for engine in (one, two)
                    for body in engine.requests
                    if body["key"] == key
                }
                for key in "abcd"
            }
            assert [len(ranks) for ranks in places.values()] == [1, 1, 1, 1]
            one.hold()
            two.hold()
            under_way = asyncio.ensure_future(client.post("/generate", json=BODY))
            async with asyncio.timeout(30):
                while not (one.running or two.running):
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while b"Stopping" not in await process.stderr.readline():
                pass
            await one.release()
            await two.release()
            assert (await under_way).status == 200
        async with asyncio.timeout(30):
            assert await process.wait() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_a_router_that_is_stopped_while_it_starts_leaves_nothing(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollhook.cli.main", "router", "--port", "0"),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    async with asyncio.timeout(60):
        while not any(tmp_path.glob("rollhook-router-*")):
            await asyncio.sleep(0.001)
        process.send_signal(signal_number)
        assert await process.wait() in (0, 3)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "nosuch"), "nosuch"),
        (("--policy", "min_load", "--set", "sticky.ttl=1"), "router.sticky"),
        (("--worker", "http://h:1?x=1"), "--worker"),
        (("--host", "0.0.0.0"), "--token"),
        (("--token", "s3cret-value"), "reference"),
    ],
)
def test_wrong_use_is_said_in_a_line(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["router", "--port", "0", *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert "s3cret-value" not in error


async def test_the_trace_of_the_benchmark_is_what_its_generator_makes(tmp_path: Path) -> None:
    for out in (tmp_path / "made.jsonl", tmp_path / "made.jsonl.gz"):
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, str(BENCHMARKS / "router_trace.py"), "--out", str(out)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert await made.wait() == 0
    committed = gzip.decompress((BENCHMARKS / "router_trace.jsonl.gz").read_bytes())
    assert (tmp_path / "made.jsonl").read_bytes() == committed
    assert gzip.decompress((tmp_path / "made.jsonl.gz").read_bytes()) == committed
