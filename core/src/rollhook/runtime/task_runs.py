"""Episodes on tasks by agents that ask no policy, on the same runner as training: what proofs are made of."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from rollhook import plugins as loader
from rollhook.agent import Agent
from rollhook.environment import Environment, Task
from rollhook.errors import UsageError
from rollhook.installed import installed, nearest
from rollhook.plugins import Plugins
from rollhook.recipe.problem import RecipeError
from rollhook.recipe.schema import Recipe
from rollhook.recipe.validate import validate
from rollhook.records import EpisodeRecord
from rollhook.rundir import Attempt
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.parts import Parts
from rollhook.runtime.seeds import derive

Choose = Callable[[Environment], Sequence[Task]]


def task_source(reference: str, environment: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment section of a recipe for a directory, a pack or an environment by name.

    A name may stand after its kind, as `rollhook plugins` lists it. `environment` is the one that reads
    directories and packs. Raises UsageError for an unknown name.
    """
    if os.path.isdir(reference):
        return {"use": environment, "tasks_dir": str(Path(reference).absolute()), **keys}
    names = {kind: [e.name for e in installed() if e.kind == kind] for kind in ("pack", "environment")}
    if (pack := reference.removeprefix("pack.")) in names["pack"]:
        return {"use": environment, "pack": {"use": pack}, **keys}
    if (name := reference.removeprefix("environment.")) in names["environment"]:
        return {"use": name, **keys}
    near = nearest(reference, [*names["pack"], *names["environment"]])
    raise UsageError(
        f"{reference!r} is no directory, pack or environment; "
        f"packs here: {', '.join(names['pack']) or 'none'}; "
        f"environments: {', '.join(names['environment']) or 'none'}"
        + (f"; did you mean {near!r}?" if near else "")
    )


def default_sandbox() -> str:
    """Return `local` where that backend is installed, else `none`."""
    return "local" if any((e.kind, e.name) == ("sandbox", "local") for e in installed()) else "none"


def sandbox_source(text: str | None) -> dict[str, Any] | None:
    """Return the sandbox section of a recipe for a backend's name, or for YAML as it stands in a recipe.

    None is the default backend, "none" no sandbox at all. Raises UsageError for anything else.
    """
    text = text or default_sandbox()
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{text!r} is no name of a sandbox backend and no YAML: {why}") from error
    if isinstance(value, str):
        return None if value == "none" else {"use": value}
    if isinstance(value, dict) and isinstance(value.get("use"), str):
        return value
    raise UsageError(f"{text!r} names no sandbox backend: write its name, or {{use: NAME, key: value}}")


def proof_recipe(source: Mapping[str, Any], sandbox: Mapping[str, Any] | None, seed: int = 0) -> Recipe:
    """Return the recipe that a proof runs. Raises RecipeError for keys that are none of a recipe."""
    data: dict[str, Any] = {"name": "oracle", "environment": [dict(source)], "seed": seed}
    if sandbox:
        data["sandbox"] = {"create_concurrency": 16, **sandbox}
    recipe, problems = validate(Recipe, data)
    if recipe is None:
        raise RecipeError(problems)
    return recipe


def load_parts(
    recipe: Recipe,
    scratch: Path,
    run_id: str = "oracle",
    attempt: int = 0,
    agents: Sequence[str] = ("oracle", "nop"),
) -> Parts:
    """Load what a proof needs: environment, pack, sandbox and the agents."""
    use = recipe.environment[0]
    names = [("environment", use.use), *(("agent", agent) for agent in agents)]
    if recipe.sandbox is not None:
        names.append(("sandbox", recipe.sandbox.use))
    pack = use.keys.get("pack")
    if pack is not None:
        names.append(("pack", pack["use"] if isinstance(pack, Mapping) else pack))
    plugins: Plugins = loader.load(names)
    return Parts(recipe, plugins, scratch, run_id, attempt)


def build_environment(parts: Parts) -> Environment:
    """Build the environment of a proof."""
    environment: Environment = parts.build("environment", parts.recipe.environment[0], "environment.0")
    return environment


def all_tasks(environment: Environment) -> Sequence[Task]:
    """Return every task of an environment."""
    return environment.tasks()


class TaskRuns:
    """Runs agents on tasks of one environment, in sandboxes of one backend; a context manager.

    `choose` says which tasks of the environment, by default all; they are `tasks` once entered. `agents` are
    those of plugins by name, or, as instances, agents of the caller's own. Raises UsageError on entering
    where the sandboxes cannot run the tasks.
    """

    def __init__(
        self,
        parts: Parts,
        attempt: Attempt,
        agents: Sequence[str] = (),
        own: Mapping[str, Agent] | None = None,
        choose: Choose = all_tasks,
    ) -> None:
        self.environment = build_environment(parts)
        self.tasks: Sequence[Task] = ()
        self._choose = choose
        self._recipe = parts.recipe
        self._attempt = attempt
        self._parts = parts
        self._agents = agents
        self._own = own or {}
        self._stack = AsyncExitStack()
        self._runners: dict[str, EpisodeRunner] = {}

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self.environment.aclose)
        try:
            self.tasks = await asyncio.to_thread(self._choose, self.environment)
            pool = await self._parts.open_pool(self._attempt, self._stack)
            capabilities = pool.backend.capabilities if pool is not None else frozenset()
            if problems := await asyncio.to_thread(self.environment.problems, capabilities, self.tasks):
                raise UsageError(
                    f"these tasks cannot run here: {'; '.join(problems)}; choose other tasks, or a sandbox "
                    "backend that can run them"
                )
            for name in self._agents:
                agent = self._parts.plugins.build("agent", name, {}, self._parts.context(f"agent.{name}"))
                self._stack.push_async_callback(agent.aclose)
                self._runners[name] = self._runner(agent, pool)
            self._runners |= {name: self._runner(agent, pool) for name, agent in self._own.items()}
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _runner(self, agent: Agent, pool: Any) -> EpisodeRunner:
        return EpisodeRunner(
            name=self._recipe.environment[0].use,
            environment=self.environment,
            agent=agent,
            pool=pool,
            policy=None,
            limits=self._recipe.budgets,
            outcome_policy=self._recipe.outcomes,
            context=self._parts.context("environment.0"),
        )

    async def episode(self, agent: str, task: Task, suffix: str = "") -> EpisodeRecord:
        """Run one episode; `suffix` tells episodes of one agent on one task apart."""
        name = f"{self._attempt.run.run_id}-a{self._attempt.number}-{task.id}-{agent}{suffix}"
        seed = derive(self._recipe.seed, "oracle", task.digest)
        request = EpisodeRequest(name, name, task, seed, purpose="oracle")
        return (await self._runners[agent].run(request)).record


async def each(tasks: Sequence[Task], concurrency: int, work: Callable[[Task], Awaitable[None]]) -> None:
    """Do something for every task, `concurrency` at once."""
    waiting = iter(tasks)

    async def worker() -> None:
        for task in waiting:
            await work(task)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(tasks))):
            group.create_task(worker())
