"""Which limits are in force, against trees of files that look like control groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import SandboxError
from rollhook_local.limits import GroupsV1, GroupsV2, NoGroups, Wanted, detect, remove_groups

MIB = 1 << 20
WANTED = Wanted(memory_bytes=64 * MIB, pids=100, cpus=0.5, file_bytes=MIB)


class FakeGroup:
    """Makes the files that the kernel would put into a new group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Path.mkdir

        def mkdir(path: Path, *args: Any, **options: Any) -> None:
            real(path, *args, **options)
            if path.name.startswith("rollhook-"):
                (path / "cgroup.procs").write_text("")

        bare = Path.rmdir

        def rmdir(path: Path) -> None:
            for file in path.iterdir() if path.name.startswith("rollhook-") else ():
                file.unlink()
            bare(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)


@pytest.fixture
def fake_groups(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    return FakeGroup(monkeypatch)


def unified(root: Path, *, controllers: str = "cpu memory pids") -> str:
    """A version 2 tree whose group /user/session hands controllers on; returns /proc/self/cgroup."""
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    leaf = root / "user" / "session" / "here"
    leaf.mkdir(parents=True)
    (root / "cgroup.subtree_control").write_text("")
    (leaf.parent / "cgroup.subtree_control").write_text(controllers + "\n")
    (leaf / "cgroup.subtree_control").write_text("\n")
    return "0::/user/session/here\n"


def test_version_2_writes_one_group(tmp_path: Path, fake_groups: FakeGroup) -> None:
    limits = detect(tmp_path, unified(tmp_path))
    assert isinstance(limits, GroupsV2)
    assert limits.capabilities == {"memory_limit", "pids_limit", "cpu_limit"}
    (group,), (opened,) = limits.make("x", WANTED)
    assert group == tmp_path / "user" / "session" / "rollhook-x"
    os.write(opened, b"0")
    os.close(opened)
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {
        "cgroup.procs": "0",
        "memory.max": str(64 * MIB),
        "memory.swap.max": "0",
        "pids.max": "100",
        "cpu.max": "50000 100000",
    }


def test_version_2_that_hands_nothing_on_is_not_used(tmp_path: Path) -> None:
    assert isinstance(detect(tmp_path, unified(tmp_path, controllers="io")), NoGroups)


def test_version_2_without_cpu_limits_the_rest(tmp_path: Path, fake_groups: FakeGroup) -> None:
    limits = detect(tmp_path, unified(tmp_path, controllers="memory pids"))
    assert limits.capabilities == {"memory_limit", "pids_limit"}
    (group,), (opened,) = limits.make("x", WANTED)
    os.close(opened)
    assert not (group / "cpu.max").exists()


def test_version_1_writes_a_group_per_controller(tmp_path: Path, fake_groups: FakeGroup) -> None:
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "some").mkdir(parents=True)
    limits = detect(tmp_path, "4:memory:/some\n3:pids:/\n2:cpu,cpuacct:/gone\n0::/\n")
    assert isinstance(limits, GroupsV1)
    groups, opened = limits.make("x", WANTED)
    for fd in opened:
        os.close(fd)
    assert groups == [
        tmp_path / "memory" / "some" / "rollhook-x",
        tmp_path / "pids" / "rollhook-x",
        tmp_path / "cpu" / "rollhook-x",
    ]
    assert (groups[0] / "memory.limit_in_bytes").read_text() == str(64 * MIB)
    assert (groups[1] / "pids.max").read_text() == "100"
    assert (groups[2] / "cpu.cfs_quota_us").read_text() == "50000"


def test_what_is_not_wanted_makes_no_group(tmp_path: Path, fake_groups: FakeGroup) -> None:
    limits = detect(tmp_path, unified(tmp_path))
    assert limits.make("x", Wanted()) == ([], [])


def test_without_groups_limits_are_per_process(tmp_path: Path) -> None:
    limits = detect(tmp_path, "")
    assert isinstance(limits, NoGroups)
    assert limits.capabilities == frozenset()
    assert limits.make("x", WANTED) == ([], [])
    assert limits.rlimits(WANTED) == {"RLIMIT_FSIZE": [MIB, MIB], "RLIMIT_DATA": [64 * MIB, 64 * MIB]}
    assert "per process" in limits.name


def test_groups_that_cannot_be_made_leave_nothing(tmp_path: Path, fake_groups: FakeGroup) -> None:
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller).mkdir()
    (tmp_path / "pids" / "rollhook-x").mkdir()
    (tmp_path / "pids" / "rollhook-x" / "cgroup.procs").unlink()
    limits = detect(tmp_path, "4:memory:/\n3:pids:/\n2:cpu:/\n")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="limits of a sandbox"):
        limits.make("x", Wanted(memory_bytes=MIB, pids=5))
    assert len(os.listdir("/proc/self/fd")) == before


def test_groups_in_use_are_an_error_that_names_them(tmp_path: Path) -> None:
    group = tmp_path / "rollhook-x"
    group.mkdir()
    (group / "cgroup.procs").write_text("1")
    with pytest.raises(SandboxError, match="rollhook-x could not be removed"):
        remove_groups([group], 0.0)
    remove_groups([tmp_path / "absent"], 0.0)
