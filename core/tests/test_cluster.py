"""One real Ray: objects and processes placed on it, their failures, and that nothing outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollhook.cluster import PREFIX, Cluster, ProcessDiedError
from rollhook.errors import BudgetExceeded, RollhookError, TrainerError

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Counter:
    """A resident object."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise TrainerError("a counter starts at 0 or above", kind="user")
        self.value = start

    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise KeyError("no such thing")

    def fail_on_purpose(self) -> None:
        raise TrainerError("the loss is not finite at step 3", kind="user")

    def fail_unpicklably(self) -> None:
        raise BudgetExceeded("out of time", node="agent")

    def die(self) -> None:
        print("last words", flush=True)
        os._exit(3)


COUNTER = f"{__name__}:Counter"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def test_ray_is_imported_by_no_import_of_ours() -> None:
    code = "import sys, rollhook.cluster; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_cluster_from_start_to_stop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.environ.copy()
    others = descendants(os.getpid())  # such as the server that other tests fork from
    cluster = await Cluster.start(tmp_path / "scratch" / ("long" * 30), cpus=2)
    scratch = tmp_path / "scratch" / ("long" * 30)
    try:
        # an object in a process of its own
        counter = await cluster.place(COUNTER, 5, name="counter", env={"ROLLHOOK_TEST_KEY": "here"})
        assert await counter.call("add", 2, times=3) == 11
        assert await counter.call("environment", "ROLLHOOK_TEST_KEY") == "here"
        pid = await counter.call("pid")
        assert pid != os.getpid()
        # its failures come back in one sentence, our own as they are
        with pytest.raises(
            RollhookError, match=r"^counter\.fail failed: KeyError: 'no such thing'"
        ) as caught:
            await counter.call("fail")
        assert "\n" not in str(caught.value)
        assert "no such thing" in (scratch / "counter.log").read_text()
        with pytest.raises(TrainerError, match="not finite at step 3") as own:
            await counter.call("fail_on_purpose")
        assert own.value.kind == "user"
        with pytest.raises(RollhookError, match="out of time"):
            await counter.call("fail_unpicklably")
        with pytest.raises(TrainerError, match="starts at 0 or above"):
            await cluster.place(COUNTER, -1, name="negative")
        with pytest.raises(RollhookError, match="nowhere"):
            await cluster.place("nowhere.at_all:Thing", name="absent")
        # its death too
        with pytest.raises(ProcessDiedError, match="last words"):
            await counter.call("die")
        # a program that dies with its actor, and not before
        log = tmp_path / "sleeper.log"
        argv = ["sh", "-c", 'echo "$GREETING"; exec sleep 600']
        sleeper = await cluster.placement.start_process("sleeper", argv, env={"GREETING": "hello"}, log=log)
        first = await sleeper.pid()
        assert await sleeper.alive()
        assert await until(lambda: log.read_text() == "hello\n")
        await sleeper.restart()
        second = await sleeper.pid()
        assert first != second
        assert await until(lambda: not running(first))
        os.kill(second, signal.SIGKILL)
        assert await until(lambda: not running(second))
        assert not await sleeper.alive()
        await sleeper.restart()
        third = await sleeper.pid()
        actor = parent(third)
        os.kill(actor, signal.SIGKILL)
        assert await until(lambda: not running(third))
        assert not await sleeper.alive()
        await sleeper.restart()
        last = await sleeper.pid()
        ports = {cluster.placement.free_port() for _ in range(20)}
        assert len(ports) == 20
        children = [pid for pid in descendants(os.getpid()) if pid not in others]
    finally:
        started = time.monotonic()
        await cluster.stop()
    assert time.monotonic() - started < 15
    assert await until(lambda: not any(map(running, [*children, last])))
    await cluster.stop()
    assert (scratch / "ray" / "raylet.out").exists()
    assert os.environ.copy() == before
    assert capfd.readouterr() == ("", "")


KILLED = """
import asyncio, sys, time
from pathlib import Path
from rollhook.cluster import Cluster
async def main():
    cluster = await Cluster.start(Path(sys.argv[1]), cpus=1)
    process = await cluster.placement.start_process(
        "sleeper", ["sleep", "600"], env={}, log=Path(sys.argv[1]) / "log")
    print(await process.pid(), flush=True)
    time.sleep(600)
asyncio.run(main())
"""


async def test_a_driver_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert driver.stdout is not None
    sleeper = int(await asyncio.wait_for(driver.stdout.readline(), 60))
    left = [pid for pid in descendants(driver.pid) if not gives_up_late(pid)]
    assert running(sleeper)
    assert sleeper in left
    assert len(left) > 4
    driver.kill()
    await driver.wait()
    assert await until(lambda: not any(map(running, left)))
    # its directory is swept by the next start
    temporary = list(Path("/tmp").glob(f"{PREFIX}{driver.pid}-*"))
    from rollhook.cluster import _sweep_temporary

    _sweep_temporary()
    assert not any(path.exists() for path in temporary)


async def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RollhookError, match=r"pip install 'rollhook\[ray\]'") as caught:
        await Cluster.start(tmp_path)
    assert caught.value.kind == "user"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gives_up_late(pid: int) -> bool:
    """Ray's own agents wait a minute for a dead instance to come back, then end themselves."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").endswith(b"Agent")


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(parent(int(path.name)), []).append(int(path.name))
        except OSError:
            continue
    found, stack = [], [pid]
    while stack:
        for child in children.get(stack.pop(), []):
            found.append(child)
            stack.append(child)
    return found


def test_logs_that_cannot_be_kept_hide_nothing_and_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "temp" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("x")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "ray").write_text("in the way")
    cluster = Cluster(tmp_path / "scratch", tmp_path / "temp", ThreadPoolExecutor(1), {})
    cluster._clean()
    assert not (tmp_path / "temp").exists()
    assert "logs could not be kept" in caplog.text
