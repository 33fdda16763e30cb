"""Building a recipe's components."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.agent import Agent
from rollhook.component import BuildContext
from rollhook.errors import UsageError
from rollhook.packs import cache_directory, resolve_all
from rollhook.plugins import Plugins
from rollhook.recipe.schema import Recipe, Use
from rollhook.records import Group
from rollhook.runtime.seeds import derive
from rollhook.sandbox.lease import PREFIX, LeaseJournal
from rollhook.sandbox.pool import SandboxPool
from rollhook.sandbox.rate import CreateRate, bucket_path
from rollhook.sandbox.reap import reap
from rollhook.secrets import resolve_secret

if TYPE_CHECKING:
    from rollhook.rundir import Attempt, RunDir
    from rollhook.sandbox import SandboxBackend

logger = logging.getLogger(__name__)


class Parts:
    """Builds components of a recipe, each with a context of its own."""

    def __init__(self, recipe: Recipe, plugins: Plugins, scratch: Path, run_id: str, attempt: int) -> None:
        self.recipe = recipe
        self.plugins = plugins
        self._scratch = scratch
        self._run_id = run_id
        self._attempt = attempt

    def context(self, name: str) -> BuildContext:
        """Return the context of the component at this key path."""
        return BuildContext(
            logger=logging.getLogger(f"rollhook.{name}"),
            scratch=self._scratch,
            cache=cache_directory(),
            seed=derive(self.recipe.seed, name),
            run_id=self._run_id,
            attempt=self._attempt,
            secret=resolve_secret,
            build=lambda kind, spec: self.build(kind, spec, f"{name}.{kind}"),
        )

    def keys(self, use: Use) -> dict[str, Any]:
        """Return a component's keys with `pack:` references turned into paths."""
        found: dict[str, Any] = resolve_all(use.keys, self.plugins)
        return found

    def build(self, kind: str, use: Use, name: str) -> Any:
        """Build the component that `use` names."""
        return self.plugins.build(kind, use.use, self.keys(use), self.context(name))

    def build_agent(self) -> Agent:
        """Build the recipe's agent; raises UsageError when it names none."""
        if self.recipe.agent is None:
            raise UsageError("a recipe with an environment needs an agent, e.g. `agent: shell`")
        agent: Agent = self.build("agent", self.recipe.agent, "agent")
        return agent

    async def open_pool(self, attempt: Attempt, stack: AsyncExitStack) -> SandboxPool | None:
        """Start the recipe's sandboxes; return their pool, which ends with the stack, or None without any.

        What earlier attempts of the run left is deleted first, also where no index of runs knows the run.
        """
        backend = await self.open_backend(stack)
        if backend is None:
            return None
        await self.reap(backend, attempt.run, attempt.journal)
        return self.make_pool(backend, attempt.journal, stack)

    async def open_backend(self, stack: AsyncExitStack) -> SandboxBackend | None:
        """Start the recipe's sandbox backend, which ends with the stack; None without any."""
        use = self.recipe.sandbox
        if use is None:
            return None
        backend: SandboxBackend = self.build("sandbox", use, "sandbox")
        stack.push_async_callback(backend.aclose)
        await backend.start()
        return backend

    async def reap(self, backend: SandboxBackend, run: RunDir, journal: LeaseJournal) -> None:
        """Delete what earlier attempts of the run left, as far as it is seen from this host."""
        if self._attempt > 1:
            labels = {PREFIX + "run": run.run_id}
            report = await reap(backend, labels=labels, find=lambda _: run, record=journal)
            if report.deleted:
                logger.warning("%d sandboxes of earlier attempts were deleted", len(report.deleted))

    def make_pool(
        self,
        backend: SandboxBackend,
        journal: LeaseJournal,
        stack: AsyncExitStack,
        share: tuple[int, int] = (1, 1),
    ) -> SandboxPool:
        """Return a pool, which ends with the stack; of several it is the share (number from 1, count)."""
        use = self.recipe.sandbox
        assert use is not None
        rate = None
        if (wanted := use.create_rate) is not None:
            path = bucket_path(cache_directory(), backend.account or use.use)
            rate = CreateRate(path, wanted.per_second, wanted.burst)
            rate.check()
        pool = SandboxPool(
            backend,
            run_id=self._run_id,
            attempt=self._attempt,
            journal=journal,
            create_concurrency=max(1, share_of(use.create_concurrency, *share)),
            create_retries=use.create_retries,
            warm=share_of(use.warm, *share),
            rate=rate,
        )
        stack.push_async_callback(pool.aclose)
        return pool

    def accept_group(self, group: Group) -> str | None:
        """Ask the loaded filters; the first reason counts."""
        reasons = self.plugins.manager.hook.rollhook_accept_group(group=group)
        return next((reason for reason in reasons if reason), None)


def share_of(total: int, number: int, count: int) -> int:
    """Return the share of the `number`-th (from 1) of `count` in a total; all shares sum to it."""
    return total // count + (number <= total % count)
