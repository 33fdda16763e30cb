"""Cases of the sandbox contract: whole directories, in and out."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollhook.errors import SandboxError
from rollhook.testing.sandbox_case import MakeBackend, SandboxCases, one
from rollhook.testing.sandbox_files import ODD_NAMES


@contextmanager
def directory() -> Iterator[Path]:
    """A directory of the host."""
    with tempfile.TemporaryDirectory(prefix="rollhook-contract-") as path:
        yield Path(path)


class TransferCases(SandboxCases):
    """upload_dir and download_dir."""

    async def test_a_small_tree_is_uploaded(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            (local / "sub").mkdir()
            (local / "test.sh").write_text("#!/bin/sh\ncat sub/data\n")
            (local / "test.sh").chmod(0o755)
            (local / "sub" / "data").write_bytes(b"\0\xff")
            async with one(make_backend) as sandbox:
                report = await sandbox.upload_dir(local, "tree")
                assert (report.files, report.skipped) == (2, [])
                assert (await sandbox.exec(["./test.sh"], cwd="tree", timeout=10)).stdout == b"\0\xff"

    async def test_modes_links_and_empty_directories_are_uploaded(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            (local / "empty").mkdir()
            (local / "closed").mkdir(mode=0o700)
            (local / "file").write_bytes(b"")
            (local / "file").chmod(0o640)
            (local / "link").symlink_to("file")
            (local / "dangling").symlink_to("nowhere")
            (local / "loop").symlink_to("loop")
            async with one(make_backend) as sandbox:
                await sandbox.upload_dir(local, "tree")
                shown = await sandbox.shell(
                    "stat -c '%a %F' empty closed file; readlink link dangling loop", cwd="tree", timeout=10
                )
                assert shown.text.splitlines() == [
                    "755 directory",
                    "700 directory",
                    "640 regular empty file",
                    *("file", "nowhere", "loop"),
                ]

    async def test_links_are_uploaded_not_followed(self, make_backend: MakeBackend) -> None:
        with directory() as local, directory() as other:
            (other / "secret").write_text("of the host")
            (local / "link").symlink_to(other / "secret")
            (local / "tree").symlink_to(other)
            async with one(make_backend) as sandbox:
                await sandbox.upload_dir(local, "up")
                shown = await sandbox.exec(["readlink", "link", "tree"], cwd="up", timeout=10)
                assert shown.text.split() == [str(other / "secret"), str(other)]

    async def test_special_files_are_reported_on_upload(self, make_backend: MakeBackend) -> None:
        with directory() as local, socket.socket(socket.AF_UNIX) as sock:
            os.mkfifo(local / "fifo")
            sock.bind(str(local / "socket"))
            (local / "file").write_text("x")
            async with one(make_backend) as sandbox:
                report = await sandbox.upload_dir(local, "tree")
                assert sorted(name for name, _ in report.skipped) == ["fifo", "socket"]
                assert (await sandbox.exec(["ls", "tree"], timeout=10)).stdout == b"file\n"

    async def test_odd_names_go_up_and_come_back(self, make_backend: MakeBackend) -> None:
        with directory() as local, directory() as back:
            (local / "odd").mkdir()
            for number, name in enumerate(ODD_NAMES):
                (local / "odd" / name).write_text(str(number))
            (local / "odd" / "link").symlink_to("-rf")
            async with one(make_backend) as sandbox:
                await sandbox.upload_dir(local, "tree")
                report = await sandbox.download_dir("tree", back)
                assert report.skipped == []
            for number, name in enumerate(ODD_NAMES):
                assert (back / "odd" / name).read_text() == str(number)
            assert os.readlink(back / "odd" / "link") == "-rf"

    async def test_a_missing_directory_is_not_uploaded(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            (local / "file").write_text("")
            async with one(make_backend) as sandbox:
                with pytest.raises(FileNotFoundError):
                    await sandbox.upload_dir(local / "absent", "tree")
                with pytest.raises(NotADirectoryError):
                    await sandbox.upload_dir(local / "file", "tree")

    async def test_a_tree_is_downloaded_as_it_is(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                made = await sandbox.shell(
                    "mkdir -p out/sub/deep out/empty; "
                    "head -c 300000 /dev/urandom > out/sub/noise; : > out/zero; "
                    "printf '#!/bin/sh\\n' > out/run; chmod 755 out/run; chmod 640 out/zero; "
                    "ln -s sub/noise out/link; ln -s ../sub out/sub/deep/up; ln out/run out/hard",
                    timeout=10,
                )
                assert made.ok, made.error_text
                report = await sandbox.download_dir("out", local)
                assert report.skipped == []
                assert (local / "sub" / "noise").read_bytes() == await sandbox.read("out/sub/noise")
            assert stat.S_IMODE((local / "run").stat().st_mode) == 0o755
            assert stat.S_IMODE((local / "zero").stat().st_mode) == 0o640
            assert os.readlink(local / "link") == "sub/noise"
            assert os.readlink(local / "sub" / "deep" / "up") == "../sub"
            assert (local / "empty").is_dir()
            assert (local / "hard").read_text() == "#!/bin/sh\n"

    async def test_links_that_lead_out_stay_behind(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                made = await sandbox.shell(
                    "mkdir -p out/a; cd out; ln -s /etc absolute; ln -s ../../../../etc up; ln -s .. a/top; "
                    "ln -s a/top/../.. winding; ln -s a inside; ln -s absolute chained; echo x > good",
                    timeout=10,
                )
                assert made.ok
                report = await sandbox.download_dir("out", local)
            names = {name for name, _ in report.skipped}
            assert {"absolute", "up", "winding"} <= names
            assert not {"good", "inside", "a", "a/top"} & names
            root = os.path.realpath(local)
            for path in local.rglob("*"):
                assert os.path.realpath(path).startswith(root), path
            assert (local / "good").read_text() == "x\n"

    async def test_special_files_are_reported_on_download(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                made = await sandbox.shell("mkdir out; mkfifo out/fifo; echo x > out/file", timeout=10)
                assert made.ok
                report = await sandbox.download_dir("out", local)
            assert [name for name, _ in report.skipped] == ["fifo"]
            assert [path.name for path in local.iterdir()] == ["file"]

    async def test_set_user_id_bits_do_not_arrive(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                made = await sandbox.shell(
                    "mkdir out; cp /bin/true out/tool; chmod 4755 out/tool", timeout=10
                )
                assert made.ok
                report = await sandbox.download_dir("out", local)
            assert stat.S_IMODE((local / "tool").stat().st_mode) == 0o755
            assert [name for name, _ in report.altered] == ["tool"]

    async def test_what_is_no_directory_is_not_downloaded(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                await sandbox.write("file", b"")
                with pytest.raises(FileNotFoundError):
                    await sandbox.download_dir("absent", local)
                with pytest.raises(NotADirectoryError):
                    await sandbox.download_dir("file", local)

    async def test_a_download_stops_at_its_limit(self, make_backend: MakeBackend) -> None:
        with directory() as local:
            async with one(make_backend) as sandbox:
                assert (await sandbox.shell("mkdir out; yes | head -c 3000000 > out/big", timeout=10)).ok
                with pytest.raises(SandboxError, match="limit") as raised:
                    await sandbox.download_dir("out", local, limit=1 << 20)
                assert raised.value.kind == "user"
                assert (await sandbox.quiesce()).killed == ()
