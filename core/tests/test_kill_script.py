"""The script that kills: what it leaves alone, shown by a /proc that is made up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollhook.sandbox import scripts

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)"
)

KERNEL_THREAD = 0x00200000 | 0x00000040
#: the largest pids there may be, so that nothing has them
ORDINARY, THREAD = 4194301, 4194302


def made_up(proc: Path, pid: int, name: str, flags: int, parent: int) -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "stat").write_text(f"{pid} ({name}) S {parent} 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0\n")
    (directory / "cmdline").write_bytes(b"" if flags & 0x00200000 else name.encode() + b"\0")
    (directory / "environ").write_bytes(b"")


def killed_in(proc: Path, own: frozenset[int]) -> tuple[list[tuple[int, str]], int]:
    """Run the script where `proc` stands for /proc; its signals reach nothing."""
    argv = ["bwrap", "--unshare-pid", "--ro-bind", "/", "/", "--bind", str(proc), "/proc", "--dev", "/dev"]
    done = subprocess.run([*argv, *scripts.kill_argv("", own)], capture_output=True, timeout=60, check=False)
    return scripts.parse_killed(done.stdout)


def test_threads_of_the_kernel_are_left_alone(tmp_path: Path) -> None:
    made_up(tmp_path, 2, "kthreadd", KERNEL_THREAD, 0)
    made_up(tmp_path, THREAD, "kworker/0:1 (odd", KERNEL_THREAD, 2)
    assert killed_in(tmp_path, frozenset({1})) == ([], 0)


def test_an_ordinary_process_beside_them_is_named(tmp_path: Path) -> None:
    made_up(tmp_path, THREAD, "kworker/0:1", KERNEL_THREAD, 2)
    made_up(tmp_path, ORDINARY, "forger", 0x00400000, 1)
    killed, left = killed_in(tmp_path, frozenset({1}))
    assert killed == [(ORDINARY, "forger")]
    assert left == 1, "a made-up process does not end"
