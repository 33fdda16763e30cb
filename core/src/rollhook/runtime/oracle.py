"""Proving tasks without a model: the reference solution must score 1, doing nothing must score less."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rollhook import plugins as loader
from rollhook.environment import Environment, Task
from rollhook.errors import UsageError
from rollhook.installed import installed, nearest
from rollhook.plugins import Plugins
from rollhook.recipe.schema import EnvironmentUse, Recipe, SandboxUse
from rollhook.records import EpisodeRecord
from rollhook.rundir import Attempt
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.parts import Parts
from rollhook.runtime.rows import Rows
from rollhook.runtime.seeds import derive

Mark = Literal["1", "0", "ERR"]
AGENTS = ("oracle", "nop")
RESULTS = "oracle.jsonl"


@dataclass(frozen=True)
class TaskProof:
    """One row of the results: what solution and nothing scored; `why` is empty when `ok`."""

    task_id: str
    digest: str
    family: str
    oracle: Mark
    nop: Mark
    oracle_reward: float | None
    nop_reward: float | None
    ok: bool
    why: str
    seconds: float

    @property
    def final(self) -> bool:
        """Whether a resumed run may keep this row: an error may have been the machine's."""
        return "ERR" not in (self.oracle, self.nop)


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


def proof_recipe(source: Mapping[str, Any], sandbox: Mapping[str, Any] | None, seed: int = 0) -> Recipe:
    """Return the recipe that a proof runs."""
    keys = {"create_concurrency": 16, **sandbox} if sandbox else None
    return Recipe(
        name="oracle",
        environment=[EnvironmentUse.model_validate(source)],
        sandbox=SandboxUse.model_validate(keys) if keys else None,
        seed=seed,
    )


def load_parts(recipe: Recipe, scratch: Path, run_id: str = "oracle", attempt: int = 0) -> Parts:
    """Load what a proof needs: environment, pack, sandbox and the two agents."""
    use = recipe.environment[0]
    names = [("environment", use.use), *(("agent", agent) for agent in AGENTS)]
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


class Proofs:
    """Runs both agents on tasks, many at once, on the same runner as training; a context manager."""

    def __init__(self, parts: Parts, attempt: Attempt) -> None:
        self._recipe = parts.recipe
        self._attempt = attempt
        self._parts = parts
        self._stack = AsyncExitStack()
        self._runners: dict[str, EpisodeRunner] = {}
        self.environment = build_environment(parts)

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self.environment.aclose)
        try:
            pool = await self._parts.open_pool(self._attempt, self._stack)
            capabilities = pool.backend.capabilities if pool is not None else frozenset()
            if problems := self.environment.problems(capabilities):
                raise UsageError(f"these tasks cannot run here: {'; '.join(problems)}")
            for name in AGENTS:
                agent = self._parts.plugins.build("agent", name, {}, self._parts.context(f"agent.{name}"))
                self._stack.push_async_callback(agent.aclose)
                self._runners[name] = EpisodeRunner(
                    name=self._recipe.environment[0].use,
                    environment=self.environment,
                    agent=agent,
                    pool=pool,
                    policy=None,
                    limits=self._recipe.budgets,
                    outcome_policy=self._recipe.outcomes,
                    context=self._parts.context("environment.0"),
                )
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(
        self, tasks: Sequence[Task], concurrency: int, finished: Callable[[TaskProof], None]
    ) -> None:
        """Prove every task; `finished` gets each proof as it is there."""
        waiting = iter(tasks)

        async def worker() -> None:
            for task in waiting:
                finished(await self._prove(task))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(tasks))):
                group.create_task(worker())

    async def _prove(self, task: Task) -> TaskProof:
        if task.problem is not None:
            return TaskProof(
                task.id, task.digest, task.family, "ERR", "ERR", None, None, False, task.problem, 0.0
            )
        solved = await self._episode("oracle", task)
        idle = await self._episode("nop", task)
        why = _why(solved, idle)
        return TaskProof(
            task_id=task.id,
            digest=task.digest,
            family=task.family,
            oracle=_mark(solved),
            nop=_mark(idle),
            oracle_reward=solved.outcome.reward,
            nop_reward=idle.outcome.reward,
            ok=not why,
            why=why,
            seconds=round(sum(record.timings.get("total", 0.0) for record in (solved, idle)), 3),
        )

    async def _episode(self, agent: str, task: Task) -> EpisodeRecord:
        name = f"{self._attempt.run.run_id}-a{self._attempt.number}-{task.id}-{agent}"
        seed = derive(self._recipe.seed, "oracle", task.digest)
        request = EpisodeRequest(name, name, task, seed, purpose="oracle")
        return (await self._runners[agent].run(request)).record


class Results(Rows[TaskProof]):
    """The rows of a proof, by task."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TaskProof, key=lambda row: row.task_id, keep=lambda row: row.final)

    def todo(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks without a row of this very content."""
        return [t for t in tasks if t.id not in self.kept or self.kept[t.id].digest != t.digest]


def _mark(record: EpisodeRecord) -> Mark:
    if record.outcome.reward is None:
        return "ERR"
    return "1" if record.outcome.reward == 1 else "0"


def _why(solved: EpisodeRecord, idle: EpisodeRecord) -> str:
    reasons = []
    for agent, record in (("oracle", solved), ("nop", idle)):
        if record.outcome.reward is None:
            why = record.outcome.cause or record.outcome.kind
            reasons.append(f"{agent}: {record.outcome.boundary or record.outcome.kind}: {why}")
    if solved.outcome.reward is not None and solved.outcome.reward != 1:
        said = str(record_output(solved))
        reasons.append(f"the solution scores {solved.outcome.reward:g}" + (f" ({said})" if said else ""))
    if idle.outcome.reward is not None and idle.outcome.reward >= 1:
        reasons.append(f"doing nothing scores {idle.outcome.reward:g}")
    return "; ".join(reasons)


def record_output(record: EpisodeRecord) -> str:
    """Return the last line that the verifier printed."""
    lines = str(record.detail.get("output", "")).strip().splitlines()
    return lines[-1][:200] if lines else ""
