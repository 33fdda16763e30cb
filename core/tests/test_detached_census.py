"""Scripts of this package that still run in a sandbox when all in it is killed are no part of a census."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.sandbox.detached import DetachedTimes
from rollhook.sandbox.detached_sandbox import DetachedSandbox

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)"
)

_JOIN = ["--user", "--preserve-credentials", "--mount", "--pid", "--ipc", "--uts"]


class Room(DetachedSandbox):
    """Processes of this machine apart from all others. A request may be left: its script goes on, unread."""

    def __init__(self, pid: int, directory: Path) -> None:
        super().__init__("room", SandboxSpec(workdir=str(directory)), DetachedTimes(poll=5.0))
        self.pid = pid
        self.left: list[subprocess.Popen[bytes]] = []
        #: whether a script is left
        self.leave: Callable[[str], bool] = lambda _: False

    def begin(self, script: str) -> subprocess.Popen[bytes]:
        argv = ["nsenter", "--target", str(self.pid), *_JOIN, "setsid", "sh", "-c", script]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    async def run(self, script: str, *, timeout: float) -> str:
        process = self.begin(script)
        if self.leave(script):
            self.left.append(process)
            await asyncio.Event().wait()
        return (await asyncio.to_thread(process.communicate))[0].decode()

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(Path(path).write_bytes, data)

    async def get(self, path: str) -> bytes:
        return await asyncio.to_thread(Path(path).read_bytes)

    async def alive(self) -> bool:
        return True

    def running(self) -> list[str]:
        """Return the names of all that runs here."""
        said = self.begin("cat /proc/[0-9]*/stat 2> /dev/null").communicate()[0].decode()
        found = re.findall(r"^\d+ \((.*)\) (\S)", said, re.MULTILINE)
        return [name for name, state in found if state not in "ZX"]

    async def runs(self, name: str) -> None:
        while name not in await asyncio.to_thread(self.running):
            await asyncio.sleep(0.01)


@pytest.fixture
def room_pid(tmp_path: Path) -> Iterator[int]:
    theirs, told = os.pipe()
    argv = ["bwrap", "--unshare-pid", "--unshare-user", "--uid", "0", "--gid", "0", "--bind", "/", "/"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--as-pid-1", "--die-with-parent", "--info-fd", str(told)]
    first = "echo ready; trap '' CHLD; exec sleep infinity"
    with subprocess.Popen([*argv, "sh", "-c", first], stdout=subprocess.PIPE, pass_fds=[told]) as process:
        os.close(told)
        assert process.stdout is not None
        process.stdout.readline()
        with os.fdopen(theirs) as info:
            yield int(json.load(info)["child-pid"])
        process.kill()


@pytest.fixture
async def room(room_pid: int, tmp_path: Path) -> AsyncIterator[Room]:
    made = Room(room_pid, tmp_path)
    await made.settle()
    yield made
    await made.commands.aclose()
    for process in made.left:
        process.kill()
        process.communicate()


async def test_a_look_that_goes_on_after_its_client_left(room: Room) -> None:
    sandbox = Sandbox(room, capabilities=frozenset({"isolation"}))
    process = await sandbox.spawn(["sh", "-c", "sleep 1; head -c 3000000 /dev/zero; exec sleep 600"])
    room.leave = lambda script: "setsid" not in script
    taken = asyncio.ensure_future(anext(aiter(process.stdout())))
    await asyncio.wait_for(room.runs("base64"), 20)
    room.leave = lambda _: False
    taken.cancel()
    await process.aclose()
    assert [command for _, command in (await sandbox.quiesce()).killed] == ["sleep 600"]
    assert "base64" not in room.running()


async def test_a_file_that_is_read_no_more(room: Room, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(900_000))
    sandbox = Sandbox(room, capabilities=frozenset({"isolation"}))
    room.leave = lambda _: True
    reading = asyncio.create_task(sandbox.read("big"))
    await asyncio.wait_for(room.runs("base64"), 20)
    room.leave = lambda _: False
    reading.cancel()
    assert (await sandbox.quiesce()).killed == ()
    assert "base64" not in room.running()
