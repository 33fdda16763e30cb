"""Cases of the sandbox contract: commands that run out of time or are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from rollhook.testing.sandbox_case import GRACE, MakeBackend, SandboxCases, eventually, grows, one

#: a writer whose file grows until it is killed; ignores what can be ignored
WRITER = "trap '' TERM HUP INT; while :; do echo x >> {name}; sleep 0.03; done"


class TimeoutCases(SandboxCases):
    """The end of a command that does not end by itself."""

    async def test_a_timeout_is_a_result_in_time(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            started = asyncio.get_running_loop().time()
            result = await sandbox.shell("sleep 300; echo x", timeout=0.5)
            took = asyncio.get_running_loop().time() - started
            assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"")
            assert not result.ok
            assert 0.5 <= took < 0.5 + GRACE

    async def test_output_until_the_timeout_is_kept(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.shell("printf partial; printf problem >&2; sleep 300", timeout=1)
            if "separate_streams" in sandbox.capabilities:
                assert (result.stdout, result.stderr) == (b"partial", b"problem")
            assert b"partial" in result.stdout
            assert b"problem" in result.stdout + result.stderr
            assert result.timed_out

    async def test_a_timeout_kills_the_whole_tree(self, make_backend: MakeBackend) -> None:
        loop = WRITER.format(name="$1")
        async with one(make_backend) as sandbox:
            await sandbox.write("writer", f"#!/bin/sh\n{loop}\n".encode(), mode=0o755)
            result = await sandbox.shell(
                "./writer child & setsid ./writer session & nohup ./writer nohup >/dev/null 2>&1 & "
                "(setsid ./writer orphan & ) ; ./writer leader",
                timeout=1,
            )
            assert result.timed_out
            for name in ("child", "session", "nohup", "orphan", "leader"):
                assert not await grows(sandbox, name), f"{name} still runs"
            assert (await sandbox.quiesce()).killed == ()

    async def test_a_timeout_spares_other_commands(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            other = asyncio.create_task(sandbox.shell("sleep 1.5; echo other", timeout=60))
            assert (await sandbox.shell("sleep 300", timeout=0.3)).timed_out
            assert (await other).stdout == b"other\n"

    async def test_after_a_timeout_results_are_their_own(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            assert (await sandbox.shell("echo before; sleep 300; echo late", timeout=0.4)).timed_out
            assert (await sandbox.shell("echo after", timeout=30)).stdout == b"after\n"
            assert (await sandbox.shell("exit 3", timeout=30)).exit_code == 3
            assert (await sandbox.shell("echo x", timeout=30)).stdout == b"x\n"

    async def test_a_timeout_ends_endless_output(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["yes"], timeout=0.5)
            assert result.timed_out
            assert result.stdout.startswith(b"y\ny\n")

    async def test_a_timeout_with_unread_stdin_returns(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["sleep", "300"], stdin=b"x" * (8 << 20), timeout=0.5)
            assert result.timed_out

    async def test_a_cancelled_call_kills_its_command(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            call = asyncio.create_task(sandbox.shell(WRITER.format(name="file"), timeout=300))

            async def begun() -> bool:
                return (await sandbox.shell("test -s file", timeout=10)).ok

            assert await eventually(begun)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

            async def stopped() -> bool:
                return not await grows(sandbox, "file")

            assert await eventually(stopped)
