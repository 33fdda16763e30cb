"""What the service and the line to it may do, and what must come of it. Each with the SDK as it is."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from doubles.client import Double

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.sandbox_case import eventually
from rollhook_daytona.backend import DaytonaSandboxes

Make = Callable[..., DaytonaSandboxes]


@pytest.fixture(autouse=True)
def fine_weather(double: Double) -> Iterator[None]:
    yield
    double.clear_faults()
    double.options(
        most_live=None, list_lag=0.0, fail_state=None, obey_timeout=True, stuck_deletes=0, events=True
    )
    double.options(minute=60.0, accept_key=True, most_live_status=429)


@pytest.fixture
async def backend(make_daytona: Make) -> AsyncIterator[DaytonaSandboxes]:
    made = make_daytona(request_seconds=3.0, poll_seconds=2.0)
    yield made
    await made.aclose()


@pytest.fixture
def mark() -> dict[str, str]:
    return {"test": uuid.uuid4().hex}


@contextlib.asynccontextmanager
async def box(backend: DaytonaSandboxes, **spec: Any) -> AsyncIterator[Sandbox]:
    raw = await backend.create(SandboxSpec(**spec))
    try:
        yield Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    finally:
        await backend.delete(raw.id)


async def none_left(backend: DaytonaSandboxes, mark: dict[str, str]) -> bool:
    async def none() -> bool:
        return await backend.list(mark) == []

    return await eventually(none, 20)


# creating


async def test_a_create_whose_reply_is_lost_leaves_nothing(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    double.fault(surface="daytona", method="POST", path="/api/sandbox", drop="after")
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec(labels=mark))
    assert backend.retryable(raised.value)
    assert backend.ambiguous(raised.value)
    assert await none_left(backend, mark)


async def test_a_create_under_a_lease_whose_reply_is_lost_can_be_adopted(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    spec = SandboxSpec(labels={**mark, "rollhook.nonce": mark["test"]})
    double.fault(surface="daytona", method="POST", path="/api/sandbox", drop="after")
    with pytest.raises(SandboxError):
        await backend.create(spec)
    (lost,) = await backend.list({"rollhook.nonce": mark["test"]})
    raw = await backend.adopt(lost.id, spec)
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    assert (await sandbox.exec(["echo", "adopted"], timeout=30)).stdout == b"adopted\n"
    await sandbox.close()
    assert await backend.list(mark) == []


async def test_a_create_cancelled_before_its_late_reply_leaves_nothing(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    double.options(list_lag=0.5)
    rule = double.fault(surface="daytona", method="POST", path="/api/sandbox", delay_after=5.0)
    call = asyncio.create_task(backend.create(SandboxSpec(labels=mark)))
    while double.hits(rule) == 0:
        await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.6)
    assert await none_left(backend, mark)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (403, "Total CPU limit exceeded. Maximum allowed: 10."),
        (400, "Total disk limit exceeded. Consider archiving your unused Sandboxes to free up storage."),
        (403, "Organization quota for memory reached"),
        (400, "No available runners"),
    ],
)
async def test_a_quota_is_a_reason_to_wait(
    double: Double, backend: DaytonaSandboxes, status: int, text: str
) -> None:
    body = {"statusCode": status, "message": text}
    double.fault(surface="daytona", method="POST", path="/api/sandbox", status=status, body=body)
    with pytest.raises(SandboxError, match="wait") as raised:
        await backend.create(SandboxSpec())
    assert backend.retryable(raised.value)
    assert not backend.ambiguous(raised.value)
    assert getattr(raised.value, "retry_after", None) == 20.0


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "7"}, {"Retry-After-sandbox-create": "7"}, {"retry-after": "soon"}]
)
async def test_too_many_requests_say_how_long_to_wait(
    double: Double, backend: DaytonaSandboxes, headers: dict[str, str]
) -> None:
    double.fault(surface="daytona", method="POST", path="/api/sandbox", status=429, headers=headers)
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec())
    assert getattr(raised.value, "retry_after", None) == (1.0 if "soon" in headers.values() else 7.0)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"message": "autoStopInterval must be a number"}, "user"),
        (400, {"message": "Disk request 30GB exceeds maximum allowed per sandbox (10GB)"}, "user"),
        (403, {"message": "Access denied"}, "user"),
        (404, {"message": "Snapshot x not found"}, "user"),
        (500, {"message": "Internal server error"}, "retryable"),
        (502, "<html>bad gateway</html>", "retryable"),
        (503, "<html>down</html>", "retryable"),
        (504, {"message": "timeout"}, "retryable"),
        (529, "odd", "retryable"),
        (200, {"id": "half a sandbox"}, "retryable"),
        (200, "<html>a portal</html>", "retryable"),
    ],
)
async def test_answers_to_a_create_are_told_apart(
    double: Double, backend: DaytonaSandboxes, status: int, body: Any, kind: str
) -> None:
    double.fault(surface="daytona", method="POST", path="/api/sandbox", status=status, body=body)
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec())
    assert (raised.value.kind, backend.retryable(raised.value)) == (kind, kind == "retryable")
    assert not isinstance(raised.value, SandboxDead)
    assert "Daytona, making a sandbox" in str(raised.value)
    assert raised.value.__cause__ is not None


async def test_a_key_that_is_refused_is_the_users_and_never_shown(
    double: Double, make_daytona: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    body = {"message": f"Invalid key {double.key}"}
    double.fault(surface="daytona", status=401, body=body, times=None)
    backend = make_daytona()
    for call in (backend.start(), backend.create(SandboxSpec()), backend.delete("x")):
        with pytest.raises(SandboxError, match="api_key") as raised:
            await call
        assert raised.value.kind == "user"
        assert double.key not in str(raised.value)
    shown = f"{backend!r} {backend.config!r} {backend.describe()} {backend.account} {caplog.text}"
    assert double.key not in shown
    await backend.aclose()


async def test_a_create_that_is_never_answered_is_given_up_in_time(
    double: Double, make_daytona: Make, mark: dict[str, str]
) -> None:
    backend = make_daytona(request_seconds=0.7)
    started = asyncio.get_running_loop().time()
    double.fault(surface="daytona", method="POST", path="/api/sandbox", delay_before=20.0, drop="before")
    with pytest.raises(SandboxError, match="no answer") as raised:
        await backend.create(SandboxSpec(labels=mark))
    assert backend.retryable(raised.value)
    assert backend.ambiguous(raised.value)
    assert asyncio.get_running_loop().time() - started < 15
    await backend.aclose()


async def test_a_sandbox_that_fails_to_start_is_deleted_and_tried_again(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    double.options(fail_state="error")
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec(labels=mark))
    assert backend.retryable(raised.value)
    assert await none_left(backend, mark)


async def test_a_failed_build_is_the_users_with_the_end_of_its_log(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    text = "FROM debian:12\nRUN echo the-reason-is-this; exit 9\n"
    with pytest.raises(SandboxError, match="the-reason-is-this") as raised:
        await backend.create(SandboxSpec(dockerfile=text, labels=mark))
    assert raised.value.kind == "user"
    assert await none_left(backend, mark)
    with pytest.raises(SandboxError, match="not found") as raised:
        await backend.create(SandboxSpec(image="registry.example/absent:1", labels=mark))
    assert raised.value.kind == "user"


async def test_an_image_is_built_once_however_many_ask(double: Double, backend: DaytonaSandboxes) -> None:
    spec = SandboxSpec(dockerfile=f"FROM debian:12\nRUN echo {uuid.uuid4().hex} > /made\n")
    before = double.counts().get("image_builds", 0)
    first, second = await asyncio.gather(backend.create(spec), backend.create(spec))
    third = await backend.create(spec)
    assert double.counts()["image_builds"] == before + 1
    await asyncio.gather(*(backend.delete(each.id) for each in (first, second, third)))


async def test_without_events_sandboxes_come_up_too(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    double.options(events=False)
    async with box(backend, labels=mark) as sandbox:
        assert await sandbox.alive()


async def test_what_is_asked_is_what_the_service_gets(
    double: Double, make_daytona: Make, mark: dict[str, str]
) -> None:
    backend = make_daytona(auto_stop_minutes=7, auto_delete_minutes=9, target="eu")
    hosts = ("pypi.org", "example.org")
    if "domain_allow_list" not in pytest.importorskip("daytona").CreateSandboxFromImageParams.model_fields:
        with pytest.raises(SandboxError, match="too old"):
            await backend.create(SandboxSpec(network_allow=hosts))
        hosts = ()
    spec = SandboxSpec(
        labels=mark,
        cpus=1.2,
        memory_bytes=(3 << 30) + 1,
        env={"A": "b"},
        network_allow=hosts,
        lifetime_seconds=601,
    )
    for each in (spec, SandboxSpec(labels=mark, network=True), SandboxSpec(labels=mark)):
        await backend.delete((await backend.create(each)).id)
    asked, online, plain = [
        entry["body"] for entry in double.requests("POST", "/api/sandbox") if "body" in entry
    ][-3:]
    assert (asked["cpu"], asked["memory"], asked["disk"]) == (2, 4, 10)
    assert (plain["cpu"], plain["memory"], plain["disk"]) == (1, 2, 10)
    assert (asked["autoStopInterval"], asked["autoDeleteInterval"], asked["target"]) == (7, 9, "eu")
    if "ttlMinutes" in asked:
        assert asked["ttlMinutes"] == 11
    assert asked["networkBlockAll"] == (not hosts)
    assert asked.get("domainAllowList") == (",".join(hosts) or None)
    assert (plain["networkBlockAll"], online["networkBlockAll"]) == (True, False)
    assert "domainAllowList" not in online
    assert asked["env"] == {"A": "b"}
    assert mark.items() <= asked["labels"].items()
    assert asked["buildInfo"]["dockerfileContent"] == "FROM debian:12\n"
    await backend.aclose()


# commands


async def test_a_command_whose_reply_is_lost_runs_once(double: Double, backend: DaytonaSandboxes) -> None:
    async with box(backend) as sandbox:
        for drop in ("before", "after"):
            rule = double.fault(path="process/execute", drop=drop, times=2)
            result = await sandbox.shell("echo ran >> log; cat log", timeout=60)
            assert result.exit_code == 0
            assert double.hits(rule) == 2
        assert await sandbox.read("log") == b"ran\nran\n"


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 502, "body": "<html>bad gateway</html>"},
        {"status": 500, "body": {"message": "oops"}},
        {"status": 429},
        {"status": 400, "body": {"message": "bad request: no IP address found. Is the Sandbox started?"}},
        {"truncate": 20},
        {"freeze": 20},
        {"status": 200, "body": "<html>a portal</html>", "after_effect": True},
        {"delay_after": 30.0},
    ],
)
async def test_an_answer_that_is_none_is_asked_for_again(
    double: Double, make_daytona: Make, fault: dict[str, Any]
) -> None:
    backend = make_daytona(request_seconds=0.7, poll_seconds=0.5)
    async with box(backend) as sandbox:
        rule = double.fault(path="process/execute", **fault)
        result = await sandbox.shell("echo ran >> log; echo said", timeout=60)
        assert (result.exit_code, result.stdout, double.hits(rule)) == (0, b"said\n", 1)
        assert await sandbox.read("log") == b"ran\n"
    await backend.aclose()


async def test_a_long_command_outlives_a_gateway_that_cuts(double: Double, backend: DaytonaSandboxes) -> None:
    async with box(backend) as sandbox:
        double.fault(path="process/execute", cut=1.0, times=None)
        result = await sandbox.shell("echo ran >> log; sleep 2.5; echo end; echo err >&2", timeout=60)
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"end\n", b"err\n")
        assert await sandbox.read("log") == b"ran\n"


async def test_a_limit_that_the_service_ignores_is_kept(double: Double, backend: DaytonaSandboxes) -> None:
    double.options(obey_timeout=False)
    async with box(backend) as sandbox:
        started = asyncio.get_running_loop().time()
        assert (await sandbox.shell("sleep 300", timeout=1)).timed_out
        assert asyncio.get_running_loop().time() - started < 15
        assert (await sandbox.quiesce()).killed == ()


async def test_a_sandbox_that_was_stopped_is_dead(double: Double, backend: DaytonaSandboxes) -> None:
    double.options(minute=0.02)
    async with box(backend) as sandbox:
        assert await eventually(lambda: _dead(sandbox), 20)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"], timeout=10)
        with pytest.raises(SandboxDead):
            await sandbox.write("file", b"x" * 100_000)


async def _dead(sandbox: Sandbox) -> bool:
    return not await sandbox.alive()


# life


async def test_touching_keeps_a_sandbox_that_the_service_would_stop(
    double: Double, make_daytona: Make, mark: dict[str, str]
) -> None:
    backend = make_daytona(auto_stop_minutes=1, auto_delete_minutes=1)
    kept = await backend.create(SandboxSpec(labels=mark))
    left = await backend.create(SandboxSpec(labels=mark))
    double.options(minute=2.5)
    for _ in range(9):
        await kept.touch()
        await asyncio.sleep(0.4)
    assert await kept.alive()

    async def alone() -> bool:
        return [info.id for info in await backend.list(mark)] == [kept.id]

    async with asyncio.timeout(20):
        while not await alone():
            await kept.touch()
            await asyncio.sleep(0.2)
    double.options(minute=60.0)
    await backend.delete(kept.id)
    await backend.delete(left.id)
    await backend.aclose()


async def test_a_lifetime_ends_at_the_service_itself(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    sdk = pytest.importorskip("daytona")
    if "ttl_minutes" not in sdk.CreateSandboxFromImageParams.model_fields:
        pytest.skip("needs daytona: a release that has ttl_minutes")
    await backend.create(SandboxSpec(labels=mark, lifetime_seconds=30))
    double.options(minute=0.05)
    assert await none_left(backend, mark)


async def test_lists_are_read_to_their_end_whatever_a_sandbox_is_labelled(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    made = await asyncio.gather(
        *(
            backend.create(SandboxSpec(labels={**mark, "code-toolbox-language": f"klingon-{n}"}))
            for n in range(7)
        )
    )
    assert {info.id for info in await backend.list(mark)} == {each.id for each in made}
    (one, *_) = await backend.list(mark)
    assert one.created_at is not None
    assert dict(one.labels) == mark
    await asyncio.gather(*(backend.delete(each.id) for each in made))
    assert await backend.list(mark) == []


async def test_a_delete_that_sticks_is_asked_for_again(
    double: Double, backend: DaytonaSandboxes, mark: dict[str, str]
) -> None:
    raw = await backend.create(SandboxSpec(labels=mark))
    double.options(stuck_deletes=1)
    await backend.delete(raw.id)
    assert await backend.list(mark) == []
    await backend.delete("no-such-sandbox")


async def test_a_delete_that_fails_is_told(double: Double, backend: DaytonaSandboxes) -> None:
    raw = await backend.create(SandboxSpec())
    for fault in ({"status": 500, "body": "<html>"}, {"drop": "before"}, {"status": 429}):
        rule = double.fault(method="DELETE", times=None, **fault)
        with pytest.raises(SandboxError) as raised:
            await backend.delete(raw.id)
        assert raised.value.kind == "retryable"
        assert double.hits(rule) <= 2, "the HTTP client's own second try, and no more"
        double.clear_faults()
    await backend.delete(raw.id)
