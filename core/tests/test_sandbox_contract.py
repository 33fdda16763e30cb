"""The contract of sandboxes: a backend without shortcuts passes it, broken ones fail just their cases."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import SandboxDead
from rollhook.sandbox import RawProcess, SandboxInfo, SandboxSpec
from rollhook.testing.fakes_sandbox import FakeSandbox, FakeSandboxes
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend


class TestFake(SandboxContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        provider: dict[str, FakeSandbox] = {}
        return lambda: FakeSandboxes(provider)


#: cases that only move much data
LARGE = {
    "test_50_mebibytes_are_written_and_read",
    "test_50_mebibytes_of_stdin_arrive",
    "test_a_gibibyte_of_output_does_not_grow_memory",
    "test_a_line_of_10_mebibytes_arrives",
}


class Broken(FakeSandboxes):
    """A backend whose sandboxes are of another class."""

    made: type[FakeSandbox] = FakeSandbox

    def wrap(self, sandbox_id: str, spec: SandboxSpec, root: Path) -> FakeSandbox:
        return self.made(sandbox_id, spec, root)


class TextFiles(Broken):
    """Files go through text."""

    class made(FakeSandbox):
        async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
            await super().write(path, data.decode("utf-8", "replace").encode(), mode=mode)


class WritesThroughLinks(Broken):
    """Writing follows a link."""

    class made(FakeSandbox):
        async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
            place = self._path(path)
            if place.is_symlink():
                place.write_bytes(data)
            else:
                await super().write(path, data, mode=mode)


class ForgetsModes(Broken):
    """Every file is 644."""

    class made(FakeSandbox):
        async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
            await super().write(path, data)


class ExpandsArguments(Broken):
    """Every argument goes through a shell's expansion."""

    class made(FakeSandbox):
        async def start(self, argv: Sequence[str], **options: object) -> RawProcess:
            expanded = [os.path.expandvars(word) if word == "$HOME" else word for word in argv]
            return await super().start(expanded, **options)  # type: ignore[arg-type]


class OneExitCode(Broken):
    """Every failure is exit code 1."""

    class made(FakeSandbox):
        async def start(self, argv: Sequence[str], **options: object) -> RawProcess:
            process = await super().start(argv, **options)  # type: ignore[arg-type]
            wait = process.wait

            async def flattened() -> int:
                return min(1, await wait())

            process.wait = flattened  # type: ignore[method-assign]
            return process


class MergedStreams(Broken):
    """stderr arrives on stdout."""

    class made(FakeSandbox):
        async def start(self, argv: Sequence[str], **options: object) -> RawProcess:
            merged = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
            return await super().start(merged, **options)  # type: ignore[arg-type]


class KillsOnlyTheLeader(Broken):
    """A timeout ends the command and leaves what it has started."""

    class made(FakeSandbox):
        async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
            if mark.count(".") < 2:  # quiesce, which is right
                return None
            for path in Path("/proc").iterdir():
                try:
                    if mark.encode() in (path / "environ").read_bytes():
                        parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                        if parent == os.getpid():
                            os.kill(int(path.name), signal.SIGKILL)
                except (OSError, ValueError):
                    continue
            return ()


class QuiescesNothing(Broken):
    """Nothing is killed before verification."""

    class made(FakeSandbox):
        async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
            return () if mark.count(".") < 2 else None


class DeadIsFailed(Broken):
    """A sandbox that is gone looks like a command that fails."""

    class made(FakeSandbox):
        def _check(self) -> None:
            self.root.mkdir(exist_ok=True)

        async def alive(self) -> bool:
            return True

        async def start(self, argv: Sequence[str], **options: object) -> RawProcess:
            if self.gone:
                return await self._failed("gone", 1)
            return await super().start(argv, **options)  # type: ignore[arg-type]


class Careless(Broken):
    """Lists everything whatever is asked for, makes what it cannot, adopts what is not there."""

    def refuse(self, spec: SandboxSpec) -> None:
        pass

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> FakeSandbox:
        return self.provider.get(sandbox_id) or self.wrap(sandbox_id, spec, Path("/nowhere"))

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        return await super().list({})


class DeletesOnce(Broken):
    """Deleting what is gone is an error."""

    async def delete(self, sandbox_id: str) -> None:
        if sandbox_id not in self.provider:
            raise SandboxDead(f"{sandbox_id} is not there")
        await super().delete(sandbox_id)


class LeavesCancelled(Broken):
    """A create that is cancelled leaves a sandbox behind."""

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        sandbox = await super().create(spec)
        await asyncio.sleep(0.005)
        return sandbox  # type: ignore[return-value]


CASES = [
    (TextFiles, {"test_bytes_that_are_no_text_are_kept", "test_a_small_tree_is_uploaded"}),
    (WritesThroughLinks, {"test_a_link_is_replaced_not_written_through"}),
    (
        ForgetsModes,
        {
            "test_the_mode_is_set",
            "test_a_small_tree_is_uploaded",
            "test_a_timeout_kills_the_whole_tree",
            "test_what_the_agent_left_is_killed_and_named",
        },
    ),
    (ExpandsArguments, {"test_arguments_need_no_quoting"}),
    (
        OneExitCode,
        {
            "test_exit_codes_are_returned",
            "test_a_fast_death_by_signal_is_no_timeout",
            "test_an_argument_too_long_for_the_kernel_is_a_result",
            "test_a_program_that_is_not_there_is_127",
            "test_a_file_that_is_no_program_is_126",
            "test_a_directory_that_is_not_there_is_126",
            "test_32_commands_at_once_keep_their_output_apart",
            "test_a_spawned_command_talks_both_ways",
            "test_a_spawned_command_is_killed_with_its_children",
            "test_after_a_timeout_results_are_their_own",
            "test_what_is_no_directory_is_not_downloaded",
        },
    ),
    (
        MergedStreams,
        {
            "test_output_until_the_timeout_is_kept",
            "test_stderr_is_apart",
            "test_stderr_is_cut_by_itself",
        },
    ),
    (
        KillsOnlyTheLeader,
        {"test_a_timeout_kills_the_whole_tree", "test_a_spawned_command_is_killed_with_its_children"},
    ),
    (
        QuiescesNothing,
        {
            "test_a_stopped_process_is_killed",
            "test_many_processes_are_killed",
            "test_what_the_agent_left_is_killed_and_named",
        },
    ),
    (
        DeadIsFailed,
        {"test_a_dead_sandbox_is_told_from_a_failed_command", "test_another_client_lists_and_deletes"},
    ),
    (
        Careless,
        {
            "test_labels_find_a_sandbox",
            "test_what_it_cannot_do_is_refused",
            "test_a_sandbox_whose_reply_was_lost_is_adopted",
        },
    ),
    (DeletesOnce, {"test_deleting_twice_is_a_success", "test_another_client_lists_and_deletes"}),
    (LeavesCancelled, {"test_a_cancelled_create_leaves_nothing"}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("broken", "cases"), CASES, ids=[broken.__name__ for broken, _ in CASES])
async def test_a_broken_backend_fails_just_its_cases(broken: type[Broken], cases: set[str]) -> None:
    def make_backend() -> MakeBackend:
        provider: dict[str, FakeSandbox] = {}
        return lambda: broken(provider)

    assert sorted(await failing(make_backend)) == sorted(cases)


async def failing(make_backend: Callable[[], MakeBackend]) -> set[str]:
    """Run all cases, several at once, and return the names of those that fail."""
    gate = asyncio.Semaphore(8)

    async def run(name: str, case: Callable[..., Any]) -> str | None:
        async with gate:
            try:
                await case(SandboxContract(), make_backend())
            except pytest.skip.Exception:
                return None
            except (Exception, pytest.fail.Exception):
                return name
            return None

    cases = inspect.getmembers(SandboxContract, inspect.isfunction)
    chosen = [(name, case) for name, case in cases if name.startswith("test_") and name not in LARGE]
    results = await asyncio.gather(*(run(name, case) for name, case in chosen))
    return {name for name in results if name}
