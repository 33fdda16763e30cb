"""What is the engine's own: where it is, what containers may do, how they end, what a lost answer leaves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollhook.component import BuildContext
from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.secrets import resolve_secret
from rollhook.testing.podman import Engine
from rollhook.testing.sandbox_case import eventually
from rollhook_docker import DockerSandboxConfig
from rollhook_docker.backend import BASIC_CAPABILITIES, DockerSandboxes
from rollhook_docker.engine import address, tls_context

MakeDocker = Callable[..., DockerSandboxes]
Answers = dict[str, tuple[int, Any]]
SENTINEL = "s3cr3t-sentinel-value"


@asynccontextmanager
async def sandbox_of(backend: DockerSandboxes, **spec: Any) -> AsyncIterator[Sandbox]:
    try:
        raw = await backend.create(SandboxSpec(**spec))
        sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.aclose()


# where the engine is


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        ("/run/x.sock", {}, ("/run/x.sock", "", 0, False)),
        ("unix:///run/x.sock", {"DOCKER_HOST": "tcp://other:1"}, ("/run/x.sock", "", 0, False)),
        (None, {"DOCKER_HOST": "unix:///run/y.sock"}, ("/run/y.sock", "", 0, False)),
        ("tcp://engine:99", {}, ("", "engine", 99, False)),
        ("tcp://[::1]", {}, ("", "::1", 2375, False)),
        ("https://engine", {}, ("", "engine", 2376, True)),
    ],
)
def test_the_engine_is_found(host: str | None, environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    found = address(DockerSandboxConfig(host=host), environ)
    assert (found.path, found.host, found.port, found.tls) == expected


def test_certificates_mean_tls() -> None:
    assert address(DockerSandboxConfig(host="tcp://engine", tls_ca="/ca.pem"), {}).port == 2376


@pytest.mark.parametrize(
    "host", ["ssh://user@engine", "engine:2375", "unix://", "tcp://x:port", "https://u:p@x"]
)
def test_what_is_no_address_is_said(host: str) -> None:
    with pytest.raises(SandboxError, match="is no address of a container engine") as raised:
        address(DockerSandboxConfig(host=host), {})
    assert raised.value.kind == "user"
    with pytest.raises(SandboxError, match="DOCKER_HOST: "):
        address(DockerSandboxConfig(), {"DOCKER_HOST": host})


def test_a_machine_without_a_socket_or_with_a_wrong_address_misses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(host: str) -> list[str]:
        monkeypatch.setenv("DOCKER_HOST", host)
        context = BuildContext(logging.getLogger("test"), tmp_path, tmp_path)
        return list(DockerSandboxes(DockerSandboxConfig(), context).missing())

    (said,) = missing(f"unix://{tmp_path}/none.sock")
    assert said.startswith(
        f"no container engine: there is no socket at {tmp_path}/none.sock; start Docker or "
    )
    (said,) = missing("ssh://user@engine")
    assert "is no address of a container engine" in said
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/engine.sock")
        assert missing(f"unix://{tmp_path}/engine.sock") == []
    assert missing("tcp://nowhere.invalid:2375") == []  # only `start` asks


async def test_no_engine_is_one_sentence_with_the_way_out(make_docker: MakeDocker, tmp_path: Path) -> None:
    backend = make_docker(host=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match=r"none\.sock .*podman system service") as raised:
        await backend.start()
    assert raised.value.kind == "user"
    await backend.aclose()


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"absent\.pem") as raised:
        tls_context(DockerSandboxConfig(tls_ca=str(tmp_path / "absent.pem")))
    assert raised.value.kind == "user"


async def test_what_is_in_force_is_described(make_docker: MakeDocker) -> None:
    backend = make_docker()
    await backend.start()
    described = backend.describe()
    assert "sock" in described["engine"] or "tcp" in described["engine"]
    assert "cgroup v" in described["limits"]
    assert "disk not limited" in described["limits"]
    assert "disk_limit" not in backend.capabilities
    await backend.aclose()


# what containers may do


async def test_a_sandbox_has_few_privileges(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker()) as sandbox:
        status = (await sandbox.exec(["cat", "/proc/self/status"], timeout=30)).text
        fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        assert fields["NoNewPrivs"] == "1"
        numbers = {
            "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
            "SETPCAP": 8, "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18, "AUDIT_WRITE": 29,
        }  # fmt: skip
        mask = sum(1 << numbers[name] for name in BASIC_CAPABILITIES)
        assert {int(fields[name], 16) & ~mask for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
        for forbidden in (
            "mount -t tmpfs x /mnt", "mknod /dev/mine b 8 0", "echo b > /proc/sysrq-trigger",
            "echo 1 > /proc/sys/kernel/panic", "unshare -m true",
        ):  # fmt: skip
            assert not (await sandbox.shell(forbidden, timeout=30)).ok, forbidden
        sockets = await sandbox.shell("find / -xdev -name '*.sock' -o -xdev -name 'docker*sock*'", timeout=30)
        assert sockets.text.split() == []
        mounts = (await sandbox.exec(["cat", "/proc/mounts"], timeout=30)).text
        ours = [line.split()[1] for line in mounts.splitlines() if line.startswith("/dev/")]
        assert set(ours) <= {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/.containerenv",
                             "/run/podman-init", "/sbin/docker-init", "/dev/init"}  # fmt: skip


async def test_ended_orphans_are_reaped(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker(), pids=60) as sandbox:
        for _ in range(3):
            text = "i=0; while [ $i -lt 40 ]; do (setsid sh -c 'exit 0' &) ; i=$((i+1)); done; wait"
            await sandbox.shell(text, timeout=30)

        async def none_left() -> bool:
            counted = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"
            return (await sandbox.shell(counted, timeout=30)).text.strip() == "0"

        assert await eventually(none_left)


async def test_a_full_table_of_processes_ends_in_time(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker(), pids=40) as sandbox:
        await sandbox.write("kept", b"kept")
        text = "i=0; while [ $i -lt 100 ]; do sleep 300 & i=$((i+1)); done 2>/dev/null; exec sleep 300"
        started = asyncio.get_running_loop().time()
        call = asyncio.create_task(sandbox.shell(text, timeout=3))
        result = await call
        assert result.timed_out or result.exit_code == 2  # dash ends when it cannot fork
        assert len((await sandbox.quiesce()).killed) + result.timed_out > 0
        assert (await sandbox.quiesce()).killed == ()
        assert asyncio.get_running_loop().time() - started < 40
        assert await sandbox.read("kept") == b"kept"


async def test_files_that_would_hurt_the_reader_are_refused(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker()) as sandbox:
        made = await sandbox.shell(
            "truncate -s 100G huge; ln -s huge to-huge; ln -s a b; ln -s b a; mkfifo pipe; "
            "ln -s /dev/zero zero; ln -s /proc/self/environ environ; mkdir 'odd*'; echo x > 'odd*/f[1]'",
            timeout=30,
        )
        assert made.ok, made.error_text
        async with asyncio.timeout(30):
            for name in ("huge", "to-huge"):
                with pytest.raises(SandboxError, match="limit"):
                    await sandbox.read(name, limit=1 << 20)
            with pytest.raises(FileNotFoundError):
                await sandbox.read("a")
            for name in ("pipe", "/dev/zero", "/dev/stdin"):
                with pytest.raises(SandboxError):
                    await sandbox.read(name, limit=1000)
            for name in ("zero", "environ"):
                with pytest.raises((SandboxError, OSError)):
                    await sandbox.read(name, limit=1000)
            assert await sandbox.read("odd*/f[1]") == b"x\n"
            with pytest.raises(FileNotFoundError):
                await sandbox.read("odd*/f1")
            with pytest.raises(IsADirectoryError):
                await sandbox.read("odd*")
            assert b"processor" in await sandbox.read("/proc/cpuinfo")


async def test_a_log_is_read_while_it_grows(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker()) as sandbox:
        writer = await sandbox.spawn(["sh", "-c", "while :; do head -c 65536 /dev/zero; done >> log"])

        async def begun() -> bool:
            return (await sandbox.shell("test -s log", timeout=30)).ok

        assert await eventually(begun)
        sizes = [len(await sandbox.read("log", limit=1 << 30)) for _ in range(5)]
        assert sizes == sorted(sizes)
        assert sizes[0] > 0
        await writer.kill()
        await writer.aclose()


async def test_a_network_can_be_offered(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker(), network=True) as sandbox:
        routes = (await sandbox.exec(["cat", "/proc/net/route"], timeout=30)).text.splitlines()[1:]
        gateways = [line.split()[2] for line in routes if line.split()[1] == "00000000"]
        gateway = socket.inet_ntoa(bytes.fromhex(gateways[0])[::-1])
        with socket.create_server(("0.0.0.0", 0)) as server:
            server.settimeout(30)
            port = server.getsockname()[1]
            call = asyncio.create_task(
                sandbox.exec(["bash", "-c", f"echo hello > /dev/tcp/{gateway}/{port}"], timeout=30)
            )
            peer, _ = await asyncio.to_thread(server.accept)
            with peer:
                assert await asyncio.to_thread(peer.recv, 100) == b"hello\n"
            assert (await call).ok


async def test_an_allowlist_is_refused(make_docker: MakeDocker) -> None:
    backend = make_docker()
    with pytest.raises(SandboxError, match="allow only certain hosts") as raised:
        await backend.create(SandboxSpec(network_allow=("example.org",)))
    assert raised.value.kind == "user"
    await backend.aclose()


async def test_no_name_of_a_process_hides_it(make_docker: MakeDocker) -> None:
    names = ["a\nb", "x) S 1 0 0 0", ") 0", "\n) S 1", "9 (sleep) S 1"]
    async with sandbox_of(make_docker()) as sandbox:
        for name in names:
            text = 'cp /bin/sleep "/tmp/$1"; setsid "/tmp/$1" 300 >/dev/null 2>&1 &'
            assert (await sandbox.exec(["sh", "-c", text, "sh", name], timeout=30)).ok

        async def begun() -> bool:
            counted = await sandbox.shell("grep -lz '^300$' /proc/[0-9]*/cmdline | wc -l", timeout=30)
            return int(counted.text) >= len(names)

        assert await eventually(begun, 30)
        assert len((await sandbox.quiesce()).killed) == len(names)
        assert await sandbox.alive()
        assert (await sandbox.quiesce()).killed == ()
        assert not await begun()


# how they end


async def test_a_sandbox_ends_by_itself(make_docker: MakeDocker) -> None:
    backend = make_docker()
    async with sandbox_of(backend, lifetime_seconds=1.0, labels={"test": "lifetime"}) as sandbox:

        async def ended() -> bool:
            return not await sandbox.alive()

        assert await eventually(ended, 30)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"], timeout=10)
        assert [info.id for info in await backend.list({"test": "lifetime"})] == [sandbox.id]


async def test_killing_the_main_process_is_told(make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker()) as sandbox:
        with contextlib.suppress(SandboxDead):
            await sandbox.shell("pkill -9 -x sleep; sleep 1", timeout=30)

        async def ended() -> bool:
            return not await sandbox.alive()

        assert await eventually(ended)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"], timeout=10)


async def test_a_full_disk_is_an_error_of_the_write(small_engine: Engine, make_docker: MakeDocker) -> None:
    async with sandbox_of(make_docker(host=small_engine.host)) as sandbox:
        filled = await sandbox.shell("head -c 1G /dev/zero > fill", timeout=60)
        assert not filled.ok
        assert "space" in filled.error_text
        with pytest.raises(OSError, match=r"[Nn]o space"):
            await sandbox.write("more", b"x" * (8 << 20))
        assert await sandbox.alive()
        assert (await sandbox.exec(["rm", "fill"], timeout=30)).ok
        await sandbox.write("more", b"x")


async def test_an_engine_that_stops_in_mid_command(small_engine: Engine, make_docker: MakeDocker) -> None:
    backend = make_docker(host=small_engine.host)
    async with sandbox_of(backend) as sandbox:
        call = asyncio.create_task(sandbox.shell("echo begun > begun; sleep 300", timeout=120))

        async def begun() -> bool:
            return (await sandbox.exec(["cat", "begun"], timeout=30)).ok

        assert await eventually(begun)
        small_engine.stop()
        try:
            with pytest.raises(SandboxError) as raised:
                await call
            assert isinstance(raised.value, SandboxDead) or raised.value.kind == "retryable"
            with pytest.raises(SandboxError) as raised:
                await sandbox.exec(["true"], timeout=10)
            assert raised.value.kind == "retryable"
            with pytest.raises(SandboxError) as raised:
                await backend.create(SandboxSpec())
            assert backend.retryable(raised.value)
            assert backend.ambiguous(raised.value)
        finally:
            await asyncio.to_thread(small_engine.start)
        # Podman's containers outlive its service
        assert await sandbox.read("begun") == b"begun\n"
        assert any("sleep 300" in command for _, command in (await sandbox.quiesce()).killed)
        assert (await sandbox.exec(["echo", "fine"], timeout=30)).stdout == b"fine\n"


# answers that were lost


async def test_a_create_that_is_sent_again_makes_one(make_docker: MakeDocker) -> None:
    backend = make_docker()
    labels = {"rollhook.nonce": os.urandom(8).hex()}
    first = await backend.create(SandboxSpec(labels=labels))
    second = await backend.create(SandboxSpec(labels=labels))
    assert [info.id for info in await backend.list(labels)] == [second.id]
    assert not await first.alive()
    await backend.delete(second.id)
    await backend.aclose()


async def test_a_sandbox_is_adopted(make_docker: MakeDocker) -> None:
    first, other = make_docker(), make_docker()
    labels = {"rollhook.nonce": os.urandom(8).hex()}
    made = await first.create(SandboxSpec(labels=labels))
    (found,) = await other.list(labels)
    adopted = Sandbox(await other.adopt(found.id, SandboxSpec()), capabilities=other.capabilities)
    assert (await adopted.exec(["echo", "mine"], timeout=30)).stdout == b"mine\n"
    await first.delete(made.id)
    with pytest.raises(SandboxDead, match="is gone"):
        await other.adopt(found.id, SandboxSpec())
    # made but not started, and one that has ended
    wanted = other._container(other.config.image, SandboxSpec(lifetime_seconds=1.0))
    created = await other._engine.client.containers.create(wanted)
    late = await other.adopt(created.id, SandboxSpec())

    async def ended() -> bool:
        return not await late.alive()

    assert await eventually(ended, 30)
    with pytest.raises(SandboxDead, match=r"is (exited|stopped)"):
        await other.adopt(created.id, SandboxSpec())
    await other.delete(created.id)
    await first.aclose()
    await other.aclose()


async def test_only_ids_are_deleted(make_docker: MakeDocker) -> None:
    backend = make_docker()
    for nonsense in ("", "../x", "rollhook-1", "x" * 64):
        with pytest.raises(SandboxError, match="is not the id"):
            await backend.delete(nonsense)
    await backend.aclose()


async def test_descriptors_do_not_pile_up(make_docker: MakeDocker) -> None:
    backend = make_docker()
    async with sandbox_of(backend) as sandbox:

        async def cycle() -> None:
            await sandbox.shell("cat; sleep 300 >/dev/null & echo x", timeout=30, stdin=b"x")
            await sandbox.shell("sleep 300", timeout=0.1)
            await sandbox.write("file", b"x")
            await sandbox.read("file")
            with pytest.raises(FileNotFoundError):
                await sandbox.read("absent")
            with pytest.raises(IsADirectoryError):
                await sandbox.write("/etc", b"x" * (8 << 20))
            made = await backend.create(SandboxSpec())
            await backend.delete(made.id)

        await cycle()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await cycle()
        assert len(os.listdir("/proc/self/fd")) <= before + 1


# secrets, and an engine's moods: a double of the engine that answers as it is told


@asynccontextmanager
async def double(
    path: Path, answers: dict[str, tuple[int, Any]], seen: list[web.Request]
) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        for part, (status, body) in answers.items():
            if part in request.path:
                return web.json_response(body, status=status)
        return web.json_response({"message": "no such image"}, status=404)

    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield f"unix://{path}"
    finally:
        await runner.cleanup()


VERSION = {"ApiVersion": "1.45", "Components": [{"Name": "Double"}]}


async def test_a_registry_s_password_goes_to_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REGISTRY_LOGIN", f"user:{SENTINEL}")
    caplog.set_level(logging.DEBUG)
    seen: list[web.Request] = []
    answers = {"/version": (200, VERSION), "/info": (200, {}), "/images/create": (500, {"message": "denied"})}
    async with double(tmp_path / "sock", answers, seen) as host:
        config = DockerSandboxConfig.model_validate(
            {"host": host, "registry_auth": {"registry.example": "env:REGISTRY_LOGIN"}}
        )
        context = BuildContext(logging.getLogger("test"), tmp_path, tmp_path, secret=resolve_secret)
        backend = DockerSandboxes(config, context)
        with pytest.raises(SandboxError, match="denied") as raised:
            await backend.create(SandboxSpec(image="registry.example/image:1"))
        assert raised.value.kind == "user"
        shown = f"{raised.value!r} {config!r} {backend.describe()} {caplog.text}"
        await backend.aclose()
    (sent,) = [request.headers["X-Registry-Auth"] for request in seen if "create" in request.path]
    assert json.loads(base64.urlsafe_b64decode(sent))["password"] == SENTINEL
    assert SENTINEL not in shown


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (500, "toomanyrequests: You have reached your pull rate limit", "retryable"),
        (503, "starting", "retryable"),
        (429, "slow down", "retryable"),
        (500, "fork: resource temporarily unavailable", "retryable"),
        (400, "invalid reference format", "user"),
        (500, "something broke", "infrastructure"),
        (404, "manifest unknown", "user"),
    ],
)
async def test_what_the_engine_says_has_a_kind(tmp_path: Path, status: int, message: str, kind: str) -> None:
    answers = {
        "/version": (200, VERSION), "/info": (200, {}), "/images/create": (status, {"message": message}),
    }  # fmt: skip
    async with double(tmp_path / "sock", answers, []) as host:
        context = BuildContext(logging.getLogger("test"), tmp_path, tmp_path)
        backend = DockerSandboxes(DockerSandboxConfig(host=host), context)
        with pytest.raises(SandboxError) as raised:
            await backend.create(SandboxSpec(image="x:1"))
        assert raised.value.kind == kind
        assert backend.retryable(raised.value) == (kind == "retryable")
        assert not backend.ambiguous(raised.value)
        await backend.aclose()


# TLS: a proxy before the real engine


@asynccontextmanager
async def tls_proxy(directory: Path, engine: Engine) -> AsyncIterator[tuple[str, str]]:
    certificate, key = str(directory / "cert.pem"), str(directory / "key.pem")
    made = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await made.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate)
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(engine.host.removeprefix("unix://"))
        await asyncio.gather(copy(reader, outer), copy(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", certificate
    finally:
        server.close()


async def test_an_engine_behind_tls(engine: Engine, make_docker: MakeDocker, tmp_path: Path) -> None:
    if not engine.host.startswith("unix://"):
        pytest.skip("needs podman (of our own: unset DOCKER_HOST)")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (apt-get install openssl)")
    async with tls_proxy(tmp_path, engine) as (host, certificate):
        keys = {"tls_cert": certificate, "tls_key": str(tmp_path / "key.pem"), "tls_ca": certificate}
        backend = make_docker(host=host, **keys)
        async with sandbox_of(backend) as sandbox:
            assert (
                await sandbox.exec(["cat"], stdin=b"in\0put" * 100_000, timeout=60)
            ).stdout_bytes == 600_000
            assert (await sandbox.exec(["true"], stdin=b"x" * (1 << 20), timeout=60)).ok
            assert (await sandbox.shell("cat; exit 3", stdin=b"", timeout=60)).exit_code == 3
            await sandbox.write("file", b"x" * 100_000)
            assert await sandbox.read("file") == b"x" * 100_000
            assert (await sandbox.shell("sleep 300", timeout=0.5)).timed_out
        unknown = make_docker(host=host, tls_ca=certificate)
        with pytest.raises(SandboxError):
            await unknown.start()
        await unknown.aclose()
