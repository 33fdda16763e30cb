"""What the core does around a backend: sending again, cutting output, killing by script, unpacking."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import signal
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import RawProcess, Sandbox, SandboxSpec, scripts, transfer
from rollhook.sandbox.output import Capture
from rollhook.testing.fakes_sandbox import FakeSandbox, FakeSandboxes


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 60))
def test_a_capture_keeps_the_head_and_the_tail(chunks: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for chunk in chunks:
        capture.feed(chunk)
    whole = b"".join(chunks)
    head = (limit + 1) // 2
    expected = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - (limit - head) :]
    assert capture.value() == expected
    assert capture.total == len(whole)
    assert capture.truncated == (len(whole) > limit)


def test_a_capture_holds_no_more_than_twice_its_limit() -> None:
    capture = Capture(1000)
    for _ in range(10_000):
        capture.feed(b"x" * 100)
    assert sum(len(part) for part in capture._tail) <= 1000 + 100


@contextlib.asynccontextmanager
async def fake(
    made: type[FakeSandbox] = FakeSandbox, **spec: Any
) -> AsyncIterator[tuple[Sandbox, FakeSandbox]]:
    class Backend(FakeSandboxes):
        def wrap(self, sandbox_id: str, spec: SandboxSpec, root: Path) -> FakeSandbox:
            return made(sandbox_id, spec, root)

    backend = Backend()
    raw = await backend.create(SandboxSpec(**spec))
    assert isinstance(raw, FakeSandbox)
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    try:
        yield sandbox, raw
    finally:
        await sandbox.close()


class Flaky(FakeSandbox):
    """Runs the command and loses the answer, in a way that another try may mend."""

    failures = 1
    kind: Any = "retryable"

    async def start(self, argv: Sequence[str], **options: Any) -> RawProcess:
        process = await super().start(argv, **options)
        if self.failures:
            self.failures -= 1
            await process.wait()
            await process.aclose()
            raise SandboxError("the connection was lost", kind=self.kind)
        return process


async def test_a_command_is_not_sent_again() -> None:
    async with fake(Flaky) as (sandbox, raw):
        with pytest.raises(SandboxError, match="lost"):
            await sandbox.exec(["true"], timeout=10)
        assert len(raw.started) == 1


async def test_a_repeatable_command_is_sent_again() -> None:
    async with fake(Flaky) as (sandbox, raw):
        assert (await sandbox.exec(["true"], timeout=10, repeatable=True)).ok
        assert len(raw.started) == 2


async def test_a_repeatable_command_is_not_sent_for_ever() -> None:
    class AlwaysFlaky(Flaky):
        failures = 100

    async with fake(AlwaysFlaky) as (sandbox, raw):
        with pytest.raises(SandboxError, match="lost"):
            await sandbox.exec(["true"], timeout=10, repeatable=True)
        assert len(raw.started) == 3


async def test_only_what_may_be_mended_is_sent_again() -> None:
    class BrokenForGood(Flaky):
        kind = "infrastructure"

    async with fake(BrokenForGood) as (sandbox, raw):
        with pytest.raises(SandboxError, match="lost"):
            await sandbox.exec(["true"], timeout=10, repeatable=True)
        assert len(raw.started) == 1


async def test_a_command_killed_with_its_sandbox_is_no_result() -> None:
    class Dying(FakeSandbox):
        async def alive(self) -> bool:
            return False

    async with fake(Dying) as (sandbox, _):
        with pytest.raises(SandboxDead):
            await sandbox.shell("kill -9 $$", timeout=10)


async def test_a_kill_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undying(FakeSandbox):
        async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
            await asyncio.sleep(1000)
            return ()

    monkeypatch.setattr("rollhook.sandbox.sandbox._KILL_SECONDS", 0.1)
    async with fake(Undying) as (sandbox, _):
        with pytest.raises(SandboxError, match="still there"):
            await sandbox.quiesce()


async def test_a_sandbox_is_deleted_once() -> None:
    deleted = []

    async def delete(sandbox_id: str) -> None:
        await asyncio.sleep(0)
        deleted.append(sandbox_id)

    async with fake() as (_, raw):
        sandbox = Sandbox(raw, capabilities=frozenset(), delete=delete)
        await asyncio.gather(*(sandbox.close() for _ in range(5)))
        await sandbox.close()
    assert deleted == [raw.id]


async def test_a_close_that_is_cancelled_goes_on() -> None:
    going, may_end = asyncio.Event(), asyncio.Event()
    deleted = []

    async def delete(sandbox_id: str) -> None:
        going.set()
        await may_end.wait()
        deleted.append(sandbox_id)

    async with fake() as (_, raw):
        sandbox = Sandbox(raw, capabilities=frozenset(), delete=delete)
        first = asyncio.create_task(sandbox.close())
        await going.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        may_end.set()
        await sandbox.close()
    assert deleted == [raw.id]


async def test_a_failed_delete_is_told_to_every_close() -> None:
    async def delete(sandbox_id: str) -> None:
        raise SandboxError("the provider is down", kind="retryable")

    async with fake() as (_, raw):
        sandbox = Sandbox(raw, capabilities=frozenset(), delete=delete)
        for _ in range(2):
            with pytest.raises(SandboxError, match="down"):
                await sandbox.close()


async def test_a_command_needs_words_without_nul() -> None:
    async with fake() as (sandbox, raw):
        for argv in ([], ["a\0b"]):
            with pytest.raises(SandboxError) as raised:
                await sandbox.exec(argv, timeout=1)
            assert raised.value.kind == "user"
        assert raw.started == []


async def test_the_script_kills_what_descends_without_the_mark() -> None:
    async with fake() as (sandbox, _):
        result = await sandbox.shell("env -i sh -c 'sleep 500 & sleep 500' & sleep 500", timeout=0.5)
        assert result.timed_out
        listed = await sandbox.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=20)
        assert "sleep 500 " not in listed.text.replace("sleep 500 & ", "")


def test_the_killer_s_words_are_understood() -> None:
    said = b"12\tsh -c loop \n13\t\nnoise\nleft 0\n"
    assert scripts.parse_killed(said) == ([(12, "sh -c loop"), (13, "")], 0)
    assert scripts.parse_killed(b"12\tx\n") == ([(12, "x")], -1)


# hostile archives


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: Any
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), fields.pop("mode", 0o644)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return stream


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.SYMTYPE, linkname=target)


HOSTILE: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], set[str]]] = {
    "a name with ..": ([member("../evil", data=b"x")], {"../evil"}),
    "a name with .. inside": ([member("a/../../evil", data=b"x")], {"a/../../evil"}),
    "an absolute name": ([member("/tmp/evil", data=b"x")], {"/tmp/evil"}),
    "a directory outside": ([member("../evil", tarfile.DIRTYPE)], {"../evil"}),
    "a link outside": ([link("out", "../..")], {"out"}),
    "an absolute link": ([link("out", "/etc")], {"out"}),
    "a file through a link": ([link("out", ".."), member("out/evil", data=b"x")], {"out"}),
    "a file over a link": ([link("f", "/etc/passwd"), member("f", data=b"x")], {"f"}),
    "links that wind": (
        [member("a/", tarfile.DIRTYPE), link("a/top", ".."), link("w", "a/top/../../x")],
        {"w"},
    ),
    "a hard link outside": ([member("h", tarfile.LNKTYPE, linkname="../../etc/passwd")], {"h"}),
    "a hard link to a link": (
        [link("l", "/etc/passwd"), member("h", tarfile.LNKTYPE, linkname="l")],
        {"l", "h"},
    ),
    "a character device": ([member("d", tarfile.CHRTYPE, devmajor=1, devminor=3)], {"d"}),
    "a block device": ([member("d", tarfile.BLKTYPE, devmajor=8, devminor=0)], {"d"}),
    "a FIFO": ([member("p", tarfile.FIFOTYPE)], {"p"}),
    "a file below a file": ([member("f", data=b"x"), member("f/below", data=b"x")], {"f/below"}),
    "a name too long": ([member("n" * 300, data=b"x")], {"n" * 300}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_stay_out_and_the_rest_arrives(tmp_path: Path, name: str) -> None:
    members, expected = HOSTILE[name]
    target = tmp_path / "deep" / "target"
    report = transfer.unpack(archive(member("good", data=b"good"), *members), target, 1 << 20)
    assert {skipped for skipped, _ in report.skipped} == expected
    assert (target / "good").read_bytes() == b"good"
    root = os.path.realpath(target)
    for path in tmp_path.rglob("*"):
        assert path == tmp_path / "deep" or os.path.realpath(path).startswith(root), path
    assert not (tmp_path / "evil").exists()


def test_a_link_already_in_the_target_is_not_written_through(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "link").symlink_to(outside)
    report = transfer.unpack(
        archive(member("link/evil", data=b"x"), member("link", data=b"")), target, 1 << 20
    )
    assert [name for name, _ in report.skipped] == ["link/evil"]
    assert list(outside.iterdir()) == []
    assert stat.S_ISREG((target / "link").lstat().st_mode)


def test_what_an_archive_says_twice_is_written_last(tmp_path: Path) -> None:
    report = transfer.unpack(archive(member("f", data=b"1"), member("f", data=b"22")), tmp_path, 1 << 20)
    assert (tmp_path / "f").read_bytes() == b"22"
    assert report.files == 1


def test_an_archive_past_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="limit of 10 bytes"):
        transfer.unpack(archive(member("f", data=b"x" * 11)), tmp_path, 10)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"not a tar" * 200,
        lambda data: data[:700],
        lambda data: data[:300] + b"\xff" * 900,
    ],
    ids=["empty", "noise", "cut", "spoilt"],
)
def test_a_broken_archive_is_an_error_of_the_sandbox(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    whole = archive(member("f", data=b"x" * 400)).getvalue()
    with pytest.raises(SandboxError, match="archive"):
        transfer.unpack(io.BytesIO(spoil(whole)), tmp_path, 1 << 20)


@given(st.binary(max_size=3000))
def test_no_bytes_make_unpacking_fail_otherwise(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(SandboxError):
        transfer.unpack(io.BytesIO(data), Path(directory) / "target", 1 << 20)


def test_the_words_of_tar_name_what_it_left_out(tmp_path: Path) -> None:
    said = "tar: ./s: socket ignored\ntar: ./odd: name: Cannot open: Permission denied\nother\n"
    report = transfer.unpack(archive(member("f")), tmp_path, 10, said)
    assert [name for name, _ in report.skipped] == ["s", "odd: name"]


async def test_a_fake_sandbox_of_another_process_with_the_same_name_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test runs beside each other on one machine count from 1 alike."""
    boxes = []
    for _ in range(2):
        monkeypatch.setattr(FakeSandboxes, "_numbers", itertools.count(1))
        boxes.append((backend := FakeSandboxes(), await backend.create(SandboxSpec())))
    (one, here), (other, there) = boxes
    assert here.id == there.id
    process = await there.start(["cat"], stdin=True)
    await one.delete(here.id)
    await process.close_stdin()
    assert await process.wait() == 0
    await other.delete(there.id)


async def test_a_process_of_a_deleted_fake_is_reaped_and_closed() -> None:
    """The loop may end right after a delete, and what is open then fails some other test."""
    boxes = FakeSandboxes()
    box = await boxes.create(SandboxSpec())
    await box.start(["sleep", "60"])
    await boxes.delete(box.id)
    (process,) = box.processes  # type: ignore[attr-defined]
    assert process.returncode == -signal.SIGKILL
    assert process._transport.is_closing()
    await process.wait()
