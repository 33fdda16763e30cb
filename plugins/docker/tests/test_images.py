"""Images: built once however many ask, named by what goes in, and clear when they cannot be made."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rollhook.errors import SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.podman import Engine
from rollhook_docker.backend import DockerSandboxes
from rollhook_docker.images import REPOSITORY, _pack, _registry, _with_tag

MakeDocker = Callable[..., DockerSandboxes]


def context(directory: Path, **files: str) -> str:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return str(directory)


def digest(dockerfile: str, root: Path | None) -> str:
    with tempfile.TemporaryFile() as archive:
        return _pack(dockerfile, root, archive)


def test_the_name_follows_from_what_goes_in(tmp_path: Path) -> None:
    root = tmp_path / "context"
    context(root, a="1", b="2")
    first = digest("FROM x", root)
    assert digest("FROM x", root) == first
    os.utime(root / "a", (1, 1))
    assert digest("FROM x", root) == first, "times do not matter"
    other = tmp_path / "elsewhere"
    context(other, b="2", a="1")
    assert digest("FROM x", other) == first, "nor does the place"
    seen = {first, digest("FROM y", root), digest("FROM x", None)}
    (root / "a").chmod(0o755)
    seen.add(digest("FROM x", root))
    (root / "a").write_text("3")
    seen.add(digest("FROM x", root))
    (root / "link").symlink_to("a")
    seen.add(digest("FROM x", root))
    (root / "empty").mkdir()
    seen.add(digest("FROM x", root))
    assert len(seen) == 7


def test_what_is_outside_a_context_stays_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    root = tmp_path / "context"
    context(root, a="1")
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "tree").symlink_to(tmp_path)
    with tempfile.TemporaryFile() as archive:
        _pack("FROM x", root, archive)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            assert {member.name: member.type for member in tar if member.issym()}.keys() == {"file", "tree"}
            assert len(tar.getnames()) == 4


def test_registries_are_told_from_names() -> None:
    for name, registry in [
        ("debian", "docker.io"), ("a/b:1", "docker.io"), ("ghcr.io/a/b", "ghcr.io"),
        ("localhost/x", "localhost"), ("host:5000/x", "host:5000"),
    ]:  # fmt: skip
        assert _registry(name) == registry
    assert _with_tag("debian") == "debian:latest"
    assert _with_tag("host:5000/x") == "host:5000/x:latest"
    assert _with_tag("host:5000/x:1") == "host:5000/x:1"
    assert _with_tag("x@sha256:0") == "x@sha256:0"


async def test_an_image_is_built_from_a_context(
    engine: Engine, make_docker: MakeDocker, tmp_path: Path
) -> None:
    dockerfile = (
        f"FROM {engine.image}\nWORKDIR /task\nCOPY data sub/ /task/\nENV FROM_IMAGE=yes\n"
        'RUN head -c 16 /dev/urandom | sha256sum > /stamp\nENTRYPOINT ["/bin/false"]\nCMD ["x"]\n'
    )
    (tmp_path / "context" / "sub").mkdir(parents=True)
    (tmp_path / "context" / "sub" / "run.sh").write_text("#!/bin/sh\necho $FROM_IMAGE\n")
    (tmp_path / "context" / "sub" / "run.sh").chmod(0o755)
    spec = SandboxSpec(
        dockerfile=dockerfile, context_dir=context(tmp_path / "context", data="hello"), workdir="/task"
    )
    backends = [make_docker() for _ in range(3)]
    try:
        names = await asyncio.gather(*(backend.bake(spec) for backend in backends for _ in range(3)))
        assert len(set(names)) == 1
        assert names[0].startswith(REPOSITORY)
        raws = await asyncio.gather(*(backend.create(spec) for backend in backends))
        stamps = set()
        for backend, raw in zip(backends, raws, strict=True):
            sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
            assert (await sandbox.exec(["cat", "data"], timeout=30)).stdout == b"hello"
            assert (await sandbox.exec(["./run.sh"], timeout=30)).stdout == b"yes\n"
            stamps.add(await sandbox.read("/stamp"))
            await sandbox.close()
        assert len(stamps) == 1
        (tmp_path / "context" / "data").write_text("changed")
        assert await backends[0].bake(spec) != names[0]
    finally:
        for backend in backends:
            await backend.aclose()


BAKE = """
import asyncio, logging, sys
from pathlib import Path
from rollhook.component import BuildContext
from rollhook.sandbox import SandboxSpec
from rollhook_docker import DockerSandboxConfig
from rollhook_docker.backend import DockerSandboxes

async def main():
    host, scratch, dockerfile = sys.argv[1:]
    config = DockerSandboxConfig(host=host)
    backend = DockerSandboxes(config, BuildContext(logging.getLogger("x"), Path(scratch), Path(scratch)))
    name = await backend.bake(SandboxSpec(dockerfile=dockerfile))
    image = await backend._engine.client.images.inspect(name)
    print(image["Id"])
    await backend.aclose()

asyncio.run(main())
"""


async def test_processes_share_a_build(engine: Engine, tmp_path: Path) -> None:
    dockerfile = f"FROM {engine.image}\nRUN head -c 16 /dev/urandom | sha256sum > /stamp; : {tmp_path}\n"
    argv = [sys.executable, "-c", BAKE, engine.host, str(tmp_path), dockerfile]
    started = [
        await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outcomes = [await process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], outcomes
    assert len({out for out, _ in outcomes}) == 1


async def test_a_build_that_fails_shows_the_end_of_its_log(
    engine: Engine, make_docker: MakeDocker, tmp_path: Path
) -> None:
    backend = make_docker()
    dockerfile = f"FROM {engine.image}\nRUN echo the reason is here; exit 7\n"
    with pytest.raises(SandboxError, match="the reason is here") as raised:
        await backend.create(SandboxSpec(dockerfile=dockerfile))
    assert raised.value.kind == "user"
    assert not backend.retryable(raised.value)
    for broken in ("FRUM x", f"FROM {engine.image}\nCOPY absent /x"):
        with pytest.raises(SandboxError) as raised:
            await backend.bake(SandboxSpec(dockerfile=broken, context_dir=context(tmp_path / "c", a="")))
        assert raised.value.kind == "user"
    await backend.aclose()


async def test_a_build_has_a_limit(engine: Engine, make_docker: MakeDocker) -> None:
    backend = make_docker()
    spec = SandboxSpec(dockerfile=f"FROM {engine.image}\nRUN sleep 300\n", build_seconds=1.5)
    with pytest.raises(SandboxError, match=r"not built within 1\.5 s") as raised:
        async with asyncio.timeout(30):
            await backend.create(spec)
    assert raised.value.kind == "user"
    await backend.aclose()


async def test_a_cancelled_asker_does_not_stop_the_build(engine: Engine, make_docker: MakeDocker) -> None:
    backend = make_docker()
    spec = SandboxSpec(dockerfile=f"FROM {engine.image}\nRUN sleep 1; echo cancelled > /x\n")
    first = asyncio.create_task(backend.bake(spec))
    second = asyncio.create_task(backend.bake(spec))
    await asyncio.sleep(0.3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).startswith(REPOSITORY)
    await backend.aclose()


async def test_contexts_that_no_image_can_hold_are_refused(make_docker: MakeDocker, tmp_path: Path) -> None:
    backend = make_docker()
    os.mkfifo(Path(context(tmp_path / "c", a="")) / "pipe")
    with pytest.raises(SandboxError, match="pipe") as raised:
        await backend.bake(SandboxSpec(dockerfile="FROM x", context_dir=str(tmp_path / "c")))
    assert raised.value.kind == "user"
    with pytest.raises(SandboxError, match="absent"):
        await backend.bake(SandboxSpec(dockerfile="FROM x", context_dir=str(tmp_path / "absent")))
    await backend.aclose()


async def test_an_image_that_is_nowhere_is_said(make_docker: MakeDocker) -> None:
    backend = make_docker(pull="never")
    with pytest.raises(SandboxError, match=r"rollhook-absent.*pull: never") as raised:
        await backend.create(SandboxSpec(image="localhost/rollhook-absent:1"))
    assert raised.value.kind == "user"
    await backend.aclose()


async def test_the_users_of_an_image_and_of_a_spec(engine: Engine, make_docker: MakeDocker) -> None:
    backend = make_docker()
    dockerfile = f"FROM {engine.image}\nRUN mkdir /home/agent && chown nobody /home/agent\nUSER nobody\n"
    for user, expected in [(None, b"nobody\n"), ("root", b"root\n")]:
        raw = await backend.create(SandboxSpec(dockerfile=dockerfile, workdir="/home/agent", user=user))
        sandbox = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
        assert (await sandbox.exec(["id", "-un"], timeout=30)).stdout == expected
        assert (await sandbox.exec(["id", "-un"], user="daemon", timeout=30)).stdout == b"daemon\n"
        await sandbox.shell("sleep 300 >/dev/null 2>&1 &", timeout=30)
        assert len((await sandbox.quiesce()).killed) == 1
        await sandbox.close()
    await backend.aclose()
