"""The script that ends what runs in a sandbox, against processes that look like none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

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
