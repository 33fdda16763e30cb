"""Cases of the sandbox contract: commands, their input and their output."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from functools import partial

import pytest

from rollhook.errors import SandboxError
from rollhook.sandbox import Sandbox
from rollhook.testing.sandbox_case import MakeBackend, SandboxCases, eventually, one, require

MIB = 1 << 20


class CommandCases(SandboxCases):
    """How a command is started and how it ends."""

    async def test_stdout_is_returned(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["sh", "-c", "echo foo; echo bar"], timeout=10)
            assert (result.stdout, result.stderr, result.exit_code) == (b"foo\nbar\n", b"", 0)
            assert not result.timed_out
            assert not result.truncated
            assert result.ok

    async def test_exit_codes_are_returned(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for code in (0, 1, 3, 126, 127, 255):
                assert (await sandbox.exec(["sh", "-c", f"exit {code}"], timeout=10)).exit_code == code

    async def test_a_fast_death_by_signal_is_no_timeout(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for number in (9, 15, 11):
                result = await sandbox.exec(["sh", "-c", f"kill -{number} $$"], timeout=30)
                assert result.exit_code == 128 + number
                assert not result.timed_out
            assert await sandbox.alive()

    async def test_arguments_need_no_quoting(self, make_backend: MakeBackend) -> None:
        arguments = [
            "",
            " ",
            "a b",
            "'",
            '"',
            "$HOME",
            "`id`",
            "*",
            "a\nb",
            "\\",
            "-n",
            ";",
            "\u00fc",
            "%s",
            "~",
        ]
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["printf", "%s\\0", *arguments], timeout=10)
            assert result.stdout.decode().split("\0")[:-1] == arguments

    async def test_a_mebibyte_of_arguments_arrives(self, make_backend: MakeBackend) -> None:
        arguments = ["x" * 100_000] * 10
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(
                ["sh", "-c", 'echo $#; printf %s "$@" | wc -c', "sh", *arguments], timeout=20
            )
            assert result.text.split() == ["10", "1000000"]

    async def test_an_argument_too_long_for_the_kernel_is_a_result(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["echo", "x" * MIB], timeout=20)
            assert result.exit_code == 126 or result.stdout_bytes == MIB + 1
            assert await sandbox.alive()

    async def test_a_program_that_is_not_there_is_127(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["no-such-program"], timeout=10)
            assert result.exit_code == 127
            assert "no-such-program" in result.error_text + result.text

    async def test_a_file_that_is_no_program_is_126(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["/etc/passwd"], timeout=10)
            assert result.exit_code == 126
            assert result.stderr + result.stdout

    async def test_the_environment_is_passed(self, make_backend: MakeBackend) -> None:
        values = {"PLAIN": "x", "ODD": "a 'b' \"c\" $HOME\nline", "EMPTY": "", "UMLAUT": "\u00fc"}
        async with one(make_backend, env={"OF_SPEC": "yes", "PLAIN": "overridden"}) as sandbox:
            result = await sandbox.shell(
                'printf "%s|" "$PLAIN" "$ODD" "$EMPTY" "$UMLAUT" "$OF_SPEC"', env=values, timeout=10
            )
            assert result.text == "x|a 'b' \"c\" $HOME\nline||\u00fc|yes|"
            assert (await sandbox.shell("echo $PLAIN", timeout=10)).stdout == b"overridden\n"

    async def test_commands_start_in_the_working_directory(self, make_backend: MakeBackend) -> None:
        async with one(make_backend, workdir="/some/where") as sandbox:
            await sandbox.write("here", b"")
            assert (await sandbox.exec(["ls"], timeout=10)).stdout == b"here\n"
            assert (await sandbox.exec(["pwd"], timeout=10)).text.strip().endswith("/some/where")

    async def test_the_directory_of_a_command_can_be_chosen(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.write("sub/inside", b"")
            assert (await sandbox.exec(["ls"], cwd="sub", timeout=10)).stdout == b"inside\n"
            below = (await sandbox.exec(["pwd"], timeout=10)).text.strip()
            assert (await sandbox.exec(["ls"], cwd=f"{sandbox.spec.workdir}/sub", timeout=10)).ok
            assert below.endswith(sandbox.spec.workdir)

    async def test_a_directory_that_is_not_there_is_126(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["ls"], cwd="absent", timeout=10)
            assert result.exit_code == 126
            assert "absent" in result.error_text

    async def test_shell_takes_text(self, make_backend: MakeBackend) -> None:
        text = "cat <<'EOF' > file\n$HOME 'quoted'\nEOF\nx=5; test $x = 5 && cat file | tr a-z A-Z"
        async with one(make_backend) as sandbox:
            assert (await sandbox.shell(text, timeout=10)).stdout == b"$HOME 'QUOTED'\n"

    async def test_without_stdin_input_is_empty(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["cat"], timeout=10)
            assert (result.exit_code, result.stdout) == (0, b"")

    async def test_stdin_arrives(self, make_backend: MakeBackend) -> None:
        data = "text 'quoted' $HOME \u00fc\n".encode() + bytes(range(256))
        async with one(make_backend) as sandbox:
            assert (await sandbox.exec(["cat"], stdin=data, timeout=10)).stdout == data
            assert (await sandbox.exec(["wc", "-c"], stdin=b"", timeout=10)).text.strip() == "0"

    async def test_50_mebibytes_of_stdin_arrive(self, make_backend: MakeBackend) -> None:
        data = b"0123456789abcdef" * (50 * MIB // 16)
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["sha256sum"], stdin=data, timeout=60)
            assert result.text.split()[0] == hashlib.sha256(data).hexdigest()

    async def test_stdin_that_nobody_reads_does_no_harm(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            assert (await sandbox.exec(["true"], stdin=b"x" * MIB, timeout=20)).exit_code == 0

    async def test_a_child_in_the_background_is_not_waited_for(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            started = asyncio.get_running_loop().time()
            result = await sandbox.shell(
                "nohup sh -c 'while :; do echo x >> nohup-file; sleep 0.05; done' & "
                "setsid sh -c 'while :; do echo x >> setsid-file; sleep 0.05; done' & echo started",
                timeout=30,
            )
            assert result.exit_code == 0
            assert result.stdout.startswith(b"started\n")
            assert asyncio.get_running_loop().time() - started < 10
            for name in ("nohup-file", "setsid-file"):
                assert await eventually(partial(_longer, sandbox, name, 6)), f"{name} has stopped growing"

    async def test_32_commands_at_once_keep_their_output_apart(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:

            async def run(number: int) -> bool:
                text = f"for i in 1 2 3; do echo {number}; echo e{number} >&2; done; exit {number}"
                result = await sandbox.shell(text, timeout=60)
                words = sorted((result.text + result.error_text).split())
                return (words, result.exit_code) == ([str(number)] * 3 + [f"e{number}"] * 3, number)

            assert all(await asyncio.gather(*(run(number) for number in range(32))))

    async def test_a_command_runs_once(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            for repeatable in (False, True):
                await sandbox.shell("echo ran >> log; exit 1", timeout=10, repeatable=repeatable)
            assert await sandbox.read("log") == b"ran\nran\n"

    async def test_a_spawned_command_talks_both_ways(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            spawned = await sandbox.spawn(["sh", "-c", 'read line; echo "got $line"; exit 4'], stdin=True)
            await spawned.write_stdin(b"hello\n")
            await spawned.close_stdin()
            assert b"".join([chunk async for chunk in spawned.stdout()]) == b"got hello\n"
            assert await spawned.wait() == 4
            await spawned.aclose()

    async def test_a_spawned_command_is_killed_with_its_children(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            spawned = await sandbox.spawn(["sh", "-c", "sleep 1000 & sleep 1000"])
            await asyncio.sleep(0.2)
            await spawned.kill()
            assert await spawned.wait() == 137
            await spawned.aclose()
            assert (await sandbox.quiesce()).killed == ()

    async def test_root_is_a_user(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "user")
            assert (await sandbox.exec(["id", "-u"], user="root", timeout=10)).text.strip() == "0"

    async def test_commands_run_as_other_users(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "user")
            assert (await sandbox.exec(["id", "-un"], user="nobody", timeout=10)).text.strip() == "nobody"
            await sandbox.write("closed", b"", mode=0o600)
            assert not (await sandbox.exec(["cat", "closed"], user="nobody", timeout=10)).ok

    async def test_an_unknown_user_is_refused(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            with pytest.raises(SandboxError, match="nonexistent") as raised:
                await sandbox.exec(["whoami"], user="nonexistent", timeout=10)
            assert raised.value.kind == "user"


class OutputCases(SandboxCases):
    """What becomes of output, however much and whatever it is."""

    async def test_stderr_is_apart(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "separate_streams")
            result = await sandbox.shell("echo out; echo err >&2; echo out", timeout=10)
            assert (result.stdout, result.stderr) == (b"out\nout\n", b"err\n")

    async def test_text_made_of_escapes_is_text(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["printf", "\\342\\234\\250"], timeout=10)
            assert result.text == "\u2728"

    async def test_bytes_that_are_no_text_arrive(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["printf", "a\\377\\000b"], timeout=10)
            assert result.stdout == b"a\xff\0b"
            assert result.text == "a\ufffd\0b"

    async def test_a_mebibyte_of_noise_arrives(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.shell("head -c 1048576 /dev/urandom | tee noise", timeout=30)
            assert not result.truncated
            assert result.stdout == await sandbox.read("noise")

    async def test_output_is_cut_in_the_middle(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.shell("seq 100000", max_output=1000, timeout=30)
            whole = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
            assert result.truncated
            assert result.stdout == whole[:500] + whole[-500:]
            assert result.stdout_bytes == len(whole)

    async def test_stderr_is_cut_by_itself(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            require(sandbox, "separate_streams")
            result = await sandbox.shell("seq 100000 >&2; echo short", max_output=1000, timeout=30)
            assert (result.truncated, result.stdout, len(result.stderr)) == (True, b"short\n", 1000)
            assert result.stderr_bytes == sum(len(f"{n}\n") for n in range(1, 100_001))

    async def test_output_at_the_limit_is_whole(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.exec(["printf", "0123456789"], max_output=10, timeout=10)
            assert (result.stdout, result.truncated, result.stdout_bytes) == (b"0123456789", False, 10)
            result = await sandbox.exec(["printf", "0123456789"], max_output=9, timeout=10)
            assert (result.stdout, result.truncated, result.stdout_bytes) == (b"012346789", True, 10)

    async def test_a_line_of_10_mebibytes_arrives(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            result = await sandbox.shell(
                "head -c 10485760 /dev/zero | tr '\\0' x", max_output=11 * MIB, timeout=60
            )
            assert result.stdout == b"x" * 10 * MIB

    async def test_a_gibibyte_of_output_does_not_grow_memory(self, make_backend: MakeBackend) -> None:
        async with one(make_backend) as sandbox:
            await sandbox.exec(["head", "-c", "67108864", "/dev/zero"], timeout=60)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = await sandbox.exec(["head", "-c", "1073741824", "/dev/zero"], timeout=110)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert (result.exit_code, result.stdout_bytes) == (0, 1 << 30)
            assert len(result.stdout) == MIB
            assert after - before < 32 * 1024, f"{after - before} KiB more"


async def _longer(sandbox: Sandbox, name: str, least: int) -> bool:
    try:
        return len(await sandbox.read(name)) > least
    except FileNotFoundError:
        return False
