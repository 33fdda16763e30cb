"""Many sandboxes: limits, leaks of descriptors, stalls of the loop, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from doubles.client import Double

from rollhook.errors import SandboxError
from rollhook.rundir import RunDir
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.sandbox_leaks import NoLeakContract
from rollhook.testing.storm import make_pool
from rollhook_daytona.backend import DaytonaSandboxes

Make = Callable[..., DaytonaSandboxes]


class TestNothingLeaks(NoLeakContract):
    @pytest.fixture
    def sandbox_use(
        self, double: Double, make_daytona: Make, monkeypatch: pytest.MonkeyPatch
    ) -> Mapping[str, Any]:
        monkeypatch.setenv("DAYTONA_TEST_KEY", double.key)
        return {
            "use": "daytona",
            "api_url": double.url("daytona") + "/api",
            "api_key": "env:DAYTONA_TEST_KEY",
        }

    @pytest.fixture
    def weather(self, double: Double) -> AbstractContextManager[object]:
        @contextmanager
        def storm() -> Iterator[None]:
            double.options(list_lag=0.1)
            for skip in range(3, 200, 25):
                double.fault(surface="daytona", method="POST", path="/api/sandbox", drop="after", skip=skip)
                double.fault(surface="daytona", method="DELETE", drop="after", skip=skip)
                double.fault(surface="daytona", method="POST", path="/api/sandbox", status=429, skip=skip)
            try:
                yield
            finally:
                double.clear_faults()
                double.options(list_lag=0.0)

        return storm()


async def test_a_limit_of_the_service_is_waited_for_and_never_exceeded(
    double: Double, make_daytona: Make, tmp_path: Path
) -> None:
    backend = make_daytona(quota_wait_seconds=0.05)
    before = double.counts().get("daytona_creates", 0)
    double.options(most_live=6, most_live_status=403, most_live_text="Total CPU limit exceeded")
    attempt = RunDir.create(tmp_path / "runs", "limit", run_id="limit").claim()
    pool = make_pool(backend, attempt, create_concurrency=16, create_retries=400)

    async def episode(number: int) -> None:
        sandbox = await pool.acquire(SandboxSpec(), episode_id=f"e{number}")
        assert (await sandbox.exec(["true"], timeout=60)).ok
        await pool.release(sandbox)

    try:
        await asyncio.gather(*(episode(number) for number in range(24)))
    finally:
        double.options(most_live=None, most_live_status=429)
        await pool.aclose()
        attempt.finish("succeeded")
    assert double.counts()["daytona_creates"] == before + 24
    await backend.aclose()


@pytest.mark.parametrize(
    "rounds", [6, pytest.param(75, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
async def test_descriptors_do_not_pile_up(make_daytona: Make, rounds: int) -> None:
    backend = make_daytona()

    async def cycle() -> None:
        raw = await backend.create(SandboxSpec())
        await Sandbox(raw, capabilities=backend.capabilities).exec(["true"], timeout=60)
        await backend.delete(raw.id)

    await asyncio.gather(*(cycle() for _ in range(4)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(rounds):
        await asyncio.gather(*(cycle() for _ in range(4)))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    await backend.aclose()


async def test_one_client_however_many_ask(make_daytona: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, built = make_daytona(), []
    build = backend._build

    def counted() -> Any:
        built.append(1)
        return build()

    monkeypatch.setattr(backend, "_build", counted)
    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(6)))
    assert built == [1]
    await asyncio.gather(*(backend.delete(each.id) for each in made))
    await backend.aclose()
    with pytest.raises(SandboxError, match="closed"):
        await backend.create(SandboxSpec())


async def test_the_loop_is_not_held(
    make_daytona: Make, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Judged by the processor time of each callback, which no other load on the machine adds to."""
    longest = 0.0
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        nonlocal longest
        begun = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - begun)

    backend = make_daytona()
    await backend.start()
    raw = await backend.create(SandboxSpec())
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    await sandbox.exec(["true"], timeout=60)
    gc.collect()
    gc.freeze()  # what earlier tests left is not ours to go through
    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    data = random.Random(3).randbytes(50 << 20)
    await sandbox.write("large", data)
    assert await sandbox.read("large") == data
    await asyncio.gather(*(sandbox.exec(["head", "-c", "100000", "large"], timeout=60) for _ in range(20)))
    monkeypatch.undo()
    gc.unfreeze()
    record_property("figure", f"longest callback {longest * 1000:.0f} ms of processor time")
    await sandbox.close()
    await backend.aclose()
    assert longest < 0.1


async def test_without_the_sdk_it_says_what_to_install(
    make_daytona: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "daytona", None)
    backend = make_daytona()
    with pytest.raises(SandboxError, match="pip install 'daytona") as raised:
        await backend.start()
    assert raised.value.kind == "user"
    await backend.aclose()


@pytest.mark.skipif(
    not os.environ.get("DAYTONA_API_KEY"), reason="nightly: set DAYTONA_API_KEY for the real service"
)
async def test_the_real_service(tmp_path: Path) -> None:
    """One sandbox of the real service: create, run, move bytes, list, delete."""
    from rollhook.testing.environment import build_context
    from rollhook_daytona import DaytonaConfig

    backend = DaytonaSandboxes(DaytonaConfig(), build_context(tmp_path))
    mark = {"test": uuid.uuid4().hex}
    raw = await backend.create(SandboxSpec(labels=mark))
    try:
        sandbox = Sandbox(raw, capabilities=backend.capabilities)
        result = await sandbox.shell("echo out; echo err >&2; exit 3", timeout=60)
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
        await sandbox.write("file", bytes(range(256)) * 10_000)
        assert await sandbox.read("file") == bytes(range(256)) * 10_000
        assert (await sandbox.quiesce()).killed == ()
    finally:
        await backend.delete(raw.id)
        await backend.aclose()
