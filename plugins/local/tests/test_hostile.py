"""What a hostile command tries against the keeper, other sandboxes and its own limits."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook_local import LocalSandboxConfig
from rollhook_local.backend import LocalSandboxes
from rollhook_local.programs import which

MODES = [
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(
            which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)"
        ),
    ),
    pytest.param("unshare", marks=pytest.mark.skipif(which("unshare") is None, reason="no unshare")),
]
pytestmark = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of this test's sandboxes only."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


@asynccontextmanager
async def two_boxes(scratch: Path, mode: str, **keys: Any) -> AsyncIterator[list[Sandbox]]:
    config = LocalSandboxConfig.model_validate({"mode": mode, **keys})
    backend = LocalSandboxes(config, BuildContext(logging.getLogger("test"), scratch, scratch))
    await backend.start()
    boxes = []
    try:
        for _ in range(2):
            raw = await backend.create(SandboxSpec())
            boxes.append(Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete))
        yield boxes
    finally:
        for box in boxes:
            await box.close()
        await backend.aclose()


async def test_a_command_inherits_its_three_streams_only(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode, memory_bytes=256 << 20) as boxes:
        for box in boxes:
            await box.shell("sleep 1000 & sleep 0", timeout=10)
        for box in boxes:
            own = await box.exec(["/bin/sh", "-c", "echo /proc/self/fd/*"], timeout=10)
            numbers = {word.rpartition("/")[2] for word in own.text.split()}
            assert {"0", "1", "2"} <= numbers <= {"0", "1", "2", "3"}
            first = await box.shell("echo /proc/1/fd/*", timeout=10)  # which are there may be seen
            assert first.text.split() in (["/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/fd/2"], ["/proc/1/fd/*"])


CROWD = r"""
import os
for number in range(300):
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["{word}" * 100, "1000"])
"""


@pytest.mark.parametrize("word", [r"\x01", r"\U0001f600", r"\udcff", '\\"'])
async def test_a_crowd_with_odd_names_is_killed_and_told(tmp_path: Path, mode: str, word: str) -> None:
    async with two_boxes(tmp_path, mode) as (hostile, other):
        await hostile.exec(["python3", "-c", CROWD.replace("{word}", word)], timeout=20)
        killed = (await hostile.quiesce()).killed
        assert len(killed) >= 300
        assert any(command.endswith(" 1000") or len(command) > 50 for _, command in killed)
        for box in (hostile, other):
            assert (await box.shell("echo here", timeout=10)).text == "here\n"


async def test_very_many_directories_are_removed_without_holding_up_others(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode) as (hostile, other):
        assert (await hostile.shell("cd /tests && seq 20000 | xargs mkdir", timeout=20)).ok
        removing = asyncio.create_task(hostile.remove(["/tests"]))
        started = time.monotonic()
        await asyncio.sleep(0)
        assert (await other.shell("echo here", timeout=10)).text == "here\n"
        assert await removing == ["/tests"]
        assert time.monotonic() - started < 5


async def test_shared_memory_and_devices_are_no_way_past_the_disk_limit(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode, disk_bytes=8 << 20) as (hostile, _):
        for directory in ("/dev/shm", "/dev"):
            filled = await hostile.shell(f"head -c 12M /dev/zero > {directory}/file", timeout=20)
            assert not filled.ok, directory
        assert (await hostile.shell("rm -f /dev/file /dev/shm/file; echo x > /dev/shm/x", timeout=10)).ok
        assert (await hostile.shell("echo x > /dev/null && head -c 1 /dev/urandom | wc -c", timeout=10)).ok


KEYS = """
import ctypes, platform, sys
add, control = {"x86_64": (248, 250)}.get(platform.machine(), (217, 219))
libc = ctypes.CDLL(None)
for ring in (-3, -4, -5):
    if sys.argv[1] == "put":
        libc.syscall(add, b"user", b"answer", b"42", 2, ring)
    else:
        key = libc.syscall(control, 10, ring, b"user", b"answer", 0)
        room = ctypes.create_string_buffer(8)
        if libc.syscall(control, 11, key, room, 8) > 0:
            print(room.value)
"""


async def test_the_kernels_keys_pass_nothing_from_one_sandbox_to_the_next(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode) as (first, second):
        await first.exec(["python3", "-c", KEYS, "put"], timeout=20)
        assert (await second.exec(["python3", "-c", KEYS, "get"], timeout=20)).text == ""


REPLACE = """
for path in "$@"; do
  mv -T "$path" /aside || unlink "$path" || rmdir "$path" || ln -sfnT /tmp "$path" || continue
  echo "$path"
done 2>/dev/null
"""


@pytest.fixture
def tool() -> Iterator[Path]:
    """A directory of the host's to show, where sandboxes have nothing of their own."""
    if not os.access("/srv", os.W_OK):
        pytest.skip("/srv may not be written")
    with tempfile.TemporaryDirectory(dir="/srv", prefix="rollhook-test-") as directory:
        os.chmod(directory, 0o755)
        Path(directory, "tool").mkdir()
        Path(directory, "tool", "file").touch()
        yield Path(directory, "tool")


async def test_nothing_of_the_hosts_can_be_replaced(tmp_path: Path, mode: str, tool: Path) -> None:
    paths = ["/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc", "/proc", "/dev", "/tests", "/logs"]
    paths += ["/logs/verifier", str(tool), str(tool.parent), "/srv"]
    async with two_boxes(tmp_path, mode, read_only=[str(tool)]) as (hostile, _):
        there = [path for path in paths if (await hostile.shell(f"[ -e {path} ]", timeout=10)).ok]
        replaced = await hostile.exec(["/bin/sh", "-c", REPLACE, "sh", *there], timeout=20)
        assert replaced.text == ""
        assert (await hostile.shell(f"ls {tool}", timeout=10)).text.split() == ["file"]


ENDS = """
import os, resource
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
    try:
        resource.prlimit(1, limit, (0, 0))
    except PermissionError:
        print("refused")
assert resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
try:
    open("/proc/sys/kernel/pid_max", "w").write("301")
except OSError:
    print("refused")
for signal in range(1, 65):
    try:
        os.kill(1, signal)
    except OSError:
        pass
children = []
try:
    while len(children) < 400:
        child = os.fork()
        if child == 0:
            os.execv("/bin/sleep", ["sleep", "0.3"])
        children.append(child)
except OSError:
    pass
"""


async def test_process_1_cannot_be_ended_from_inside(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode, pids=300) as (hostile, _):
        result = await hostile.exec(["python3", "-c", ENDS], timeout=20)
        assert result.ok, result.error_text
        async with asyncio.timeout(20):  # the children take a while to end
            while not (await hostile.shell("sleep 0 & wait", timeout=10)).ok:
                pass
        assert await hostile.alive()
        assert result.text.count("refused") == 5
        assert (await hostile.shell("ulimit -n 100 && prlimit --nofile=50 true", timeout=10)).ok


FILL = """
for directory in /tests /logs /logs/verifier /work /dev/shm /tmp; do
  mkdir -p $directory; head -c 1G /dev/zero > $directory/full; i=0
  while [ $i -lt 20 ] && head -c 4096 /dev/zero > $directory/$i; do i=$((i+1)); done
  chmod 700 $directory; chown 1000 $directory
done 2>/dev/null
true
"""
PLACES = ["/logs/verifier/reward.json", "/logs/verifier", "/tests"]


async def test_a_full_disk_does_not_keep_the_verifier_from_judging(tmp_path: Path, mode: str) -> None:
    tests = tmp_path / "tests"
    (tests / "below").mkdir(parents=True)
    (tests / "below" / "test.sh").write_text("mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt")
    (tests / "data").write_bytes(bytes(100_000))
    async with two_boxes(tmp_path, mode, disk_bytes=8 << 20) as (hostile, _):
        assert await hostile.remove(PLACES) == []
        assert (await hostile.shell(FILL, timeout=30)).ok
        assert not (await hostile.shell("head -c 64K /dev/zero > /root/more", timeout=10)).ok
        assert await hostile.remove(PLACES) == PLACES[1:]
        modes = await hostile.shell("stat -c '%a %u' /tests /logs/verifier", timeout=10)
        assert modes.text == "755 0\n755 0\n"
        await hostile.upload_dir(tests, "/tests")
        assert (await hostile.shell("sh /tests/below/test.sh", timeout=10)).ok
        assert await hostile.read("/logs/verifier/reward.txt", limit=10) == b"0\n"
        assert await hostile.remove(["/logs", "/tests"]) == ["/logs", "/tests"]
        assert (await hostile.shell("ls -A /tests /logs/verifier; df /tests /logs/verifier", timeout=10)).ok


DEEP = """
import os
os.chdir("/tests")
for _ in range(30000):
    os.mkdir("d")
    os.chdir("d")
"""


async def test_a_tree_deeper_than_descriptors_go_is_removed(tmp_path: Path, mode: str) -> None:
    async with two_boxes(tmp_path, mode) as (hostile, _):
        assert (await hostile.exec(["python3", "-c", DEEP], timeout=20)).ok
        assert await hostile.remove(["/tests"]) == ["/tests"]
        assert await hostile.remove(["/tests"]) == []
