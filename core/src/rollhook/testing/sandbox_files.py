"""Cases of the sandbox contract: reading and writing files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from pathlib import Path

import pytest

from rollhook.errors import SandboxError
from rollhook.testing.sandbox_case import MakeBackend, SandboxCases, one, require

ODD_NAMES = (
    "to the moon",
    "-rf",
    "new\nline",
    "quote'\"`$HOME;",
    "*",
    "u\u0308 decomposed",
    "\u00fc composed",
    "\U0001f4a5",
    "n" * 255,
)


class FileCases(SandboxCases):
    """Reading and writing files."""

    async def test_text_is_read_as_written(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("text", b"great #content\nincluding newlines")
            assert await sandbox.read("text") == b"great #content\nincluding newlines"

    async def test_text_beyond_ascii_is_kept(self, make_backend: MakeBackend) -> None:
        text = "\u2728\u263d\ufe0e\U0001f31e\U0001f680 \u00fc".encode()
        async with one(make_backend) as sandbox:
            await sandbox.write("text", text)
            assert await sandbox.read("text") == text
            assert (await sandbox.exec(["cat", "text"], timeout=10)).stdout == text

    async def test_bytes_that_are_no_text_are_kept(self, make_backend: MakeBackend) -> None:
        data = b"\xc3\x28\x00\xff\r\n" + bytes(range(256))
        async with one(make_backend) as sandbox:
            await sandbox.write("bytes", data)
            assert await sandbox.read("bytes") == data

    async def test_50_mebibytes_are_written_and_read(self, make_backend: MakeBackend) -> None:
        data = b"\xc3\x28\x00\x01" * (50 * (1 << 20) // 4)
        async with one(make_backend) as sandbox:
            await sandbox.write("large", data)
            assert hashlib.sha256(await sandbox.read("large")).digest() == hashlib.sha256(data).digest()
            assert (await sandbox.shell("wc -c < large", timeout=60)).text.strip() == str(len(data))

    async def test_writing_makes_parents_of_an_absolute_path(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("/tmp/made/for/this/file", b"absolutely")
            assert await sandbox.read("/tmp/made/for/this/file") == b"absolutely"

    async def test_writing_makes_parents_of_a_relative_path(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("made/for/this/file", b"relatively")
            assert await sandbox.read("made/for/this/file") == b"relatively"
            assert (await sandbox.exec(["cat", "made/for/this/file"], timeout=10)).stdout == b"relatively"

    async def test_an_empty_file_is_read_as_empty(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            assert (await sandbox.exec(["touch", "empty"], timeout=10)).ok
            assert await sandbox.read("empty") == b""

    async def test_nothing_is_written_as_an_empty_file(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("empty", b"")
            assert await sandbox.read("empty") == b""

    async def test_a_file_that_is_not_there_is_said_by_name(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            with pytest.raises(FileNotFoundError, match="nonexistent"):
                await sandbox.read("nonexistent")

    async def test_a_nonsense_name_is_not_found(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            with pytest.raises(FileNotFoundError, match="wikipedia"):
                await sandbox.read("https:/en.wikipedia.org/wiki/Bart%C5%82omiej")

    async def test_a_name_below_a_file_is_not_found(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("file", b"")
            with pytest.raises(FileNotFoundError):
                await sandbox.read("file/below")

    async def test_an_unreadable_file_is_refused_unless_root_reads(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("closed", b"inaccessible", mode=0o000)
            try:
                data = await sandbox.read("closed")
            except PermissionError as error:
                data, said = None, str(error)
            assert data == b"inaccessible" or "closed" in said

    async def test_a_directory_is_not_read(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("directory/file", b"")
            with pytest.raises(IsADirectoryError, match="directory"):
                await sandbox.read("directory")

    async def test_a_file_beyond_the_limit_is_refused(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("large", b"a" * 2048)
            assert len(await sandbox.read("large", limit=2048)) == 2048
            with pytest.raises(SandboxError, match="limit of 1024") as raised:
                await sandbox.read("large", limit=1024)
            assert raised.value.kind == "user"

    async def test_a_directory_is_not_overwritten(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("directory/file", b"kept")
            with pytest.raises(IsADirectoryError):
                await sandbox.write("directory", b"cannot go in a directory")
            assert await sandbox.read("directory/file") == b"kept"
            assert (await sandbox.exec(["ls", "-A"], timeout=10)).text.split() == ["directory"]

    async def test_an_existing_file_is_replaced(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("file", b"a longer mundane content")
            await sandbox.write("file", b"altered")
            assert await sandbox.read("file") == b"altered"

    async def test_a_read_only_file_is_replaced_or_refused(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("fixed", b"impervious", mode=0o444)
            try:
                await sandbox.write("fixed", b"altered")
                said = ""
            except PermissionError as error:
                said = str(error)
            assert "fixed" in said or await sandbox.read("fixed") == b"altered"

    async def test_a_link_is_replaced_not_written_through(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("target", b"kept")
            assert (await sandbox.exec(["ln", "-s", "target", "link"], timeout=10)).ok
            await sandbox.write("link", b"new")
            assert await sandbox.read("target") == b"kept"
            assert await sandbox.read("link") == b"new"

    async def test_links_inside_are_followed_when_reading(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("real/file", b"found")
            assert (await sandbox.exec(["ln", "-s", "real", "link"], timeout=10)).ok
            assert await sandbox.read("link/file") == b"found"

    async def test_the_mode_is_set(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("program", b"#!/bin/sh\necho ran\n", mode=0o755)
            await sandbox.write("text", b"", mode=0o600)
            assert (await sandbox.exec(["./program"], timeout=10)).stdout == b"ran\n"
            modes = await sandbox.exec(["stat", "-c", "%a", "program", "text"], timeout=10)
            assert modes.text.split() == ["755", "600"]

    async def test_odd_names_are_kept(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for number, name in enumerate(ODD_NAMES):
                await sandbox.write(f"odd/{name}", str(number).encode())
            for number, name in enumerate(ODD_NAMES):
                assert await sandbox.read(f"odd/{name}") == str(number).encode()
                shown = await sandbox.exec(["cat", "--", name], cwd="odd", timeout=10)
                assert shown.stdout == str(number).encode()

    async def test_a_fifo_neither_hangs_nor_is_read(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            assert (await sandbox.exec(["mkfifo", "pipe"], timeout=10)).ok
            async with asyncio.timeout(20):
                with pytest.raises(SandboxError):
                    await sandbox.read("pipe")

    async def test_concurrent_writes_leave_one_of_them(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            contents = [bytes([65 + n]) * 70_000 for n in range(8)]
            await asyncio.gather(*(sandbox.write("contended", content) for content in contents))
            assert await sandbox.read("contended") in contents

    async def test_a_path_needs_a_name(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for path in ("", "with\0nul"):
                with pytest.raises(SandboxError):
                    await sandbox.read(path)

    async def test_a_link_to_a_file_of_the_host_leads_nowhere(self, make_backend: MakeBackend) -> None:
        with tempfile.TemporaryDirectory() as directory:
            secret = Path(directory) / "secret"
            secret.write_bytes(b"of the host")
            async with one(make_backend) as sandbox:
                require(sandbox, "isolation")
                up = "../" * 20
                for target in (str(secret), f"{up}{secret}", f"/proc/self/root/{secret}"):
                    assert (await sandbox.exec(["ln", "-sfn", target, "link"], timeout=10)).ok
                    with pytest.raises((OSError, SandboxError)):
                        await sandbox.read("link")
                assert (await sandbox.exec(["ln", "-sfn", f"{up}{directory}", "out"], timeout=10)).ok
                with contextlib.suppress(OSError):
                    await sandbox.write("out/planted", b"")
                assert sorted(path.name for path in Path(directory).iterdir()) == ["secret"]

    async def test_removing_says_what_was_there(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("file", b"")
            await sandbox.write("tree/with/files", b"")
            assert await sandbox.remove(["file", "absent", "tree", "absent/too"]) == ["file", "tree"]
            assert await sandbox.remove(["file", "tree"]) == []
            assert (await sandbox.exec(["ls", "-A"], timeout=10)).stdout == b""

    async def test_removing_a_link_keeps_what_it_points_to(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("kept/file", b"kept")
            linked = await sandbox.shell("ln -s kept link; ln -s nowhere dangling", timeout=10)
            assert linked.ok
            assert await sandbox.remove(["link", "dangling"]) == ["link", "dangling"]
            assert await sandbox.read("kept/file") == b"kept"

    async def test_odd_names_are_removed(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for name in ODD_NAMES:
                await sandbox.write(f"odd/{name}", b"")
            await sandbox.write("odd/stays", b"")
            paths = [f"odd/{name}" for name in ODD_NAMES]
            assert await sandbox.remove(paths) == paths
            assert (await sandbox.exec(["ls", "odd"], timeout=10)).text.split() == ["stays"]
