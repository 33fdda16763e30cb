"""The script that ends what runs in a sandbox, against processes that look like none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollhook.sandbox import detached_scripts
from rollhook.sandbox.scripts import kill_argv, parse_killed

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)"
)

_ROOM = ["bwrap", "--unshare-pid", "--unshare-user", "--bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
#: its first thread has ended, so that the kernel shows it as a zombie, and another goes on
_HEADLESS = """
import ctypes, threading, time
threading.Thread(target=lambda: (print("ready", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""
_NAMED = "import time; open('/proc/self/comm', 'w').write({!r}); print('ready', flush=True); time.sleep(600)"
_LONG = "import time; print('ready', flush=True); time.sleep(600)"

HIDDEN = {
    "a process without its first thread": [_HEADLESS],
    "a name with a line break": [_NAMED.format("x\n) Z 1 1")],
    "a name like the state of a zombie": [_NAMED.format("x) Z 1 1 1 1")],
    "a name that a shell expands": [_NAMED.format("* $(id) `")],
    "long command lines": [_LONG, *["x" * 100_000] * 15],
}


#: starts argv some times, runs the script, and ends well when that has killed all of them
_INSIDE = """
import json, os, subprocess, sys
count, argv, kill = json.load(sys.stdin)
made = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(count)]
for each in made:
    each.stdout.readline()
    while b"Z" not in open(f"/proc/{each.pid}/stat", "rb").read() and "pthread_exit" in argv[2]:
        pass
said = subprocess.run([*kill, f"1 {os.getpid()}"], stdout=subprocess.PIPE)
sys.stdout.buffer.write(said.stdout)
sys.stdout.flush()
survived = [each for each in made if each.poll() is None]
for each in survived:
    each.kill()
sys.exit(len(survived))
"""


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_looks_like_no_process_is_killed(kind: str) -> None:
    count = 20 if kind == "long command lines" else 1
    task = (count, [sys.executable, "-c", *HIDDEN[kind]], kill_argv("", frozenset())[:-1])
    result = subprocess.run(
        [*_ROOM, sys.executable, "-c", _INSIDE],
        input=json.dumps(task).encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    killed, left = parse_killed(result.stdout)
    assert (len(killed), left, result.returncode) == (count, 0, 0), result.stderr
    assert len(result.stdout) < 16 << 10


KERNEL_THREAD = 0x00200000 | 0x00000040
#: the largest pids there may be, so that nothing has them
ORDINARY, THREAD = 4194301, 4194302


def made_up(proc: Path, pid: int, name: str, *, flags: int = 0x00400000, environ: bytes = b"") -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "stat").write_text(f"{pid} ({name}) S 2 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0\n")
    (directory / "cmdline").write_bytes(b"" if flags & 0x00200000 else name.encode() + b"\0")
    (directory / "environ").write_bytes(environ)


def killed_in(proc: Path, kill: Sequence[str]) -> tuple[list[tuple[int, str]], int]:
    """Run a script where `proc` stands for /proc; its signals reach nothing."""
    argv = ["bwrap", "--unshare-pid", "--ro-bind", "/", "/", "--bind", str(proc), "/proc", "--dev", "/dev"]
    return parse_killed(subprocess.run([*argv, *kill], capture_output=True, timeout=60, check=False).stdout)


def test_threads_of_the_kernel_are_left_alone(tmp_path: Path) -> None:
    made_up(tmp_path, 2, "kthreadd", flags=KERNEL_THREAD)
    made_up(tmp_path, THREAD, "kworker/0:1 (odd", flags=KERNEL_THREAD)
    assert killed_in(tmp_path, kill_argv("", frozenset({1}))) == ([], 0)


def test_an_ordinary_process_beside_them_is_named(tmp_path: Path) -> None:
    made_up(tmp_path, THREAD, "kworker/0:1", flags=KERNEL_THREAD)
    made_up(tmp_path, ORDINARY, "forger")
    killed, left = killed_in(tmp_path, kill_argv("", frozenset({1})))
    assert killed == [(ORDINARY, "forger")]
    assert left == 1, "a made-up process does not end"


def test_what_a_script_of_our_own_has_started_is_killed_and_not_named(tmp_path: Path) -> None:
    """A look that arrives late, whose pipeline is there only after looks were cleared away."""
    helper = b"PATH=/bin\0RH_LOOK=/var/tmp/.rollhook-1f\0"
    made_up(tmp_path, THREAD, "head -c 1048576", environ=helper)
    made_up(tmp_path, ORDINARY, "forger", environ=helper.replace(b"1f", b"2e"))
    script = detached_scripts.kill_tree("/var/tmp/.rollhook-1f", "", frozenset({1}))
    assert killed_in(tmp_path, ["sh", "-c", script]) == ([(ORDINARY, "forger")], 2)


def test_what_ends_before_it_is_named_was_not_killed(tmp_path: Path) -> None:
    proc, programs = tmp_path / "proc", tmp_path / "programs"
    made_up(proc, ORDINARY, "brief")
    ended = (proc / str(ORDINARY) / "stat").read_text().replace(") S ", ") Z ").strip()
    programs.mkdir()
    (programs / "tr").write_text(f"#!/bin/sh\necho '{ended}' > /proc/{ORDINARY}/stat\n")
    (programs / "tr").chmod(0o755)
    path = f"PATH={programs}:{os.environ['PATH']}"
    assert killed_in(proc, ["env", path, *kill_argv("", frozenset({1}))]) == ([], 0)
