"""The journal: what is written is read back, a crash costs at most the tail, damage is named."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollhook.errors import RunError
from rollhook.journal import Entry, Journal, JournalError, decode, encode, read

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('abc\n"', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def written(path: Path, count: int = 5) -> list[Entry]:
    with Journal(path, header={"run_id": "demo"}, clock=lambda: 1.0) as journal:
        for number in range(count):
            journal.append("step", number=number)
    return list(read(path))


def test_entries_are_read_back_in_order(tmp_path: Path) -> None:
    entries = written(tmp_path / "journal.jsonl")
    assert [entry.seq for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert entries[0] == Entry(1, "journal", {"schema": 1, "run_id": "demo"}, 1.0)
    assert [entry.data["number"] for entry in entries[1:]] == [0, 1, 2, 3, 4]


def test_every_line_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"seq", "event", "data", "time", "crc"} == set(rows[2])


@settings(deadline=None)
@given(event=st.text(st.characters(codec=None)), data=st.dictionaries(st.text("ab"), JSON))
def test_a_line_survives_the_round_trip(event: str, data: dict[str, object]) -> None:
    entry = Entry(3, event, data, 1754000000.25)
    line = encode(entry)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert decode(line[:-1]) == entry


def test_what_vendors_and_numpy_hand_over_is_written_all_the_same(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as written_to:
        written_to.append(
            "odd", reward=np.float64(0.5), count=np.int32(3), error=ValueError("x"), text="\udcff"
        )
    (_, entry) = read(tmp_path / "journal.jsonl")
    assert entry.data == {"reward": 0.5, "count": 3, "error": "ValueError('x')", "text": "\udcff"}


@settings(deadline=None)
@given(data=st.data())
def test_a_changed_line_is_never_taken_for_an_entry(data: st.DataObject) -> None:
    line = encode(Entry(3, "lease", {"nonce": "abc"}, 1.0))[:-1]
    at = data.draw(st.integers(0, len(line) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != line[at]))
    assert decode(line[:at] + bytes([byte]) + line[at + 1 :]) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_yields_a_prefix_and_the_writer_goes_on(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "journal.jsonl"
    path.unlink(missing_ok=True)
    entries = written(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    kept = list(read(path))
    assert kept == entries[: len(kept)]
    with Journal(path) as journal:
        journal.append("after")
    events = [(entry.seq, entry.event) for entry in read(path)]
    assert events[: len(kept)] == [(entry.seq, entry.event) for entry in kept]
    assert events[-1] == (max(len(kept), 1) + 1, "after")


@pytest.mark.parametrize("tail", [b"\0" * 40, b"\0" * 40 + b"\n", b'{"data":{', b"x\ny\n", b"\n"])
def test_a_torn_tail_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    entries = written(path)
    with path.open("ab") as file:
        file.write(tail)
    assert list(read(path)) == entries


def test_damage_in_the_middle_names_the_line_and_yields_what_is_before(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entries = written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"step", b"stop")
    path.write_bytes(b"".join(lines))
    reader = read(path)
    assert [next(reader) for _ in range(3)] == entries[:3]
    with pytest.raises(JournalError, match="line 4: the checksum does not fit") as caught:
        next(reader)
    assert caught.value.line == 4
    with pytest.raises(JournalError):
        Journal(path)


def test_a_missing_line_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(JournalError, match="line 3: entry 4 stands where 3 was due"):
        list(read(path))


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(encode(Entry(1, "journal", {"schema": 99}, 1.0)))
    with pytest.raises(RunError, match="schema 99"):
        list(read(path))


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(encode(Entry(1, "step", {}, 1.0)))
    with pytest.raises(JournalError, match="not a journal"):
        list(read(path))
    with pytest.raises(RunError, match="cannot be read"):
        list(read(tmp_path / "absent.jsonl"))


async def test_durable_means_fsynced_and_a_group_shares_one(tmp_path: Path) -> None:
    gate, entered, synced = threading.Semaphore(0), threading.Event(), []

    def fsync(fd: int) -> None:
        entered.set()
        gate.acquire()
        synced.append(os.fstat(fd).st_size)

    path = tmp_path / "journal.jsonl"
    journal = Journal(path, fsync=fsync)
    first = asyncio.create_task(journal.append_durable("lease", nonce="first"))
    await asyncio.to_thread(entered.wait)
    rest = [asyncio.create_task(journal.append_durable("lease", nonce=str(n))) for n in range(50)]
    await asyncio.sleep(0)
    assert not first.done()
    gate.release()
    await first
    assert not any(task.done() for task in rest)
    gate.release()
    assert await asyncio.gather(*rest) == list(range(3, 53))
    assert len(synced) == 2
    assert synced[-1] == path.stat().st_size
    gate.release()
    await asyncio.to_thread(journal.close)


async def test_a_cancelled_waiter_does_not_harm_the_others(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)

    def fsync(fd: int) -> None:
        gate.acquire()

    journal = Journal(tmp_path / "journal.jsonl", fsync=fsync)
    tasks = [asyncio.create_task(journal.append_durable("lease", nonce=str(n))) for n in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gate.release(9)
    assert await tasks[1] == 3
    await journal.commit()
    await asyncio.to_thread(journal.close)
    await journal.commit()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space is left on the device; what is there is intact; free some space"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
async def test_a_failed_fsync_is_said_clearly_and_ends_the_journal(
    tmp_path: Path, number: int, words: str
) -> None:
    path = tmp_path / "journal.jsonl"
    fail = False

    def fsync(fd: int) -> None:
        if fail:
            raise OSError(number, os.strerror(number))

    journal = Journal(path, fsync=fsync)
    await journal.append_durable("kept")
    before, fail = path.read_bytes(), True
    with pytest.raises(RunError, match=words):
        await journal.append_durable("lost")
    with pytest.raises(RunError, match=words):
        journal.append("later")
    with pytest.raises(RunError, match=words):
        await journal.commit()
    with pytest.raises(RunError, match=words):
        journal.close()
    assert path.read_bytes() == before


async def test_a_full_disk_corrupts_nothing(tmp_path: Path) -> None:
    """A real short write: the file may not grow beyond a limit."""
    import resource
    import signal

    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    await journal.append_durable("kept")
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            await journal.append_durable("lost", filler="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    with pytest.raises(RunError):
        journal.close()


async def test_the_guard_stops_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    owned = True

    def guard() -> None:
        if not owned:
            raise RunError("attempt 2 has started")

    journal = Journal(path, guard=guard)
    await journal.append_durable("mine")
    before, owned = path.read_bytes(), False
    with pytest.raises(RunError, match="attempt 2 has started"):
        await journal.append_durable("not mine")
    assert path.read_bytes() == before
    with pytest.raises(RunError):
        journal.close()


def test_a_closed_journal_refuses(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("one")
    journal.flush()
    journal.close()
    journal.close()
    with pytest.raises(RunError, match="is closed"):
        journal.append("two")
    assert [entry.event for entry in read(journal.path)] == ["journal", "one"]
