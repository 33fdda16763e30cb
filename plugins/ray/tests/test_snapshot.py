"""Snapshots of code: what is in them, and that one never changes."""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path

import pytest

from rollhook.errors import UsageError
from rollhook_ray.snapshot import MARKER, RECORD, read_record, take


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    source = tmp_path / "checkout"
    (source / "verl/trainer").mkdir(parents=True)
    (source / "verl/__init__.py").write_text("VERSION = 1\n")
    (source / "verl/trainer/main_ppo.py").write_text("print('ppo')\n")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "verl/latest").symlink_to("trainer")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("[core]\n")
    (source / "verl/__pycache__").mkdir()
    (source / "verl/__pycache__/x.cpython-311.pyc").write_bytes(b"\0")
    (source / ".pytest_cache").mkdir()
    (source / ".pytest_cache/x").write_text("x")
    return source


def listing(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_a_snapshot_is_the_tree_without_git_and_caches_and_with_a_marker(tree: Path, tmp_path: Path) -> None:
    taken = take(tree, "codeA", root=tmp_path / "private")
    assert taken.path == tmp_path / "private/common/code/verl/codeA"
    assert taken.written
    names = set(listing(taken.path))
    assert names == {
        *("verl/__init__.py", "verl/trainer/main_ppo.py", "verl/latest", "run.sh"),
        *(f"{MARKER}.py", RECORD),
    }
    assert os.readlink(taken.path / "verl/latest") == "trainer"
    assert os.access(taken.path / "run.sh", os.X_OK)
    spec = importlib.util.spec_from_file_location("marker_of_a", taken.path / f"{MARKER}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.MARKER == "codeA"
    assert read_record(taken.path)["digest"] == taken.digest


def test_the_same_tree_again_changes_nothing(tree: Path, tmp_path: Path) -> None:
    first = take(tree, "codeA", root=tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in first.path.rglob("*")}
    (tree / ".git/config").write_text("[other]\n")  # not of the code
    again = take(tree, "codeA", root=tmp_path)
    assert not again.written
    assert again.digest == first.digest
    assert {path: path.lstat().st_mtime_ns for path in first.path.rglob("*")} == before


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_another_tree_is_refused_under_the_same_id(tree: Path, tmp_path: Path, change: str) -> None:
    taken = take(tree, "codeA", root=tmp_path)
    before = listing(taken.path)
    if change == "content":
        (tree / "verl/__init__.py").write_text("VERSION = 2\n")
    elif change == "mode":
        (tree / "run.sh").chmod(0o644)
    elif change == "name":
        (tree / "run.sh").rename(tree / "go.sh")
    else:
        (tree / "verl/latest").unlink()
        (tree / "verl/latest").symlink_to("__init__.py")
    with pytest.raises(UsageError, match=r"codeA: another snapshot is there, .* choose another --id"):
        take(tree, "codeA", root=tmp_path)
    assert listing(taken.path) == before


def test_a_snapshot_that_was_changed_is_not_taken_for_the_tree(tree: Path, tmp_path: Path) -> None:
    taken = take(tree, "codeA", root=tmp_path)
    (taken.path / "verl/__pycache__").mkdir()  # as Python leaves it
    assert take(tree, "codeA", root=tmp_path).digest == taken.digest
    (taken.path / "verl/__init__.py").write_text("VERSION = 3\n")
    with pytest.raises(UsageError, match="codeA was changed since it was taken"):
        take(tree, "codeA", root=tmp_path)


def test_a_directory_that_is_no_snapshot_is_not_overwritten(tree: Path, tmp_path: Path) -> None:
    place = tmp_path / "common/code/verl/codeA"
    place.mkdir(parents=True)
    (place / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="something that is no snapshot is there"):
        take(tree, "codeA", root=tmp_path)
    assert listing(place) == {"mine.txt": b"mine"}


def test_a_snapshot_of_a_snapshot_gets_its_own_marker(tree: Path, tmp_path: Path) -> None:
    first = take(tree, "codeA", root=tmp_path)
    second = take(first.path, "codeB", root=tmp_path)
    assert second.digest == first.digest
    assert (second.path / f"{MARKER}.py").read_text() == "MARKER = 'codeB'\n"


def test_two_at_once_give_one_whole_snapshot(tree: Path, tmp_path: Path) -> None:
    for number in range(50):
        (tree / f"verl/module_{number}.py").write_text(f"N = {number}\n" * 100)
    written: list[bool] = []
    threads = [
        threading.Thread(target=lambda: written.append(take(tree, "codeA", root=tmp_path).written))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == [False, False, False, True]
    code = tmp_path / "common/code/verl"
    assert [path.name for path in code.iterdir()] == ["codeA"]
    assert len(list((code / "codeA/verl").glob("module_*.py"))) == 50


def test_what_fails_half_way_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    os.mkfifo(tree / "verl/pipe")
    with pytest.raises(UsageError, match="pipe is neither file nor directory"):
        take(tree, "codeA", root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside"])
def test_a_link_out_of_the_tree_is_refused(tree: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").write_text("secret")
    (tree / "verl/data").symlink_to(target)
    with pytest.raises(UsageError, match="verl/data is a link out of the tree"):
        take(tree, "codeA", root=tmp_path / "root")


def test_the_package_itself_is_told_from_its_parent(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"holds no package or module verl; give its parent {tree}"):
        take(tree / "verl", "codeA", root=tmp_path)
    with pytest.raises(UsageError, match="no package or module reward; give the directory above"):
        take(tree, "codeA", name="reward", root=tmp_path)


def test_a_snapshot_is_not_made_within_the_tree(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"lies within .* give a --root outside of it"):
        take(tree, "codeA", root=tree / "private")
    assert not (tree / "private").exists()


def test_the_path_of_a_snapshot_is_absolute(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert take(tree, "codeA", root="private").path == tmp_path / "private/common/code/verl/codeA"


@pytest.mark.parametrize(
    ("code_id", "proposal"),
    [
        ("../x", "'x'"),
        ("a/b", "'a-b'"),
        ("", "'codeA'"),
        ("代码", "'codeA'"),
        ("a" * 64, "'" + "a" * 63 + "'"),
    ],
)
def test_an_id_that_is_no_name_is_refused_with_one_that_is(
    tree: Path, tmp_path: Path, code_id: str, proposal: str
) -> None:
    with pytest.raises(UsageError, match=f"try {proposal}"):
        take(tree, code_id, root=tmp_path)
