"""Commands that are started detached, over a connection that loses requests and replies."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.sandbox.detached import Detached, DetachedProcess, DetachedTimes
from rollhook.sandbox.detached_answers import parse
from rollhook.sandbox.detached_sandbox import DetachedSandbox
from rollhook.sandbox.detached_scripts import pauses
from rollhook.sandbox.output import Capture
from rollhook.sandbox.streams import feed, pump, sliced

pytestmark = pytest.mark.skipif(shutil.which("setsid") is None, reason="util-linux is not installed")


class Machine:
    """A link to this machine: each request is one /bin/sh; some are lost, before or after their effect."""

    def __init__(self, loss: float = 0.0, seed: int = 0) -> None:
        self.loss = loss
        self.random = random.Random(seed)
        self.requests = 0
        self.dead = False
        self.cut: float | None = None

    async def run(self, script: str, *, timeout: float) -> str:
        if self.dead:
            raise SandboxDead("the machine is gone")
        self.requests += 1
        lost = self.random.random() < self.loss and self.random.choice(["before", "after"])
        if lost == "before":
            raise SandboxError("connection reset", kind="retryable")
        call = asyncio.ensure_future(asyncio.to_thread(self.shell, script))
        try:  # as with a gateway, what was cut goes on in the machine
            async with asyncio.timeout(timeout if self.cut is None else self.cut):
                out = await asyncio.shield(call)
        except TimeoutError:
            raise SandboxError("cut", kind="retryable") from None
        if lost:
            raise SandboxError("connection reset", kind="retryable")
        return out

    @staticmethod
    def shell(script: str) -> str:
        argv = ["/bin/sh", "-c", script]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        return done.stdout.decode()

    async def put(self, path: str, data: bytes) -> None:
        self.requests += 1
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
        if self.random.random() < self.loss:
            raise SandboxError("connection reset", kind="retryable")


async def finish(process: DetachedProcess, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
    out, err = Capture(64 << 20), Capture(64 << 20)
    tasks = [
        asyncio.create_task(pump(process.stdout(), out)),
        asyncio.create_task(pump(process.stderr(), err)),
    ]
    if stdin is not None:
        tasks.append(asyncio.create_task(feed(process, sliced(stdin))))
    code = await process.wait()
    await asyncio.gather(*tasks)
    await process.aclose()
    return code, out.value(), err.value()


@pytest.fixture
async def detached(tmp_path: Path) -> AsyncIterator[Detached]:
    made = Detached(Machine(), base=str(tmp_path), times=DetachedTimes(poll=1.0, backoff_most=0.1))
    yield made
    await made.aclose()


async def test_a_short_command_takes_one_request(tmp_path: Path) -> None:
    detached = Detached(Machine(), base=str(tmp_path), times=DetachedTimes(first=20.0))
    process = await detached.start(["sh", "-c", "echo out; echo err >&2; exit 3"], cwd=str(tmp_path))
    assert await finish(process) == (3, b"out\n", b"err\n")
    assert isinstance(detached.link, Machine)
    assert detached.link.requests == 1


async def test_a_long_command_is_looked_after(detached: Detached, tmp_path: Path) -> None:
    text = "for i in 1 2 3; do echo $i; sleep 0.4; done; kill -TERM $$"
    process = await detached.start(["sh", "-c", text], cwd=str(tmp_path))
    assert await finish(process) == (143, b"1\n2\n3\n", b"")


@pytest.mark.parametrize("seed", range(2))
async def test_lost_requests_and_replies_run_nothing_twice(tmp_path: Path, seed: int) -> None:
    detached = Detached(
        Machine(0.4, seed), base=str(tmp_path), times=DetachedTimes(poll=0.2, backoff_first=0.01)
    )
    data = os.urandom(5_000_000)
    text = "echo ran >> log; cat | tee copy; echo done >&2"
    process = await detached.start(["sh", "-c", text], cwd=str(tmp_path), stdin=True)
    code, out, err = await finish(process, data)
    assert (code, out == data, err) == (0, True, b"done\n")
    assert (tmp_path / "log").read_bytes() == b"ran\n"


async def test_a_connection_that_is_cut_again_and_again_loses_nothing(tmp_path: Path) -> None:
    machine = Machine()
    machine.cut = 0.6
    detached = Detached(machine, base=str(tmp_path), times=DetachedTimes(poll=30, backoff_first=0.01))
    process = await detached.start(["sh", "-c", "echo ran >> log; sleep 2.5; echo end"], cwd=str(tmp_path))
    assert await finish(process) == (0, b"end\n", b"")
    assert (tmp_path / "log").read_text() == "ran\n"


async def test_megabytes_arrive_whole(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sh", "-c", "head -c 9000000 /dev/urandom | tee file"], cwd=str(tmp_path))
    code, out, _ = await finish(process)
    assert code == 0
    assert out == (tmp_path / "file").read_bytes()


async def test_the_middle_of_much_output_is_counted_not_fetched(detached: Detached, tmp_path: Path) -> None:
    text = "head -c 400000 /dev/zero | tr '\\0' a; head -c 300000000 /dev/zero | tr '\\0' b; printf the-end"
    process = await detached.start(["sh", "-c", text], cwd=str(tmp_path))
    process.keep_at_most(1000)
    out = Capture(1000)
    taken = asyncio.create_task(pump(process.stdout(), out))
    assert await process.wait() == 0
    await taken
    assert out.total == 300_400_007
    assert out.value() == b"a" * 500 + b"b" * 493 + b"the-end"
    assert isinstance(detached.link, Machine)
    assert detached.link.requests < 150


async def test_environment_and_arguments_arrive_as_they_are(detached: Detached, tmp_path: Path) -> None:
    env = {"A": "x'y\n$HOME @D@", "odd-name": "z", "EMPTY": ""}
    process = await detached.start(
        ["sh", "-c", 'printf "%s|" "$A" "$EMPTY" "$@"', "sh", "", "@ARGV@", "\u00fc\n'"],
        cwd=str(tmp_path),
        env=env,
    )
    assert (await finish(process))[1] == "x'y\n$HOME @D@|||@ARGV@|\u00fc\n'|".encode()
    process = await detached.start(["env"], cwd=str(tmp_path), env=env)
    assert b"odd-name=z\n" in (await finish(process))[1]


async def test_bytes_that_are_no_text_and_long_arguments_go_by_file(
    detached: Detached, tmp_path: Path
) -> None:
    words = [b"\xff\xfe".decode("utf-8", "surrogateescape"), "y" * 100_000]
    process = await detached.start(["printf", "%s,", *words], cwd=str(tmp_path))
    assert (await finish(process))[1] == b"\xff\xfe," + b"y" * 100_000 + b","


async def test_what_cannot_run_is_said_as_a_shell_does(detached: Detached, tmp_path: Path) -> None:
    code, _, err = await finish(await detached.start(["no-such-program"], cwd=str(tmp_path)))
    assert (code, b"no-such-program" in err) == (127, True)
    code, _, err = await finish(await detached.start(["/etc/passwd"], cwd=str(tmp_path)))
    assert (code, bool(err)) == (126, True)
    code, _, err = await finish(await detached.start(["true"], cwd=str(tmp_path / "absent")))
    assert (code, b"absent" in err) == (126, True)


async def test_a_command_can_be_interrupted_as_in_a_shell(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sh", "-c", "kill -INT $$; echo survived"], cwd=str(tmp_path))
    assert await finish(process) == (128 + signal.SIGINT, b"", b"")


async def test_an_unknown_user_is_refused(detached: Detached, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="nonesuch") as raised:
        await detached.start(["true"], cwd=str(tmp_path), user="nonesuch")
    assert raised.value.kind == "user"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: an ordinary user cannot become another")
async def test_a_command_runs_as_another_user(tmp_path: Path) -> None:
    detached = Detached(Machine(), base=str(tmp_path))
    for user, said in (("nobody", "nobody /nonexistent"), ("65533", "65533 /")):
        process = await detached.start(
            ["sh", "-c", "echo $(id -un 2>/dev/null || id -u) $HOME; cat"], cwd="/", user=user, stdin=True
        )
        out = (await finish(process, b"x"))[1].decode()
        assert out.split("\n")[0].split()[-1] == said.split()[-1]
        assert out.endswith("\nx")


async def test_a_conversation(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(
        ["sh", "-c", 'while read line; do echo "got $line"; done; exit 4'], cwd=str(tmp_path), stdin=True
    )
    lines = process.stdout()
    for word in ("one", "two"):
        await process.write_stdin(word.encode() + b"\n")
        assert await anext(lines) == f"got {word}\n".encode()
    await process.close_stdin()
    assert await process.wait() == 4


async def test_input_that_nobody_reads_ends_in_a_broken_pipe(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sh", "-c", "exec <&-; sleep 0.3; exit 5"], cwd=str(tmp_path), stdin=True)
    assert await finish(process, b"x" * 1_000_000) == (5, b"", b"")
    with pytest.raises(BrokenPipeError):
        await process.write_stdin(b"x")


async def test_a_killed_tree_is_no_part_of_the_backend(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(
        ["sh", "-c", "sleep 300 & sleep 301"], cwd=str(tmp_path), env={"ROLLHOOK_EXEC": "mark-1."}
    )
    killed = await detached.kill_tree("mark-1.", frozenset({1}))
    assert sorted(command.split()[-1] for _, command in killed if "sleep" in command)[-1] == "301"
    assert (await finish(process))[0] == 137
    assert await detached.kill_tree("mark-1.", frozenset({1})) == []


async def test_the_process_itself_is_killed(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sleep", "300"], cwd=str(tmp_path))
    await process.kill()
    assert (await finish(process))[0] == 137


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    class Slow(Machine):
        async def run(self, script: str, *, timeout: float) -> str:
            if "mkfifo" in script or "setsid" in script:
                await asyncio.sleep(0.3)
                await super().run(script, timeout=timeout)
                await asyncio.sleep(30)
            return await super().run(script, timeout=timeout)

    for after in (0.05, 0.9):
        detached = Detached(Slow(), base=str(tmp_path))
        log = tmp_path / f"log-{after}"
        call = asyncio.create_task(
            detached.start(
                ["sh", "-c", f"while :; do echo x >> {log}; sleep 0.02; done"],
                cwd="/",
                env={"ROLLHOOK_EXEC": f"cancelled-{after}."},
            )
        )
        await asyncio.sleep(after)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await detached.aclose()
        size = log.stat().st_size if log.exists() else 0
        await asyncio.sleep(0.3)
        assert (log.stat().st_size if log.exists() else 0) == size


async def test_a_dead_sandbox_is_told(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sleep", "300"], cwd=str(tmp_path), env={"ROLLHOOK_EXEC": "dead-1."})
    assert isinstance(detached.link, Machine)
    detached.link.dead = True
    with pytest.raises(SandboxDead):
        await process.wait()
    detached.link.dead = False
    await detached.kill_tree("dead-1.", frozenset({1}))


async def test_patience_has_an_end(tmp_path: Path) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    detached = Detached(Machine(loss=1.1), base=str(tmp_path), sleep=sleep, clock=lambda: now)
    detached.link.random.choice = lambda _: "before"  # type: ignore[attr-defined]
    with pytest.raises(SandboxError, match="reset"):
        await detached.start(["true"], cwd="/")
    assert 120 <= now < 130


async def test_as_long_is_waited_as_the_service_asks(tmp_path: Path) -> None:
    slept: list[float] = []

    class Throttled(Machine):
        async def run(self, script: str, *, timeout: float) -> str:
            if len(slept) < 2:
                error = SandboxError("too many requests", kind="retryable")
                error.retry_after = 7.0 if not slept else 4000.0  # type: ignore[attr-defined]
                raise error
            return await super().run(script, timeout=timeout)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    detached = Detached(Throttled(), base=str(tmp_path), sleep=sleep)
    assert (await finish(await detached.start(["true"], cwd="/")))[0] == 0
    assert slept == [7.0, 30.0]


async def test_finished_commands_are_cleared_away(detached: Detached, tmp_path: Path) -> None:
    left = Path(detached.base)
    for _ in range(20):
        await finish(await detached.start(["true"], cwd=str(tmp_path)))
    assert len(list(left.iterdir())) < 10
    await finish(await detached.start(["head", "-c", "2000000", "/dev/zero"], cwd=str(tmp_path)))
    await finish(await detached.start(["true"], cwd=str(tmp_path)))
    assert len(list(left.iterdir())) == 1


async def test_a_command_has_the_umask_of_the_sandbox(detached: Detached, tmp_path: Path) -> None:
    process = await detached.start(["sh", "-c", "umask"], cwd=str(tmp_path))
    said = subprocess.run(["sh", "-c", "umask"], stdout=subprocess.PIPE, check=True).stdout
    assert (await finish(process))[1] == said
    assert Path(detached.base).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1])
async def test_a_first_answer_that_may_be_all(tmp_path: Path, size: int) -> None:
    detached = Detached(Machine(), base=str(tmp_path), times=DetachedTimes(first=20.0))
    process = await detached.start(["sh", "-c", f"head -c {size} /dev/zero; echo err >&2"], cwd="/")
    assert await finish(process) == (0, bytes(size), b"err\n")


async def test_who_started_a_long_command_is_answered_while_it_runs(detached: Detached) -> None:
    process = await detached.start(
        ["sh", "-c", "echo begun; exec sleep 300"], cwd="/", env={"ROLLHOOK_EXEC": "long-1."}
    )
    assert await anext(process.stdout()) == b"begun\n"
    killed = await detached.kill_tree("long-1.", frozenset({1}))
    assert [command for _, command in killed] == ["sleep 300"]
    assert await process.wait() == 137
    await process.aclose()


@given(st.text(max_size=200), st.text(max_size=50))
def test_half_an_answer_is_never_taken(noise: str, tail: str) -> None:
    whole = "\nrollhook: 0 2 0 0\nb2s=\n\nrollhook: end\n"
    for cut in range(len(whole) - 1):
        with pytest.raises(SandboxError) as raised:
            parse(whole[:cut].replace("rollhook: end", ""))
        assert raised.value.kind == "retryable"
    if "rollhook: " not in noise:
        answer = parse(noise + whole + tail)
        assert (answer.code, answer.news, answer.sizes) == (0, (b"ok", b""), (2, 0))


@given(st.floats(0, 60))
def test_pauses_add_up(seconds: float) -> None:
    words = [float(word) for word in pauses(seconds).split()]
    assert sum(words) == pytest.approx(seconds, abs=0.011 * max(1, len(words)))
    assert all(word <= 0.25 for word in words)


async def test_a_command_does_not_wait_for_its_children(detached: Detached, tmp_path: Path) -> None:
    began = time.monotonic()
    process = await detached.start(
        ["sh", "-c", "sleep 300 & echo started"], cwd=str(tmp_path), env={"ROLLHOOK_EXEC": "child-1."}
    )
    assert await finish(process) == (0, b"started\n", b"")
    assert time.monotonic() - began < 20
    assert len(await detached.kill_tree("child-1.", frozenset({1}))) == 1


class Far(DetachedSandbox):
    """This machine with slow news of commands; that of `directory` prints its last before a kill."""

    def __init__(self, directory: Path) -> None:
        super().__init__("far", SandboxSpec(workdir=str(directory)))
        self.directory = directory

    async def run(self, script: str, *, timeout: float) -> str:
        if "left 0" in script:
            (self.directory / "go").touch()
            while not (self.directory / "printed").exists():
                await asyncio.sleep(0.01)
            return await asyncio.to_thread(Machine.shell, script)
        said = await asyncio.to_thread(Machine.shell, script)
        await asyncio.sleep(0.5)
        return said

    async def put(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    async def get(self, path: str) -> bytes:
        return Path(path).read_bytes()

    async def alive(self) -> bool:
        return True


async def test_what_was_printed_before_a_timeout_arrives_over_a_slow_line(tmp_path: Path) -> None:
    sandbox = Sandbox(Far(tmp_path), capabilities=frozenset({"isolation"}))
    text = "echo first; until [ -e go ]; do sleep 0.01; done; echo last; : > printed; exec sleep 300"
    result = await sandbox.shell(text, timeout=1.5)
    assert (result.timed_out, result.stdout) == (True, b"first\nlast\n")
