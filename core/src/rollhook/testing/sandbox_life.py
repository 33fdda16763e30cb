"""Cases of the sandbox contract: making, ending, keeping apart and limiting sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.sandbox_case import (
    GRACE,
    MakeBackend,
    SandboxCases,
    eventually,
    grows,
    make,
    one,
    require,
    started,
)

#: a capability -> a spec that needs it
BEYOND: dict[str, dict[str, Any]] = {
    "image": {"image": "debian:12"},
    "image_build": {"dockerfile": "FROM debian:12"},
    "user": {"user": "nobody"},
    "network_on": {"network": True},
    "network_allowlist": {"network_allow": ("example.org",)},
}


def labels() -> dict[str, str]:
    """Labels that no other sandbox carries."""
    return {"test": uuid.uuid4().hex, "kind": "contract"}


class LifeCases(SandboxCases):
    """Making and ending sandboxes."""

    async def test_32_sandboxes_at_once_are_their_own(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            mark = labels()
            sandboxes = await asyncio.gather(*(make(backend, labels=mark) for _ in range(32)))
            try:
                await asyncio.gather(*(box.write("name", box.id.encode()) for box in sandboxes))
                results = await asyncio.gather(*(box.exec(["cat", "name"], timeout=60) for box in sandboxes))
                assert [result.text for result in results] == [box.id for box in sandboxes]
                assert {info.id for info in await backend.list(mark)} == {box.id for box in sandboxes}
            finally:
                await asyncio.gather(*(box.close() for box in sandboxes))
            assert await backend.list(mark) == []

    async def test_a_cancelled_create_leaves_nothing(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            mark = labels()
            for turns in range(12):
                call = asyncio.create_task(backend.create(SandboxSpec(labels=mark)))
                await asyncio.sleep(turns * 0.002)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await backend.delete((await call).id)

            async def none_left() -> bool:
                return await backend.list(mark) == []

            assert await eventually(none_left)

    async def test_labels_find_a_sandbox(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            mark = labels()
            first = await make(backend, labels={**mark, "number": "1"})
            second = await make(backend, labels={**mark, "number": "2"})
            assert {info.id for info in await backend.list(mark)} == {first.id, second.id}
            (found,) = await backend.list({**mark, "number": "2"})
            assert found.id == second.id
            assert mark.items() <= dict(found.labels).items()
            assert await backend.list({**mark, "number": "3"}) == []
            await first.close()
            await second.close()

    async def test_another_client_lists_and_deletes(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend, started(make_backend) as other:
            mark = labels()
            sandbox = await make(backend, labels=mark)
            assert [info.id for info in await other.list(mark)] == [sandbox.id]
            await other.delete(sandbox.id)
            assert await other.list(mark) == []
            with pytest.raises(SandboxDead):
                await sandbox.exec(["true"], timeout=10)
            await sandbox.close()

    async def test_a_sandbox_outlives_its_client(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as other:
            mark = labels()
            async with started(make_backend) as backend:
                sandbox = await make(backend, labels=mark)
            assert [info.id for info in await other.list(mark)] == [sandbox.id]
            await other.delete(sandbox.id)
            assert await other.list(mark) == []

    async def test_what_it_cannot_do_is_refused(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            mark = labels()
            for capability, asked in BEYOND.items():
                if capability in backend.capabilities:
                    continue
                for call in (backend.create, backend.bake):
                    with pytest.raises(SandboxError) as raised:
                        await call(SandboxSpec(labels=mark, **asked))
                    assert raised.value.kind == "user", asked
            assert await backend.list(mark) == []

    async def test_baking_twice_is_a_success(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            mark = labels()
            names = await asyncio.gather(*(backend.bake(SandboxSpec(labels=mark)) for _ in range(3)))
            assert len(set(names)) == 1
            assert await backend.bake(SandboxSpec(labels=mark)) == names[0]
            assert await backend.list(mark) == []

    async def test_a_sandbox_whose_reply_was_lost_is_adopted(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as other, started(make_backend) as backend:
            require(backend, "adopt")
            mark = labels()
            spec = SandboxSpec(labels=mark, env={"NAME": "value"})
            lost = await other.create(spec)

            async def listed() -> bool:
                return [info.id for info in await backend.list(mark)] == [lost.id]

            assert await eventually(listed)
            raw = await backend.adopt(lost.id, spec)
            assert (raw.id, raw.spec.workdir) == (lost.id, spec.workdir)
            sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
            await sandbox.write("file", b"bytes")
            result = await sandbox.shell("pwd; cat file; echo $NAME", timeout=60)
            assert result.text.endswith(f"{spec.workdir}\nbytesvalue\n")
            await sandbox.close()
            assert await backend.list(mark) == []
            with pytest.raises(SandboxDead):
                await backend.adopt(lost.id, spec)

    async def test_deleting_twice_is_a_success(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            await backend.delete(sandbox.id)
            await backend.delete(sandbox.id)

    async def test_closing_twice_is_a_success(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            await asyncio.gather(sandbox.close(), sandbox.close())
            await sandbox.close()
            assert not await sandbox.alive()
        await backend.aclose()

    async def test_a_closed_sandbox_is_dead(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            await sandbox.close()
            with pytest.raises(SandboxDead):
                await sandbox.exec(["true"], timeout=10)
            with pytest.raises(SandboxDead):
                await sandbox.read("file")
            with pytest.raises(SandboxDead):
                await sandbox.write("file", b"")
            assert (await sandbox.quiesce()).killed == ()

    async def test_a_dead_sandbox_is_told_from_a_failed_command(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            assert (await sandbox.exec(["false"], timeout=10)).exit_code == 1
            assert await sandbox.alive()
            await backend.delete(sandbox.id)
            assert not await sandbox.alive()
            with pytest.raises(SandboxDead):
                await sandbox.exec(["true"], timeout=10)
            with pytest.raises(SandboxDead):
                await sandbox.read("file")

    async def test_a_sandbox_that_dies_during_a_command_is_told(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            call = asyncio.create_task(sandbox.exec(["sleep", "300"], timeout=60))
            await asyncio.sleep(0.3)
            await backend.delete(sandbox.id)
            with pytest.raises(SandboxDead):
                async with asyncio.timeout(GRACE):
                    await call

    async def test_a_sandbox_closes_while_a_command_runs(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            sandbox = await make(backend)
            call = asyncio.create_task(sandbox.exec(["sleep", "300"], timeout=60))
            await asyncio.sleep(0.2)
            async with asyncio.timeout(GRACE):
                await sandbox.close()
                with pytest.raises(SandboxDead):
                    await call

    async def test_touching_is_allowed(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.touch()
            assert await sandbox.alive()

    async def test_a_new_sandbox_is_empty(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for path in (sandbox.spec.workdir, "/tmp", "/tests", "/logs", "/solution"):
                assert await sandbox.remove([f"{path}/anything"]) == []
            assert (await sandbox.exec(["ls", "-A"], timeout=10)).stdout == b""


class QuiesceCases(SandboxCases):
    """Nothing of the agent runs any more."""

    async def test_a_quiet_sandbox_has_nothing_to_kill(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.exec(["true"], timeout=10)
            assert (await sandbox.quiesce()).killed == ()

    async def test_what_the_agent_left_is_killed_and_named(self, make_backend: MakeBackend) -> None:
        forger = "trap '' TERM HUP; while :; do echo 1 > reward; echo x >> forged; sleep 0.02; done"
        async with one(make_backend) as sandbox:
            await sandbox.write("forger", f"#!/bin/sh\n{forger}\n".encode(), mode=0o755)
            assert (await sandbox.shell("nohup setsid ./forger >/dev/null 2>&1 &", timeout=10)).ok

            async def begun() -> bool:
                return (await sandbox.shell("test -s forged", timeout=10)).ok

            assert await eventually(begun)
            census = await sandbox.quiesce()
            assert any("forger" in command for _, command in census.killed), census
            assert not await grows(sandbox, "forged")
            assert (await sandbox.quiesce()).killed == ()

    async def test_many_processes_are_killed(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            text = "i=0; while [ $i -lt 60 ]; do sleep 500 & i=$((i+1)); done"
            assert (await sandbox.shell(text, timeout=30)).ok
            assert len((await sandbox.quiesce()).killed) >= 60
            assert (await sandbox.quiesce()).killed == ()

    async def test_a_quiet_sandbox_still_works(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.shell("sleep 500 & echo x > file", timeout=10)
            await sandbox.quiesce()
            assert await sandbox.read("file") == b"x\n"
            assert (await sandbox.exec(["echo", "fine"], timeout=10)).stdout == b"fine\n"

    async def test_what_hides_is_killed_too(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "isolation")
            hidden = "env -i setsid sh -c '(env -i sleep 500 &) ; sleep 501' >/dev/null 2>&1 &"
            assert (await sandbox.shell(hidden, timeout=10)).ok
            await asyncio.sleep(0.2)
            killed = " ".join(command for _, command in (await sandbox.quiesce()).killed)
            assert "sleep 500" in killed
            assert "sleep 501" in killed

    async def test_a_process_with_a_strange_name_is_killed(self, make_backend: MakeBackend) -> None:
        """The kernel shows the name as it is, between the number and the state of a process."""
        async with one(make_backend) as sandbox:
            require(sandbox, "isolation")
            name = r"printf 'x\n) Z 1 1' > /proc/$$/comm; touch named; while :; do sleep 500; done"
            await sandbox.write("strange", f"#!/bin/sh\n{name}\n".encode(), mode=0o755)
            assert (await sandbox.shell("setsid ./strange >/dev/null 2>&1 &", timeout=10)).ok

            async def begun() -> bool:
                return (await sandbox.shell("test -e named", timeout=10)).ok

            assert await eventually(begun)
            assert any("strange" in command for _, command in (await sandbox.quiesce()).killed)
            assert (await sandbox.quiesce()).killed == ()

    async def test_a_stopped_process_is_killed(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.shell("sleep 500 & kill -STOP $!", timeout=10)
            assert len((await sandbox.quiesce()).killed) == 1

    async def test_what_keeps_forking_is_killed(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, pids=100) as sandbox:
            require(sandbox, "pids_limit")
            await sandbox.write("bomb", b"#!/bin/sh\nwhile :; do ./bomb & ./bomb & done\n", mode=0o755)
            await sandbox.shell("setsid ./bomb >/dev/null 2>&1 &", timeout=10)
            await asyncio.sleep(0.3)
            await sandbox.quiesce()
            assert (await sandbox.quiesce()).killed == ()
            assert (await sandbox.exec(["echo", "fine"], timeout=30)).stdout == b"fine\n"


class IsolationCases(SandboxCases):
    """A sandbox sees neither the host nor another sandbox."""

    async def test_files_of_the_host_are_not_seen(self, make_backend: MakeBackend) -> None:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "secret").write_text("of the host")
            async with one(make_backend) as sandbox:
                require(sandbox, "isolation")
                for path in (directory, str(Path.cwd()), str(Path.home() / ".bashrc")):
                    assert not (await sandbox.exec(["ls", path], timeout=10)).ok, path

    async def test_processes_of_the_host_are_not_seen(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "isolation")
            listed = await sandbox.shell("for d in /proc/[0-9]*; do echo ${d#/proc/}; done", timeout=10)
            assert len(listed.text.split()) < 10
            assert "1" in listed.text.split()

    async def test_sandboxes_do_not_see_each_other(self, make_backend: MakeBackend) -> None:
        async with started(make_backend) as backend:
            require(backend, "isolation")
            first, second = await make(backend), await make(backend)
            try:
                assert (await first.shell("echo x > /tmp/mine; sleep 300 >/dev/null 2>&1 &", timeout=10)).ok
                assert not (await second.shell("ls /tmp/mine", timeout=10)).ok
                seen = await second.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=10)
                assert "sleep 300" not in seen.text
                with contextlib.suppress(SandboxDead):  # it may take its own sandbox along
                    await second.shell("kill -9 -1", timeout=10)
                assert len((await first.quiesce()).killed) == 1
            finally:
                await first.close()
                await second.close()

    async def test_killing_everything_inside_is_survived_or_told(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "isolation")
            try:
                await sandbox.shell("kill -9 1; kill -9 -1", timeout=10)
                assert (await sandbox.exec(["echo", "fine"], timeout=10)).stdout == b"fine\n"
            except SandboxDead:
                assert not await sandbox.alive()

    async def test_without_network_only_loopback_answers(self, make_backend: MakeBackend) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.1)
            port = server.getsockname()[1]
            async with one(make_backend) as sandbox:
                require(sandbox, "network_off")
                listed = await sandbox.shell("tail -n +3 /proc/net/dev | cut -d: -f1", timeout=10)
                assert listed.text.split() == ["lo"]
                reach = await sandbox.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], timeout=10)
                assert not reach.ok
            with pytest.raises(TimeoutError):
                server.accept()


class LimitCases(SandboxCases):
    """Declared limits hold."""

    async def test_memory_is_limited(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, memory_bytes=64 << 20) as sandbox:
            require(sandbox, "memory_limit")
            assert (await sandbox.shell("head -c 8m /dev/zero | tail -c 8m | wc -c", timeout=60)).ok
            result = await sandbox.shell("head -c 300m /dev/zero | tail -c 300m | wc -c", timeout=60)
            assert result.text.strip() != str(300 << 20)
            assert await sandbox.alive()

    async def test_processes_are_limited(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, pids=24) as sandbox:
            require(sandbox, "pids_limit")
            text = "i=0; while [ $i -lt 100 ]; do sleep 60 & i=$((i+1)); done 2>/dev/null"
            await sandbox.shell(text, timeout=30)
            assert 5 <= len((await sandbox.quiesce()).killed) <= 24
            assert (await sandbox.exec(["echo", "fine"], timeout=10)).ok

    async def test_processors_are_limited(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, cpus=0.05) as sandbox:
            require(sandbox, "cpu_limit")
            text = "timeout 2 sh -c 'while :; do :; done'; cut -d' ' -f16,17 /proc/$$/stat"
            ticks = sum(int(word) for word in (await sandbox.shell(text, timeout=60)).text.split())
            assert ticks <= 25, f"{ticks} hundredths of a second in 2 s"

    async def test_files_are_limited(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, disk_bytes=16 << 20) as sandbox:
            require(sandbox, "disk_limit")
            assert (await sandbox.shell("head -c 8m /dev/zero > small", timeout=30)).ok
            assert not (await sandbox.shell("head -c 64m /dev/zero > large", timeout=30)).ok
            assert await sandbox.alive()
