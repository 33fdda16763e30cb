"""Packs: written once, atomically, found by digest, named by reference."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollhook.errors import UsageError
from rollhook.pack import Pack
from rollhook.packs import PackReference, ensure, packs_directory, parse_reference, resolve, resolve_all
from rollhook.testing.environment import build_context


class Counting(Pack):
    """Writes one file, and counts how often."""

    writes = 0
    before_end: Callable[[Path], None] = staticmethod(lambda directory: None)

    def digest(self) -> str:
        return f"digest-of-{self.config}"

    def write(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.writes += 1
        (directory / "rows.jsonl").write_text("{}\n")
        if progress is not None:
            progress(1, 1)
        self.before_end(directory)


class FakePlugins:
    """Builds packs; what the loader does for `pack:` references."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []

    def add(self, names: list[tuple[str, str]]) -> None:
        self.added += names

    def build(self, kind: str, name: str, keys: Mapping[str, Any], context: Any, key_path: str) -> Pack:
        return Counting(f"{name}-{sorted(keys.items())}", context)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def pack(name: str = "x") -> Counting:
    return Counting(name, build_context())


def test_a_pack_is_written_once_and_found_by_its_digest(cache: Path) -> None:
    one = pack()
    place = ensure(one)
    assert place == cache / "rollhook" / "packs" / "digest-of-x"
    assert ensure(one) == place
    assert ensure(pack()) == place
    assert one.writes == 1
    assert [entry.name for entry in packs_directory().iterdir()] == ["digest-of-x"]


def test_a_failing_write_leaves_nothing_behind() -> None:
    one = pack()

    def fail(directory: Path) -> None:
        raise ValueError("no more words")

    one.before_end = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no more words"):
        ensure(one)
    assert list(packs_directory().iterdir()) == []


def test_of_two_that_write_at_once_the_first_wins_and_both_get_a_whole_pack() -> None:
    slow, quick = pack(), pack()
    slow.before_end = lambda directory: None if quick.writes else [ensure(quick), None][1]  # type: ignore[method-assign]
    place = ensure(slow)
    assert (slow.writes, quick.writes) == (1, 1)
    assert (place / "rows.jsonl").read_text() == "{}\n"
    assert len(list(packs_directory().iterdir())) == 1


def test_what_a_killed_writer_left_is_removed_after_a_day() -> None:
    old, young = packs_directory() / ".a.1.x", packs_directory() / ".b.1.x"
    for directory in (old, young):
        directory.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    ensure(pack())
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_cannot_be_written_is_a_usage_error_with_the_way_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME to a directory with room"):
        ensure(pack())


def test_references_are_resolved_wherever_they_stand(cache: Path) -> None:
    data = {"a": "pack:x/rows.jsonl", "b": {"c": ["plain", "pack:x"]}, "d": 7}
    found = resolve_all(data, FakePlugins())  # type: ignore[arg-type]
    place = cache / "rollhook/packs/digest-of-x-[]"
    assert found == {"a": f"{place}/rows.jsonl", "b": {"c": ["plain", str(place)]}, "d": 7}


def test_progress_is_shown_on_a_terminal() -> None:
    screen = io.StringIO()
    ensure(pack(), name="words", console=Console(file=screen, force_terminal=True))
    assert "writing pack words" in screen.getvalue()


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("data/rows.jsonl", None),
        ("pack:pocket", PackReference("pocket")),
        ("pack:pocket/", PackReference("pocket")),
        ("pack:pocket/demos.jsonl", PackReference("pocket", {}, "demos.jsonl")),
        (
            "pack:pocket?noise=0.5&seed=1/demos.jsonl",
            PackReference("pocket", {"noise": "0.5", "seed": "1"}, "demos.jsonl"),
        ),
    ],
)
def test_references(text: str, reference: PackReference | None) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize("text", ["pack:", "pack:/x", "pack:pocket/../secret", "pack:pocket//etc/passwd"])
def test_a_reference_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a pack reference: write pack:NAME/FILE"):
        parse_reference(text)


def test_a_reference_becomes_a_path_and_a_plain_path_stays() -> None:
    plugins: Any = FakePlugins()
    path = resolve("pack:p?seed=1/rows.jsonl", plugins)
    assert path.read_text() == "{}\n"
    assert path.parent.name == "digest-of-p-[('seed', '1')]"
    assert plugins.added == [("pack", "p")]
    assert resolve("some/where.jsonl", plugins) == Path("some/where.jsonl")


def test_a_file_that_a_pack_has_not_is_named_with_those_that_it_has() -> None:
    with pytest.raises(UsageError, match=r"pack p has no file 'nope.jsonl'; it has rows.jsonl"):
        resolve("pack:p/nope.jsonl", FakePlugins())  # type: ignore[arg-type]
