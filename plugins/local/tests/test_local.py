"""What is particular to sandboxes on this machine: what they leave, who ends them, what they say."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.sandbox_case import MakeBackend, eventually
from rollhook.testing.sandbox_life import IsolationCases, LimitCases
from rollhook_local import LocalSandboxConfig, limits, state
from rollhook_local.backend import LocalSandboxes
from rollhook_local.keeper_client import _launch
from rollhook_local.programs import which

pytestmark = pytest.mark.skipif(
    which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)"
)


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of this test's sandboxes only."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime / "rollhook-local"


def context(scratch: Path) -> BuildContext:
    return BuildContext(logging.getLogger("test"), scratch, scratch)


def backend_of(scratch: Path, made: type[LocalSandboxes] = LocalSandboxes, **keys: Any) -> LocalSandboxes:
    return made(LocalSandboxConfig.model_validate({"mode": "bubblewrap", **keys}), context(scratch))


@asynccontextmanager
async def running(backend: LocalSandboxes, **spec: Any) -> AsyncIterator[Sandbox]:
    await backend.start()
    try:
        raw = await backend.create(SandboxSpec(**spec))
        sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.aclose()


def descendants(pid: int) -> set[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return set()
    children = {int(word) for word in text.split()}
    return children.union(*(descendants(child) for child in children))


async def test_closing_leaves_no_process_directory_group_or_descriptor(
    tmp_path: Path, own_records: Path
) -> None:
    backend = backend_of(tmp_path, memory_bytes=256 << 20)
    await backend.start()
    assert backend.keeper is not None
    keeper = backend.keeper.pid
    idle, descriptors = descendants(keeper), len(os.listdir("/proc/self/fd"))
    made = [await backend.create(SandboxSpec()) for _ in range(3)]
    paths = [Path(group) for record in state.matching(own_records, {}) for group in record.groups]
    assert len(paths) == (6 if isinstance(limits.detect(), limits.GroupsV1) else len(paths))
    for raw in made:
        sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
        await sandbox.write("file", b"x")
        await sandbox.shell("setsid sleep 1000 & nohup sleep 1000 & exec sleep 0.01", timeout=10)
    assert len(descendants(keeper)) > len(idle)
    assert all(path.exists() for path in paths)
    for raw in made:
        await backend.delete(raw.id)
    assert descendants(keeper) == idle
    assert not any(path.exists() for path in paths)
    assert list(own_records.iterdir()) == []
    await asyncio.sleep(0.1)  # pipes of background children end with them
    assert len(os.listdir("/proc/self/fd")) == descriptors
    await backend.aclose()
    assert not Path(f"/proc/{keeper}").exists()


async def test_a_child_keeps_its_output_and_goes_on(tmp_path: Path) -> None:
    async with running(backend_of(tmp_path)) as sandbox:
        child = "for i in 1 2 3 4 5 6 7 8 9 10; do echo out; sleep 0.02; done; echo survived > done"
        text = f"({child}) & echo first"
        assert b"first" in (await sandbox.shell(text, timeout=10)).stdout.split()

        async def done() -> bool:
            return (await sandbox.shell("cat done", timeout=10)).stdout == b"survived\n"

        assert await eventually(done)


async def test_a_sandbox_ends_after_its_lifetime(tmp_path: Path) -> None:
    async with running(backend_of(tmp_path), lifetime_seconds=0.5) as sandbox:

        async def ended() -> bool:
            return not await sandbox.alive()

        assert await eventually(ended)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"], timeout=10)


DRIVER = """
import asyncio, logging, sys
from pathlib import Path
from rollhook.component import BuildContext
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook_local import LocalSandboxConfig
from rollhook_local.backend import LocalSandboxes

async def main():
    scratch = Path(sys.argv[1])
    backend = LocalSandboxes(LocalSandboxConfig(), BuildContext(logging.getLogger("x"), scratch, scratch))
    await backend.start()
    for number in range(5):
        raw = await backend.create(SandboxSpec(labels={"of": "driver"}))
        sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
        await sandbox.shell("setsid sleep 1000 >/dev/null 2>&1 &", timeout=30)
    print(backend.keeper.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_sandboxes_end_with_a_driver_that_is_killed(tmp_path: Path, own_records: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    keeper = int(await asyncio.to_thread(driver.stdout.readline))
    records = state.matching(own_records, {"of": "driver"})
    assert len(records) == 5
    driver.kill()
    driver.wait()
    driver.stdout.close()

    async def ended() -> bool:
        return not Path(f"/proc/{keeper}").exists()

    assert await eventually(ended)
    assert [record.pid for record in records if state.start_time(record.pid) == record.start] == []
    other = backend_of(tmp_path)
    assert len(await other.list({"of": "driver"})) == 5
    for info in await other.list({"of": "driver"}):
        await other.delete(info.id)
    assert await other.list({}) == []
    assert not any(Path(group).exists() for record in records for group in record.groups)


def test_a_keeper_whose_driver_is_killed_with_answers_unread_ends_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    process = _launch(theirs)
    theirs.close()
    ours.send(b'{"isolate": false}')
    assert b"many_ids" in ours.recv(4096)
    ours.send(b'{"op": "delete", "r": 1, "id": "none"}')
    assert select.select([ours], [], [], 10)[0]
    ours.close()
    assert process.wait(10) == 0
    assert capfd.readouterr().err == ""


async def test_starting_clears_what_ended_without_being_deleted(tmp_path: Path, own_records: Path) -> None:
    backend = backend_of(tmp_path)
    await backend.start()
    raw = await backend.create(SandboxSpec())
    record = state.read(own_records, raw.id)
    assert record is not None
    assert backend.keeper is not None
    os.kill(min(descendants(backend.keeper.pid)), signal.SIGKILL)

    async def lost() -> bool:
        return not (await raw.alive() or state.start_time(record.keeper) or state.start_time(record.pid))

    assert await eventually(lost)
    other = backend_of(tmp_path)
    await other.start()
    assert await other.list({}) == []
    assert not any(Path(group).exists() for group in record.groups)
    await other.aclose()
    await backend.aclose()


async def test_a_keeper_that_dies_is_told_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_of(tmp_path)
    await backend.start()
    raw = await backend.create(SandboxSpec())
    sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    assert backend.keeper is not None
    call = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout=60))
    await asyncio.sleep(0.1)
    os.kill(min(descendants(backend.keeper.pid)), signal.SIGKILL)
    with pytest.raises(SandboxDead):
        await call
    assert not await sandbox.alive()
    assert "keeper" in caplog.text
    await sandbox.close()
    another = await backend.create(SandboxSpec())
    assert await another.alive()
    await backend.delete(another.id)
    await backend.aclose()


async def test_a_pid_that_is_used_again_is_not_killed(tmp_path: Path, own_records: Path) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        backend = backend_of(tmp_path)
        root = state.directory()
        assert root == own_records
        started = state.start_time(bystander.pid)
        record = state.Record("local-00000000000000aa", {}, 0.0, 1, 1, bystander.pid, started - 1)
        state.write(root, record)
        await backend.delete(record.id)
        assert bystander.poll() is None
        assert await backend.list({}) == []
        assert state.end(bystander.pid, started, 5.0)
        assert bystander.wait() == -signal.SIGKILL
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_sandbox_that_another_process_is_making_is_left_to_it(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    here = os.getpid()
    record = state.Record("local-00000000000000bb", {}, 0.0, here, state.start_time(here))
    state.write(state.directory(), record)
    with pytest.raises(SandboxError, match="just being made") as raised:
        await backend.delete(record.id)
    assert raised.value.kind == "retryable"


async def test_an_id_is_not_a_path(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="not the id"):
        await backend_of(tmp_path).delete("../../etc/passwd")


def test_records_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    monkeypatch.setattr(state, "_shared_directory", lambda: tmp_path)
    planted = tmp_path / f"rollhook-local-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(SandboxError, match="only this user"):
        state.directory()


async def test_without_a_way_to_make_sandboxes_the_error_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollhook_local.backend.which", lambda name: None)
    backend = LocalSandboxes(LocalSandboxConfig(), context(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap") as raised:
        await backend.start()
    assert raised.value.kind == "user"
    assert "bubblewrap is not installed" in str(raised.value)
    assert "unshare (util-linux) is not installed" in str(raised.value)


async def test_a_bubblewrap_that_fails_is_quoted_and_unshare_taken(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)

    def found(name: str) -> str | None:
        return str(broken) if name == "bwrap" else which(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollhook_local.backend.which", found)
        with pytest.raises(SandboxError, match="No permissions to create new namespace"):
            await backend_of(tmp_path).start()
        backend = LocalSandboxes(LocalSandboxConfig(), context(tmp_path))
        async with running(backend) as sandbox:
            assert backend.describe()["mode"] == "unshare"
            assert (await sandbox.exec(["echo", "fine"], timeout=10)).stdout == b"fine\n"


async def test_a_create_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    class Failing(LocalSandboxes):
        def _request(self, spec: SandboxSpec) -> dict[str, Any]:
            request = super()._request(spec)
            if "fail" in spec.labels:
                request["argv"] = ["/bin/sh", "-c", "echo 'sh: it was not to be' >&2; exit 3"]
            return request

    backend = backend_of(tmp_path, Failing)
    await backend.start()
    with pytest.raises(SandboxError, match="bubblewrap could not make a sandbox: sh: it was not to be"):
        await backend.create(SandboxSpec(labels={"fail": "yes"}))
    assert await backend.list({}) == []
    raw = await backend.create(SandboxSpec())
    assert await raw.alive()
    await backend.delete(raw.id)
    await backend.aclose()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": "debian:12"}, "cannot run the container image debian:12"),
    ({"dockerfile": "FROM debian"}, "cannot build an image from a Dockerfile"),
    ({"network": True}, "cannot offer a network"),
    ({"network_allow": ("example.org",)}, "cannot allow only certain hosts"),
    ({"workdir": "work"}, "not an absolute path"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED)
async def test_what_a_local_sandbox_is_not_is_refused(
    tmp_path: Path, spec: dict[str, Any], reason: str
) -> None:
    backend = backend_of(tmp_path)
    await backend.start()
    with pytest.raises(SandboxError, match=reason) as raised:
        await backend.create(SandboxSpec(**spec))
    assert raised.value.kind == "user"
    with pytest.raises(SandboxError, match=reason):
        await backend.bake(SandboxSpec(**spec))
    await backend.aclose()


def test_a_price_counts_the_sizes_in_force(tmp_path: Path) -> None:
    assert backend_of(tmp_path).price_per_second(SandboxSpec()) is None
    priced = backend_of(tmp_path, prices={"cpu_hour": 3600.0, "gib_hour": 1800.0}, memory_bytes=1 << 30)
    assert priced.price_per_second(SandboxSpec(cpus=2.0)) == 2.5
    assert priced.price_per_second(SandboxSpec(cpus=2.0, memory_bytes=2 << 30)) == 3.0
    assert priced.price_per_second(SandboxSpec()) is None, "the number of processors is not known"


@pytest.mark.parametrize("path", [str(Path.home()), str(Path.cwd()), "/"])
async def test_the_host_s_own_places_are_never_shown(tmp_path: Path, path: str) -> None:
    with pytest.raises(SandboxError, match="checkout, the run or a home"):
        await backend_of(tmp_path, read_only=[path]).start()


@pytest.mark.parametrize("mode", ["auto", "bubblewrap", "unshare"])
async def test_a_path_that_cannot_be_shown_is_told_alone_and_ahead(tmp_path: Path, mode: str) -> None:
    own = "is below /tmp/, which sandboxes have for themselves; what they are to see must be elsewhere"
    with tempfile.TemporaryDirectory(dir="/tmp") as below:
        for path, why in (("/nowhere/at-all", "is not there"), (below, own)):
            backend = backend_of(tmp_path, mode=mode, read_only=["/usr/share", path])
            assert list(backend.missing()) == [f"read_only: {path} {why}"]
            with pytest.raises(SandboxError) as raised:
                await backend.start()
            assert (str(raised.value), raised.value.kind) == (f"read_only: {path} {why}", "user")
    assert list(backend_of(tmp_path, mode=mode, read_only=["/usr/share"]).missing()) == []


async def test_further_paths_are_shown_read_only_or_made(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"read_only": ["/var/lib/dpkg"], "writable": ["/data", "/opt/app"]}
    for mode in ("bubblewrap", "unshare"):
        async with running(backend_of(tmp_path, mode=mode, **keys)) as sandbox:
            assert (await sandbox.exec(["test", "-f", "/var/lib/dpkg/status"], timeout=10)).ok
            assert not (await sandbox.exec(["touch", "/var/lib/dpkg/mine"], timeout=10)).ok
            assert (await sandbox.exec(["touch", "/data/mine", "/opt/app/mine"], timeout=10)).ok


async def test_a_command_cannot_reach_what_holds_its_sandbox(tmp_path: Path) -> None:
    for mode in ("bubblewrap", "unshare"):
        async with running(backend_of(tmp_path, mode=mode)) as sandbox:
            attempts = (
                *(
                    "cat /proc/1/environ",
                    "readlink /proc/1/fd/0",
                    "ls /proc/1/root/",
                    "umount /usr",
                    "mount -t tmpfs x /opt",
                ),
                *(
                    "touch /usr/mine",
                    "touch /etc/mine",
                    "echo x > /proc/sys/kernel/core_pattern",
                    "unshare -U true",
                ),
                *("mknod device c 1 3", "hostname other", "chroot /proc/1/root true", "nsenter -t 1 -m true"),
            )
            for attempt in attempts:
                result = await sandbox.shell(attempt, timeout=10)
                assert not result.ok, (mode, attempt)
                assert result.exit_code != 127, (mode, attempt)
            assert await sandbox.alive()


async def test_the_environment_of_the_driver_stays_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "sentinel-value")
    async with running(backend_of(tmp_path)) as sandbox:
        shown = await sandbox.shell(
            "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null", timeout=10
        )
        assert b"sentinel-value" not in shown.stdout


async def test_orphans_are_reaped(tmp_path: Path) -> None:
    for mode in ("bubblewrap", "unshare"):
        async with running(backend_of(tmp_path, mode=mode)) as sandbox:
            await sandbox.shell("for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'exit 0' &); done", timeout=10)

            async def reaped(sandbox: Sandbox = sandbox) -> bool:
                text = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"
                return (await sandbox.shell(text, timeout=10)).text.strip() == "0"

            assert await eventually(reaped)


async def test_files_larger_than_the_limit_cannot_be_written(tmp_path: Path) -> None:
    async with running(backend_of(tmp_path, file_bytes=1 << 20)) as sandbox:
        assert (await sandbox.shell("head -c 1000000 /dev/zero > small", timeout=10)).ok
        assert not (await sandbox.shell("head -c 2000000 /dev/zero > large", timeout=10)).ok


async def test_a_deep_tree_is_removed(tmp_path: Path) -> None:
    async with running(backend_of(tmp_path)) as sandbox:
        text = "mkdir -p $(printf 'd/%.0s' $(seq 1900))"
        assert (await sandbox.shell(text, timeout=60)).ok
        assert await sandbox.remove(["d"]) == ["d"]
        assert (await sandbox.exec(["ls", "-A"], timeout=10)).stdout == b""


async def test_describe_says_what_is_in_force(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    await backend.start()
    said = backend.describe()
    assert said["mode"] == "bubblewrap"
    assert said["limits"] == limits.detect().name + (" (not verified here)" if "v2" in said["limits"] else "")
    assert said["users"] == ("any" if os.geteuid() == 0 else "root inside, this user outside")
    json.dumps(dict(said))
    await backend.aclose()


async def test_process_mode_leaves_no_directory_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    async with running(backend_of(tmp_path, mode="process")) as sandbox:
        await sandbox.shell("setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid", timeout=10)
        pid = int(await sandbox.read("pid"))
        assert state.start_time(pid)
        assert len(list(place.iterdir())) == 1
    assert not state.start_time(pid)
    assert list(place.iterdir()) == []


async def test_a_keeper_ends_when_others_have_deleted_what_it_was_left_with(tmp_path: Path) -> None:
    left, other = backend_of(tmp_path, mode="process"), backend_of(tmp_path, mode="process")
    await left.start()
    await other.start()
    assert left.keeper is not None
    pid, sandbox = left.keeper.pid, await left.create(SandboxSpec())
    await left.aclose()
    assert state.start_time(pid)
    await other.delete(sandbox.id)
    await other.aclose()
    async with asyncio.timeout(20):
        while state.start_time(pid):
            await asyncio.sleep(0.05)


def test_process_mode_is_not_isolated(tmp_path: Path) -> None:
    assert backend_of(tmp_path, mode="process").capabilities == {"separate_streams"}
    assert "isolation" in backend_of(tmp_path).capabilities


# broken variants, run here because only a real sandbox may claim isolation


class OneTmp(LocalSandboxes):
    """All sandboxes have the same /tmp."""

    def _request(self, spec: SandboxSpec) -> dict[str, Any]:
        request = super()._request(spec)
        position = request["argv"].index("--proc")
        request["argv"][position:position] = ["--bind", "/tmp", "/tmp"]
        return request


class Unlimited(LocalSandboxes):
    """Declares limits and sets none."""

    class _None(limits.NoGroups):
        capabilities = limits.Groups.capabilities

        def rlimits(self, wanted: limits.Wanted) -> dict[str, list[int]]:
            return {}

    _limits = _None()
    _sized = True

    def _request(self, spec: SandboxSpec) -> dict[str, Any]:
        request = super()._request(spec)
        position = request["argv"].index("--size")
        del request["argv"][position : position + 2]
        return request


@pytest.mark.parametrize(
    ("broken", "group", "expected"),
    [
        (OneTmp, IsolationCases, {"test_sandboxes_do_not_see_each_other"}),
        (
            Unlimited,
            LimitCases,
            {
                "test_memory_is_limited",
                "test_processes_are_limited",
                "test_processors_are_limited",
                "test_files_are_limited",
            },
        ),
    ],
)
async def test_a_broken_variant_fails_just_its_cases(
    tmp_path: Path, broken: type[LocalSandboxes], group: type[IsolationCases], expected: set[str]
) -> None:
    def make_backend() -> LocalSandboxes:
        return backend_of(tmp_path, broken)

    assert await failing(group, make_backend) == expected


async def failing(group: type[IsolationCases], make_backend: MakeBackend) -> set[str]:
    failed = set()
    for name in [name for name in dir(group) if name.startswith("test_")]:
        case: Callable[..., Any] = getattr(group(), name)
        try:
            await case(make_backend)
        except (AssertionError, pytest.fail.Exception):
            failed.add(name)
    return failed
