"""Episodes on disk: nothing is lost or changed on the way, and a crash costs at most what was not flushed."""

import asyncio
import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollhook import durable, episode_store
from rollhook.episode_store import EpisodeStore, read_records, read_samples, read_tensors
from rollhook.errors import RunError
from rollhook.messages import message
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.testing.records import check_episodes, same_sample

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec=None), max_size=20)  # lone surrogates included
NUMBERS = st.dictionaries(TEXT, FINITE, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def record(episode_id: str = "e1", **changes: Any) -> EpisodeRecord:
    plain = EpisodeRecord(
        episode_id=episode_id,
        run_id="demo",
        attempt=1,
        purpose="train",
        group_id="g1",
        task_id="t1",
        task_digest="abc",
        environment="tbench2",
        family="files",
        seed=7,
        ended="done",
        outcome=Outcome("scored", 1.0),
        reward=1.0,
        messages=(message("user", "hello"),),
        versions=(1, 2),
        timings={"agent": 0.5},
        started_at=1754000000.5,
    )
    return dataclasses.replace(plain, **changes)


def sample(episode_id: str = "e1", leaf: int = 0, tokens: int = 5, **changes: Any) -> Sample:
    rng = np.random.default_rng(tokens)
    plain = Sample(
        episode_id=episode_id,
        group_id="g1",
        task_id="t1",
        leaf=leaf,
        token_ids=rng.integers(0, 1000, tokens, dtype=np.int32),
        mask=np.ones(tokens, dtype=np.uint8),
        logprobs=-rng.random(tokens, dtype=np.float32),
        spans=np.array([[0, tokens, 1, 2]], dtype=np.int32).reshape(-1, 4),
        reward=1.0,
        outcome="scored",
    )
    return dataclasses.replace(plain, **changes)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[EpisodeRecord, list[Sample]]:
    episode_id = draw(TEXT)
    outcome = draw(
        st.builds(Outcome, st.just("scored"), FINITE)
        | st.builds(Outcome, st.just("infra_error"), st.none(), TEXT, TEXT)
    )
    made = record(
        episode_id,
        outcome=outcome,
        reward=outcome.reward,
        seed=draw(st.integers(0, 2**63)),
        components=draw(NUMBERS),
        detail=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        messages=tuple(
            draw(st.lists(st.builds(message, st.sampled_from(["user", "assistant"]), TEXT), max_size=3))
        ),
        versions=draw(st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99))),
        timings=draw(NUMBERS),
        warnings=tuple(draw(st.lists(TEXT, max_size=2))),
        started_at=draw(FINITE),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    samples = []
    for leaf in range(draw(st.integers(0, 3))):
        tokens, spans = draw(st.integers(0, 9)), draw(st.integers(0, 3))
        samples.append(
            sample(
                episode_id,
                leaf,
                0,
                token_ids=rng.integers(-(2**31), 2**31, tokens, dtype=np.int32),
                mask=rng.integers(0, 2, tokens, dtype=np.uint8),
                logprobs=rng.integers(0, 2**32, tokens, dtype=np.uint32).view(np.float32),  # any bits at all
                spans=rng.integers(-(2**31), 2**31, (spans, 4), dtype=np.int32),
                reward=draw(FINITE),
                components=draw(NUMBERS),
            )
        )
    return made, samples


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(episodes(), st.booleans()), max_size=3))
def test_the_round_trip_is_lossless(plan: list[tuple[tuple[EpisodeRecord, list[Sample]], bool]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "episodes"
        store = EpisodeStore(directory, part_bytes=60)
        for (made, samples), flush in plan:
            store.append(made, samples)
            if flush:
                store.flush()
        store.close()
        expected = [made for (made, _), _ in plan]
        assert list(read_records(directory)) == expected
        read = list(read_samples(directory))
        wanted = [each for (_, samples), _ in plan for each in samples]
        assert len(read) == len(wanted)
        assert all(same_sample(a, b) for a, b in zip(read, wanted, strict=True))


def test_samples_are_found_by_episode(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, part_bytes=100)
    for number in range(6):
        store.append(record(f"e{number}"), [sample(f"e{number}", 0, 10 + number), sample(f"e{number}", 1, 3)])
        store.flush()
    store.close()
    got = list(read_samples(tmp_path, ["e4", "e1", "absent"]))
    assert [(each.episode_id, each.leaf, len(each.token_ids)) for each in got] == [
        ("e1", 0, 11),
        ("e1", 1, 3),
        ("e4", 0, 14),
        ("e4", 1, 3),
    ]
    assert check_episodes(tmp_path) == []


def test_parts_roll_at_a_size_and_keep_their_numbers_apart(tmp_path: Path) -> None:
    first, second = EpisodeStore(tmp_path, part_bytes=900), EpisodeStore(tmp_path)
    for number in range(4):
        first.append(record(f"a{number}"), [sample(f"a{number}", tokens=100)])
        second.append(record(f"b{number}"), [sample(f"b{number}", tokens=100)])
        first.flush()
        second.flush()
    first.close()
    second.close()
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [f"0000{n}.jsonl" for n in range(1, 6)]
    assert {each.episode_id for each in read_records(tmp_path)} == {f"{x}{n}" for x in "ab" for n in range(4)}
    assert check_episodes(tmp_path) == []


def test_an_episode_without_tokens_needs_no_second_file(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.append(record(outcome=Outcome("infra_error", boundary="sandbox", cause="gone"), reward=None), [])
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["00001.jsonl"]
    assert list(read_samples(tmp_path)) == []


def test_a_schema_version_is_in_every_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    store = EpisodeStore(tmp_path)
    store.append(record(), [sample()])
    store.close()
    row = orjson.loads((tmp_path / "00001.jsonl").read_bytes())
    assert row["schema"] == 1
    with safe_open(tmp_path / "00001.safetensors", framework="np") as file:
        assert file.metadata()["schema"] == "1"
    (tmp_path / "00001.jsonl").write_bytes(orjson.dumps(row | {"schema": 2}) + b"\n")
    with pytest.raises(RunError, match="has schema 2, this Rollhook reads up to 1"):
        list(read_records(tmp_path))


def test_a_torn_last_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    for number in range(3):
        store.append(record(f"e{number}"), [sample(f"e{number}")])
    store.close()
    path = tmp_path / "00001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [each.episode_id for each in read_records(tmp_path)] == ["e0", "e1"]
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{broken\n" + lines[2])
    with pytest.raises(RunError, match="line 2: not an episode"):
        list(read_records(tmp_path))


@pytest.mark.parametrize("row", [{"episode_id": "e"}, {"samples": []}, {"episode_id": "e", "samples": []}])
def test_a_line_that_lacks_what_an_episode_has_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    store = EpisodeStore(tmp_path)
    store.append(record(), [])
    store.close()
    path = tmp_path / "00001.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + orjson.dumps({"schema": 1, **row}) + b"\n" + good)
    with pytest.raises(RunError, match=r"00001.jsonl, line 2: not a"):
        list(read_records(tmp_path))


def test_tokens_are_durable_before_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace, append = os.replace, episode_store._append

    def watched_replace(source: Path, target: Path) -> None:
        order.append(target.suffix)
        replace(source, target)

    def watched_append(path: Path, data: bytes, size: int) -> None:
        order.append(path.suffix)
        append(path, data, size)

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(episode_store, "_append", watched_append)
    store = EpisodeStore(tmp_path)
    store.append(record(), [sample()])
    store.close()
    assert order == [".safetensors", ".jsonl"]


@pytest.mark.parametrize(
    ("made", "samples", "words"),
    [
        (record(reward=float("nan")), [], "reward is nan"),
        (record(components={"x": float("inf")}), [], "x is inf"),
        (record(), [sample(reward=float("nan"))], "sample 0 is nan"),
        (record(), [sample("other")], "a sample of other"),
        (record(), [sample(mask=np.ones(2, dtype=np.uint8))], "sizes"),
    ],
)
def test_what_could_not_be_read_back_is_refused(
    tmp_path: Path, made: EpisodeRecord, samples: list[Sample], words: str
) -> None:
    store = EpisodeStore(tmp_path)
    with pytest.raises(ValueError, match=words):
        store.append(made, samples)
    store.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk that is full while the list is not empty: half of each write still gets through."""
    full: list[bool] = []

    def write_all(fd: int, data: bytes) -> None:
        if full:
            os.write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(fd, data)

    monkeypatch.setattr(durable, "write_all", write_all)
    monkeypatch.setattr(episode_store, "write_all", write_all)
    return full


async def test_a_full_disk_is_said_clearly_and_harms_nothing(tmp_path: Path, full_disk: list[bool]) -> None:
    store = EpisodeStore(tmp_path)
    store.append(record("e1"), [sample("e1")])
    await store.commit()
    full_disk.append(True)
    store.append(record("e2"), [sample("e2")])
    with pytest.raises(RunError, match="no space is left on the device"):
        await store.commit()
    with pytest.raises(RunError, match="no space is left"):
        store.append(record("e3"), [])
    with pytest.raises(RunError, match="no space is left"):
        await asyncio.to_thread(store.close)
    assert [each.episode_id for each in read_records(tmp_path)] == ["e1"]
    assert [each.episode_id for each in read_samples(tmp_path)] == ["e1"]
    assert check_episodes(tmp_path) == []


def test_the_validator_names_what_is_wrong(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    store = EpisodeStore(tmp_path)
    bad = sample(token_ids=np.arange(5, dtype=np.int32), mask=np.array([1, 1, 0, 0, 2], dtype=np.uint8))
    store.append(record(), [bad, sample("e1", 0)])
    store.append(record(), [])
    store.close()
    problems = "\n".join(check_episodes(tmp_path))
    assert "episode e1 occurs twice" in problems
    assert "leaf 0 occurs twice" in problems
    assert "mask holds values other than 0 and 1" in problems
    tensors = read_tensors(tmp_path / "00001.safetensors")
    short = {name: array[:3] for name, array in tensors.items()}
    save_file(short, tmp_path / "00001.safetensors", metadata={"schema": "1"})
    assert "are not in the safetensors file" in "\n".join(check_episodes(tmp_path))
