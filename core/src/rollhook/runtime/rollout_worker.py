"""What makes episodes in one process: environments, agent, sandboxes, the policy and its HTTP face.

The driver's process has one, or each of `rollout.workers` processes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rollhook.cluster import node_address
from rollhook.engine import SamplingParams
from rollhook.engine.client import EngineClient
from rollhook.environment import Environment
from rollhook.errors import UsageError
from rollhook.routing import build_chain
from rollhook.runtime.episode import EpisodeRunner
from rollhook.runtime.live import Live
from rollhook.runtime.model import context_length, renderer, vocab_size
from rollhook.runtime.seeds import derive
from rollhook.session import Policy, PolicyClient
from rollhook.session.gateway import Gateway, SessionDefaults
from rollhook.session.spill import Spill
from rollhook.session.turn import Limits

if TYPE_CHECKING:
    from rollhook.recipe.schema import Recipe, RouterUse
    from rollhook.router import Worker
    from rollhook.runtime.parts import Parts
    from rollhook.sandbox.pool import SandboxPool
    from rollhook.session.workers import Entry

#: has the server of a worker started anew; False where its engine cannot do that
Revive = Callable[["Worker"], Awaitable[bool]]


class RolloutWorker:
    """Runs episodes on this process's loop. `runners` are by the environment's name in the run.

    `environments` and `pool` are released by whoever made them, after `aclose`.
    """

    def __init__(
        self, parts: Parts, environments: Mapping[str, Environment], pool: SandboxPool | None, live: Live
    ) -> None:
        self._parts = parts
        self._recipe: Recipe = parts.recipe
        self._pool = pool
        self._stack = AsyncExitStack()
        self.policy: PolicyClient | None = None
        self.live = live
        #: the addresses of the sessions' HTTP face: none before there is one
        self.urls: list[str] = []
        agent = parts.build_agent()
        self._stack.push_async_callback(agent.aclose)
        self.runners = {
            name: EpisodeRunner(
                name=name,
                environment=environment,
                agent=agent,
                pool=pool,
                policy=None,
                limits=self._recipe.budgets,
                outcome_policy=self._recipe.outcomes,
                context=parts.context(f"environment.{name}"),
                live=live,
            )
            for name, environment in environments.items()
        }

    async def load(self, model_dir: Path) -> None:
        """Read what renders messages for the model in this directory."""
        model = self._recipe.model
        self._renderer = await asyncio.to_thread(renderer, model, model_dir)
        self._context_length = context_length(model, model_dir)
        self._vocab_size = vocab_size(model_dir)

    async def open_policy(self, workers: Sequence[Worker], version: int, revive: Revive) -> None:
        """Open the policy, over engine workers that serve this version, for the agents; after `load`."""
        recipe = self._recipe
        client = EngineClient(vocab_size=self._vocab_size)
        self._stack.push_async_callback(client.aclose)
        context = self._parts.context("router")
        chain = build_chain(recipe.router.use, recipe.router.keys, self._parts.plugins, context)
        self.policy = PolicyClient(
            self._renderer,
            chain,
            client,
            context_length=self._context_length,
            pause_mode=recipe.rollout.pause_mode,
            seed=derive(recipe.seed, "policy"),
            limits=limits_of(recipe.router),
            revive=revive,
        )
        self.policy.matcher = recipe.gateway.matcher
        self.policy.spill = Spill(context.scratch)
        self._stack.push_async_callback(self.policy.close)
        self.policy.set_workers(workers, version)
        await self.use(self.policy)

    async def use(self, policy: Policy) -> None:
        """Let the agents of every environment ask this policy, in the process and over HTTP."""
        settings, budgets = self._recipe.gateway, self._recipe.budgets
        gateway = Gateway(
            policy,
            bind=settings.bind,
            port=settings.port,
            token=settings.token.resolve().get_secret_value() if settings.token else None,
            defaults=SessionDefaults(
                budgets.max_seq_len, budgets.reply_tokens, budgets.turns, sampling_of(self._recipe)
            ),
            idle_ttl=settings.idle_ttl,
        )
        host = node_address()
        gateway.public_address = settings.public_url and settings.public_url.replace("{host}", host)
        self._stack.push_async_callback(gateway.stop)
        await gateway.start()
        self.urls = [re.sub(r"//(0\.0\.0\.0|\[::\]):", f"//{host}:", gateway.url)]
        for runner in self.runners.values():
            runner.policy, runner.gateway = policy, gateway

    @property
    def table(self) -> Iterable[Entry]:
        """The engine workers as they are seen here; empty without any."""
        return self.policy.table if self.policy is not None else ()

    async def update_weights(self, path: Path, version: int) -> dict[Worker, str]:
        """Bring all engines to a version while requests wait; return the workers that failed, and why."""
        assert self.policy is not None
        return await self.policy.update_weights(path, version)

    def set_workers(self, workers: Sequence[Worker], version: int) -> None:
        """Say which engine workers exist, all healthy and serving `version`."""
        assert self.policy is not None
        self.policy.set_workers(workers, version)

    def came_back(self, worker: Worker) -> None:
        """Look at once at an engine that was started anew."""
        assert self.policy is not None
        self.policy.came_back(worker)

    def drop(self, worker: Worker) -> None:
        """Take an engine out for good, with all its ranks."""
        assert self.policy is not None
        self.policy.drop(worker)

    def sandbox_stats(self) -> dict[str, float]:
        """Return the pool's counts, as metrics."""
        return self._pool.stats() if self._pool is not None else {}

    def router_stats(self) -> dict[str, float]:
        """Return the routing's figures since this was called last, as metrics."""
        return self.policy.fleet.stats.take() if self.policy is not None else {}

    async def aclose(self) -> None:
        """Close sessions, their HTTP face, and the agent; safe to call twice."""
        await self._stack.aclose()


def limits_of(router: RouterUse) -> Limits:
    """Return the deadlines of turns, with what the recipe says of the engines' health."""
    health, breaker = router.health, router.breaker
    return Limits(
        health_interval=health.interval,
        down_after=health.down_after,
        up_after=health.up_after,
        load_interval=router.load_interval,
        breaker_faults=breaker.faults,
        breaker_seconds=breaker.seconds,
        drain=router.drain_on_update,
    )


def sampling_of(recipe: Recipe) -> SamplingParams:
    """Return how the recipe's policy samples."""
    sampling = recipe.rollout.sampling
    return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, the second of two equal ones as `name-2` and so on."""
    return [name if (n := names[:i].count(name)) == 0 else f"{name}-{n + 1}" for i, name in enumerate(names)]


async def build_environments(
    parts: Parts, capabilities: frozenset[str], stack: AsyncExitStack
) -> dict[str, Environment]:
    """Return the recipe's environments by distinct names, which end with the stack.

    Raises UsageError for one that cannot run on sandboxes with these capabilities.
    """
    uses = parts.recipe.environment
    found = {}
    for number, (name, use) in enumerate(zip(distinct([use.use for use in uses]), uses, strict=True)):
        environment: Environment = parts.build("environment", use, f"environment.{number}")
        stack.push_async_callback(environment.aclose)
        splits = [use.split, *([parts.recipe.evaluation.split] if parts.recipe.evaluation.every else ())]
        problems = await asyncio.to_thread(_problems, environment, capabilities, splits)
        if problems:
            raise UsageError(f"environment {name} cannot run here: {'; '.join(problems)}")
        found[name] = environment
    return found


def _problems(environment: Environment, capabilities: frozenset[str], splits: Sequence[str]) -> Sequence[str]:
    """Return why an environment's tasks of these splits cannot run on sandboxes with these capabilities."""
    tasks = [task for split in dict.fromkeys(splits) for task in environment.tasks(split)]
    return environment.problems(capabilities, tasks)
