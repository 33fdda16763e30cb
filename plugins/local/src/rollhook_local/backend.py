"""Sandboxes on this machine."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.component import BuildContext
from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec
from rollhook_local import limits, state, view
from rollhook_local.keeper_client import Keeper
from rollhook_local.programs import which
from rollhook_local.sandbox import LocalSandbox

if TYPE_CHECKING:
    from rollhook_local import LocalSandboxConfig

_FOREIGN_SECONDS = 10.0
INSTALL_HINT = "install it with `apt-get install bubblewrap` (or `dnf install bubblewrap`)"
#: where a root is built while it is made: nothing of the host can be shown below it
_TMP = "/tmp/"  # noqa: S108


class LocalSandboxes(SandboxBackend):
    """Sandboxes made by bubblewrap, by util-linux's unshare, or (unsafe) plain processes."""

    config: LocalSandboxConfig

    def __init__(self, config: LocalSandboxConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.keeper: Keeper | None = None
        self.mode: str = config.mode
        self._live: dict[str, LocalSandbox] = {}
        self._starting = asyncio.Lock()

    @property
    def many_ids(self) -> bool:
        """Whether commands may run as other users."""
        return self.keeper is not None and self.keeper.many_ids

    @cached_property
    def _limits(self) -> limits.Limits:
        return limits.detect()

    @cached_property
    def _sized(self) -> bool:
        program = which("bwrap")
        return self.mode != "bubblewrap" or (program is not None and b"--size" in Path(program).read_bytes())

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        """What this mode can do on this machine."""
        if self.config.mode == "process":
            return frozenset({"separate_streams"})
        found = {"isolation", "network_off", "separate_streams", *self._limits.capabilities}
        if self._sized:
            found.add("disk_limit")
        if os.geteuid() == 0:
            found.add("user")
        return frozenset(found)

    def missing(self) -> Sequence[str]:
        """Return which of the `read_only` paths cannot be shown, and why."""
        if self.config.mode == "process":
            return ()
        found, hidden = [], _hidden_paths(self.context)
        for path in self.config.read_only:
            if not os.path.exists(path):
                found.append(f"read_only: {path} is not there")
            elif any(f"{hide}/".startswith(f"{path.rstrip('/')}/") for hide in hidden):
                found.append(f"read_only: {path} holds the checkout, the run or a home directory")
            elif path.startswith(_TMP):
                found.append(
                    f"read_only: {path} is below {_TMP}, which sandboxes have for themselves; what they "
                    "are to see must be elsewhere"
                )
        return found

    async def start(self) -> None:
        """Start the keeper and make one sandbox for a try; says what is missing if it cannot be done."""
        async with self._starting:
            if self.keeper is not None and self.keeper.closed:
                await self.keeper.aclose(keep=False)
                self.keeper = None
            if self.keeper is None:
                await self._start()

    async def _start(self) -> None:
        await self._clear_ended()
        if self.config.mode == "process":
            self.keeper = await Keeper.start({"isolate": False}, self._gone)
            return
        for problem in self.missing():
            raise SandboxError(problem, kind="user")
        modes = ["bubblewrap", "unshare"] if self.config.mode == "auto" else [self.config.mode]
        failures = []
        for mode in modes:
            try:
                self.mode = mode
                await self._start_mode(mode)
                return
            except (SandboxError, OSError) as error:
                failures.append(f"{mode}: {error}")
                if self.keeper is not None:
                    await self.keeper.aclose(keep=False)
                    self.keeper = None
        raise SandboxError(
            f"no sandbox can be made on this machine ({'; '.join(failures)}); {INSTALL_HINT}, "
            "and in a container allow user namespaces and mounting /proc",
            kind="user",
        )

    async def _start_mode(self, mode: str) -> None:
        tools = {}
        if mode == "bubblewrap":
            program = which("bwrap")
            if program is None:
                raise SandboxError("bubblewrap is not installed", kind="user")
            tools["bwrap"] = program
        elif which("unshare") is None:
            raise SandboxError("unshare (util-linux) is not installed", kind="user")
        hidden = _hidden_paths(self.context)
        setup = {"isolate": True, "read_only": self.config.read_only, "hidden": hidden, "tools": tools}
        self.keeper = await Keeper.start(setup, self._gone)
        trial = await self.create(SandboxSpec())
        await self.delete(trial.id)

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """Make one sandbox."""
        if self.keeper is None or self.keeper.closed:
            await self.start()
        keeper = self.keeper
        assert keeper is not None
        self.refuse(spec)
        sandbox_id = f"local-{secrets.token_hex(8)}"
        root = state.directory()
        record = state.Record(
            id=sandbox_id,
            labels=dict(spec.labels),
            created_at=time.time(),
            keeper=keeper.pid,
            keeper_start=state.start_time(keeper.pid),
        )
        wanted = limits.Wanted(
            memory_bytes=spec.memory_bytes or self.config.memory_bytes,
            pids=spec.pids or self.config.pids,
            cpus=spec.cpus or self.config.cpus,
            file_bytes=self.config.file_bytes,
        )
        process = self.config.mode == "process"
        groups, opened = ([], []) if process else self._limits.make(sandbox_id, wanted)
        record.groups = [str(group) for group in groups]
        request: dict[str, Any] = {
            "id": sandbox_id,
            "rlimits": self._limits.rlimits(wanted),
            "env": {**view.ENVIRONMENT, **spec.env},
        }
        try:
            if process:
                record.directory = tempfile.mkdtemp(prefix="rollhook-process-")
                request.update(self._process_request(spec, record.directory))
            else:
                request.update(self._request(spec))
            state.write(root, record)
            _, pidfds = await keeper.ask("create", fds=opened, **request)
            for pidfd in pidfds:
                record.pid = state.pid_of(pidfd)
                record.start = state.start_time(record.pid)
                os.close(pidfd)
            state.write(root, record)
        except BaseException as error:
            await asyncio.shield(asyncio.ensure_future(self._undo(record)))
            if isinstance(error, OSError):
                raise SandboxError(f"{self.mode} could not make a sandbox: {error.strerror}") from error
            raise
        finally:
            for fd in opened:
                os.close(fd)
        sandbox = LocalSandbox(self, sandbox_id, spec, record.directory)
        self._live[sandbox_id] = sandbox
        return sandbox

    def _request(self, spec: SandboxSpec) -> dict[str, Any]:
        size = spec.disk_bytes or self.config.disk_bytes
        dirs = view.private_directories(spec.workdir, self.config.writable)
        own = [path for path, _ in dirs]
        if self.mode == "bubblewrap":
            argv = view.bubblewrap_argv(self.config.read_only, own, size, sized=self._sized)
        else:
            argv = view.unshare_argv(self.config.read_only, own, size)
        return {
            "argv": argv,
            "dirs": dirs,
            "loopback": self.mode != "bubblewrap",
            "lifetime": spec.lifetime_seconds,
        }

    def _process_request(self, spec: SandboxSpec, directory: str) -> dict[str, Any]:
        for path, mode in view.private_directories(spec.workdir, self.config.writable):
            os.makedirs(directory + path, exist_ok=True)
            os.chmod(directory + path, mode)
        env = {**view.ENVIRONMENT, **spec.env, "HOME": f"{directory}/root", "TMPDIR": f"{directory}/tmp"}  # noqa: S108 - its own
        return {"directory": directory, "env": env}

    async def _undo(self, record: state.Record) -> None:
        if self.keeper is not None and not self.keeper.closed:
            await self.keeper.ask("delete", id=record.id)
        await self._clear(record)

    async def _clear(self, record: state.Record) -> None:
        if record.groups:
            groups = [Path(group) for group in record.groups]
            try:
                limits.remove_groups(groups, 0.0)
            except SandboxError:
                await asyncio.to_thread(limits.remove_groups, groups)
        if record.directory:
            await asyncio.to_thread(shutil.rmtree, record.directory, True)
        state.remove(state.directory(), record.id)

    async def _clear_ended(self) -> None:
        """Clear what sandboxes have left that ended, with their makers, without being deleted."""
        for record in await asyncio.to_thread(state.matching, state.directory(), {}):
            made = record.pid and state.start_time(record.pid) == record.start
            making = state.start_time(record.keeper) == record.keeper_start
            if not made and not making and not record.directory:
                await self._clear(record)

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the sandboxes on file that carry all these labels."""
        records = await asyncio.to_thread(state.matching, state.directory(), labels)
        return [SandboxInfo(record.id, record.labels, record.created_at) for record in records]

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox, whoever made it."""
        if not re.fullmatch(r"local-[0-9a-f]{16}", sandbox_id):
            raise SandboxError(f"{sandbox_id!r} is not the id of a local sandbox", kind="user")
        sandbox = self._live.pop(sandbox_id, None)
        record = state.read(state.directory(), sandbox_id)
        if record is None:
            return
        if sandbox is not None:
            sandbox.gone = True
        keeper = self.keeper
        ours = keeper is not None and not keeper.closed and record.keeper == keeper.pid
        if record.directory:
            await asyncio.to_thread(state.end_marked, record.directory)
        if ours and keeper is not None:
            await keeper.ask("delete", id=sandbox_id)
        elif record.pid and not await asyncio.to_thread(
            state.end, record.pid, record.start, _FOREIGN_SECONDS
        ):
            raise SandboxError(f"sandbox {sandbox_id}: its process 1 ({record.pid}) does not end")
        elif not record.pid and not record.directory:
            self._leave_to_its_maker(record)
        await self._clear(record)

    def _leave_to_its_maker(self, record: state.Record) -> None:
        """A sandbox that another process is still making: it is its own to undo while that one lives."""
        if record.keeper_start and state.start_time(record.keeper) == record.keeper_start:
            raise SandboxError(f"sandbox {record.id} is just being made by another process", kind="retryable")

    def _gone(self, sandbox_id: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None:
            sandbox.gone = True

    def refuse(self, spec: SandboxSpec) -> None:
        """Refuse what these sandboxes cannot do."""
        super().refuse(spec)
        if not posixpath.isabs(spec.workdir):
            raise SandboxError(f"workdir {spec.workdir!r} is not an absolute path", kind="user")

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        """Return the price of a second by the sizes in force."""
        memory = spec.memory_bytes or self.config.memory_bytes
        return self.config.prices.per_second(spec.cpus or self.config.cpus, memory)

    def retryable(self, error: Exception) -> bool:
        """Return whether another try may help: full tables of processes or files empty again."""
        return isinstance(error, SandboxError) and "temporarily unavailable" in str(error)

    def describe(self) -> Mapping[str, str]:
        """Return the mode, how limits are enforced and what commands run as."""
        users = "any" if self.many_ids else "root inside, this user outside"
        enforced = "none" if self.config.mode == "process" else self._limits.name
        if enforced == "cgroup v2":
            enforced += " (not verified here)"
        return {"mode": self.mode, "limits": enforced, "users": users}

    async def aclose(self) -> None:
        """Leave the keeper; it ends when its sandboxes have."""
        if self.keeper is not None:
            keeper, self.keeper = self.keeper, None
            await keeper.aclose(keep=bool(self._live))


def _hidden_paths(context: BuildContext) -> list[str]:
    """Return what must not be seen even where a system directory holds it."""
    paths = {os.path.realpath(path) for path in (os.getcwd(), os.path.expanduser("~"), context.scratch)}
    return sorted(path for path in paths if path != "/")
