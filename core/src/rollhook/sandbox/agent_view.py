"""The sandbox as an agent sees it: the same commands, on the agent's clock."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rollhook.budgets import AgentClock

if TYPE_CHECKING:
    from rollhook.sandbox.sandbox import ExecResult, Sandbox, Spawned

#: notes what is waited for, and for how many seconds at most, while its block runs
Waiting = Callable[[Callable[[], str], float | None], AbstractContextManager[None]]
_SHOWN = 200


class AgentSandbox:
    """Runs an agent's commands within its budget and charges what they took.

    Raises BudgetExceeded after a command that used up the agent's or the turn's time; a command that only
    exceeded its own limit comes back with `timed_out`.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        clock: AgentClock,
        now: Callable[[], float] = time.monotonic,
        waiting: Waiting = lambda what, limit: nullcontext(),
        user: str | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._user = user
        self._clock = clock
        self._now = now
        self._waiting = waiting

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run a command; `timeout` is cut to what the budget leaves."""
        self._clock.check()
        limit = self._clock.command_limit if timeout is None else min(timeout, self._clock.command_limit)
        started = self._now()
        try:
            with self._waiting(lambda: f"command {shlex.join(argv)[:_SHOWN]}", limit):
                result = await self._sandbox.exec(
                    argv, cwd=cwd, env=env, user=user or self._user, timeout=limit, stdin=stdin
                )
        finally:
            self._clock.charge("command", self._now() - started)
        if result.timed_out:
            self._clock.check()
        return result

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> Spawned:
        """Start a program of the agent and return at once; `Endpoint.attend` charges the time it takes."""
        self._clock.check()
        return await self._sandbox.spawn(argv, cwd=cwd, env=env, user=self._user, stdin=stdin)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return a file's bytes."""
        return await self._sandbox.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        await self._sandbox.write(path, data, mode=mode)
