"""Lost replies, cut gateways, frozen streams, crashes: nothing runs twice, nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import SandboxDead, SandboxError
from rollhook.rundir import RunDir
from rollhook.sandbox import SandboxSpec
from rollhook.sandbox.lease import PREFIX
from rollhook.testing.sandbox_case import eventually
from rollhook.testing.storm import make_pool

START = {"surface": "e2b_envd", "path": "/process.Process/Start"}


async def test_a_create_whose_reply_is_lost_is_answered_with_the_same_sandbox(
    make_e2b: Any, double: Any
) -> None:
    backend = make_e2b()
    await backend.start()
    if not backend._service._idempotent:
        pytest.skip("this release of the SDK has no idempotency key")
    spec = SandboxSpec(labels={PREFIX + "nonce": "0123abcd", "test": "lost-create"})
    double.fault(surface="e2b_api", method="POST", path="/v2/sandboxes", drop="after")
    with pytest.raises(SandboxError) as raised:
        await backend.create(spec)
    assert backend.retryable(raised.value)
    assert backend.ambiguous(raised.value)
    raw = await backend.create(spec)
    assert [info.id for info in await backend.list({"test": "lost-create"})] == [raw.id]
    await backend.delete(raw.id)
    await backend.aclose()


async def test_the_pool_makes_one_sandbox_though_the_reply_is_lost(
    make_e2b: Any, double: Any, tmp_path: Path
) -> None:
    backend = make_e2b()
    attempt = RunDir.create(tmp_path / "runs", "lost", run_id="lost").claim()
    pool = make_pool(backend, attempt)
    double.fault(surface="e2b_api", method="POST", path="/v2/sandboxes", drop="after")
    sandbox = await pool.acquire(SandboxSpec(labels={"test": "lost"}), episode_id="e")
    assert [info.id for info in await backend.list({"test": "lost"})] == [sandbox.id]
    assert (await sandbox.exec(["echo", "here"], timeout=30)).text == "here\n"
    await pool.release(sandbox)
    await pool.aclose()
    assert await backend.list({"test": "lost"}) == []
    await backend.aclose()
    attempt.finish("done")


async def test_one_whose_create_gave_no_answer_is_adopted(make_e2b: Any, double: Any) -> None:
    backend = make_e2b()
    mark = {"test": "adopted"}
    double.fault(surface="e2b_api", method="POST", path="/v2/sandboxes", drop="after")
    with pytest.raises(SandboxError):
        await backend.create(SandboxSpec(labels=mark))
    (info,) = await backend.list(mark)
    raw = await backend.adopt(info.id, SandboxSpec(labels=mark))
    process = await raw.start(["echo", "here"])
    assert b"".join([chunk async for chunk in process.stdout()]) == b"here\n"
    await backend.delete(raw.id)
    with pytest.raises(SandboxDead):
        await backend.adopt(info.id, SandboxSpec(labels=mark))
    await backend.aclose()


@pytest.mark.parametrize(
    "rule", [{"delay_before": 0.4}, {"delay_after": 0.4}, {"delay_after": 0.4, "drop": "after"}], ids=str
)
async def test_a_create_that_is_cancelled_leaves_nothing(
    make_e2b: Any, double: Any, rule: dict[str, Any]
) -> None:
    backend = make_e2b()
    mark = {"test": f"cancelled-{rule}"}
    number = double.fault(surface="e2b_api", method="POST", path="/v2/sandboxes", **rule)
    call = asyncio.create_task(backend.create(SandboxSpec(labels=mark)))
    async with asyncio.timeout(10):
        while not double.hits(number):
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await backend.aclose()
    other = make_e2b()
    assert await eventually(lambda: _none(other, mark))
    await other.aclose()


async def _none(backend: Any, mark: dict[str, str]) -> bool:
    return not await backend.list(mark)


@pytest.mark.parametrize("rule", [{"drop": "after"}, {"cut": 0.1}, {"hint": {"cut": 0.05}}], ids=str)
async def test_a_start_whose_reply_is_lost_runs_once(one_box: Any, double: Any, rule: dict[str, Any]) -> None:
    async with one_box() as (_, box):
        double.fault(**START, **rule)
        result = await box.shell("echo ran >> count; sleep 0.4; echo done; exit 3", timeout=30)
        assert (result.text, result.exit_code) == ("done\n", 3)
        assert await box.read("count") == b"ran\n"


async def test_a_gateway_that_cuts_every_2_s_loses_nothing(one_box: Any, double: Any) -> None:
    """A command of several seconds through a gateway that cuts what is quiet for longer than 2 s."""
    async with one_box({"poll_seconds": 1.0}) as (_, box):
        double.fault(**START, times=None, cut=2.0)
        text = "for i in 1 2 3 4 5; do echo $i | tee -a count; sleep 1; done; echo err >&2"
        result = await box.shell(text, timeout=60)
        assert (result.text, result.error_text, result.exit_code) == ("1\n2\n3\n4\n5\n", "err\n", 0)
        assert await box.read("count") == b"1\n2\n3\n4\n5\n"


async def test_polls_longer_than_the_gateway_allows_lose_nothing_either(one_box: Any, double: Any) -> None:
    async with one_box({"poll_seconds": 15.0}) as (_, box):
        double.fault(**START, times=None, hint={"cut": 0.7})
        result = await box.shell("echo ran >> count; sleep 2; echo end", timeout=60)
        assert (result.text, result.exit_code) == ("end\n", 0)
        assert await box.read("count") == b"ran\n"


async def test_a_frozen_stream_does_not_hang(one_box: Any, double: Any) -> None:
    """On Python 3.11 the SDK itself would wait for ever (its limit ends with the first event)."""
    async with one_box({"request_seconds": 1.0, "poll_seconds": 0.5}) as (_, box):
        box._raw.commands.times = _times(box._raw, grace=0.5)
        double.fault(**START, skip=1, hint={"freeze": 0})
        started = time.monotonic()
        result = await box.shell("echo ran >> count; sleep 1; echo end", timeout=60)
        assert result.text == "end\n"
        assert time.monotonic() - started < 30
        assert await box.read("count") == b"ran\n"


async def test_a_server_that_ignores_the_time_limit_does_not_hold_a_command(
    one_box: Any, double: Any
) -> None:
    async with one_box() as (_, box):
        double.options(obey_timeout=False)
        started = time.monotonic()
        assert (await box.shell("sleep 300", timeout=1)).timed_out
        assert time.monotonic() - started < 12


@pytest.mark.parametrize("hint", [{"deadline": "error"}, None], ids=str)
async def test_a_poll_that_runs_out_of_time_is_asked_again(one_box: Any, double: Any, hint: Any) -> None:
    """At its deadline a stream ends with an exit code of -1 or with an error: both mean the same."""
    async with one_box({"poll_seconds": 1.0}) as (backend, box):
        raw = box._raw
        raw.commands.times = _times(raw, grace=0.2)
        double.fault(**START, times=None, **({"hint": hint} if hint else {}))
        result = await box.shell("sleep 3; echo end", timeout=60)
        assert result.text == "end\n"
        assert backend.retryable(SandboxError("x", kind="retryable"))


def _times(raw: Any, **values: float) -> Any:
    from dataclasses import replace

    return replace(raw.commands.times, **values)


async def test_a_cancelled_command_is_killed_inside(one_box: Any) -> None:
    async with one_box() as (_, box):
        call = asyncio.create_task(box.shell("while :; do echo x >> file; sleep 0.05; done", timeout=300))

        async def begun() -> bool:
            return (await box.shell("test -s file", timeout=10)).ok

        assert await eventually(begun)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await eventually(lambda: _still(box))


async def _still(box: Any) -> bool:
    before = len(await box.read("file"))
    await asyncio.sleep(0.3)
    return len(await box.read("file")) == before


async def test_busy_answers_are_waited_for(make_e2b: Any, double: Any) -> None:
    backend = make_e2b()
    double.fault(
        surface="e2b_api", method="POST", path="/v2/sandboxes", status=429, headers={"Retry-After": "1"}
    )
    started = time.monotonic()
    try:
        raw = await backend.create(SandboxSpec())
    except SandboxError as error:  # an SDK without idempotency keys does not send it again
        assert backend.retryable(error)  # noqa: PT017
        raw = await backend.create(SandboxSpec())
    else:
        assert time.monotonic() - started >= 1
    await backend.delete(raw.id)
    await backend.aclose()


async def test_envd_that_is_away_for_a_moment_is_no_death(one_box: Any, double: Any) -> None:
    async with one_box() as (_, box):
        body = {"message": "The sandbox is running but port is not open", "code": 502}
        double.fault(**START, status=502, body=body, times=2)
        assert (await box.shell("echo fine", timeout=30)).text == "fine\n"


async def test_files_are_asked_for_again(one_box: Any, double: Any) -> None:
    async with one_box() as (_, box):
        data = bytes(range(256)) * 4096
        for rule in ({"status": 502, "body": {"code": 502, "message": "bad gateway"}}, {"drop": "after"}):
            for path in (START["path"], "/files"):
                double.fault(surface="e2b_envd", path=path, **rule)
            await box.write("small", b"x")
            await box.write("large", data)
            assert await box.read("small") == b"x"
            for path in (START["path"], "/files"):
                double.fault(surface="e2b_envd", path=path, **rule)
            assert await box.read("large") == data


async def test_a_sandbox_that_ends_while_it_is_made_is_tried_again(make_e2b: Any, double: Any) -> None:
    backend = make_e2b()
    body = {"code": 502, "message": "The sandbox was not found"}
    double.fault(**START, status=502, body=body)
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec(labels={"test": "ended"}))
    assert backend.retryable(raised.value)
    for info in await backend.list({"test": "ended"}):
        await backend.delete(info.id)
    await backend.aclose()


async def test_a_machine_that_crashes_is_told(one_box: Any, double: Any) -> None:
    async with one_box() as (_, box):
        call = asyncio.create_task(box.exec(["sleep", "300"], timeout=100))
        await asyncio.sleep(0.5)
        machine = double.machines()[-1]
        await asyncio.to_thread(double.kill_machine, machine)
        async with asyncio.timeout(20):
            with pytest.raises(SandboxDead):
                await call
        assert not await box.alive()
