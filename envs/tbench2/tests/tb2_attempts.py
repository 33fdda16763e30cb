"""Whole attempts at tasks of a test: the runtime's own order of things, in sandboxes of any backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.component import Config
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.records import EpisodeRecord
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollhook.secrets import resolve_secret
from rollhook.testing.boxes import open_box
from rollhook.testing.environment import build_context
from rollhook_tbench2.config import TBench2Config
from rollhook_tbench2.environment import TBench2

TOML = '[metadata]\nhost_ok = true\n[environment]\nnetwork_mode = "no-network"\n'
#: 1 if the agent wrote `done` to answer.txt
TEST = """#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(root: Path, **files: str) -> Path:
    """Write a task below `root`; a file that is given as "" is left out."""
    content = {
        "task.toml": TOML,
        "instruction.md": "Write done to answer.txt.",
        "tests/test.sh": TEST,
        **files,
    }
    for name, text in content.items():
        if text:
            path = root / "task" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root / "task"


#: what an agent does with its tools
Use = Callable[[Any], Awaitable[None]]


class Pool:
    """Just enough of a pool: sandboxes of one backend."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend = backend
        self.made: list[tuple[str, SandboxSpec]] = []
        self._open: dict[str, AsyncExitStack] = {}

    async def acquire(self, spec: SandboxSpec, *, episode_id: str, box: str, timeout: float) -> Sandbox:
        stack = AsyncExitStack()
        sandbox = await stack.enter_async_context(open_box(self.backend, spec))
        self._open[sandbox.id] = stack
        self.made.append((box, spec))
        return sandbox

    def waits_for(self, episode_id: str) -> str:
        return ""

    async def release(self, sandbox: Sandbox) -> None:
        await self._open.pop(sandbox.id).aclose()


class Runs(Agent):
    """Runs the commands of each phase in turn; `solve` applies the reference solution instead."""

    needs_policy = False

    def __init__(self, phases: list[list[str]], solve: bool) -> None:
        super().__init__(Config(), build_context())
        self.needs_solution = solve  # type: ignore[misc]
        self._phases = phases
        self.printed: list[str] = []
        self.asked: list[str] = []
        self.use: Use | None = None

    async def run(self, context: AgentContext) -> StopReason:
        self.asked.append(str(context.observation.messages[-1]["content"]))
        if context.solve is not None:
            await context.solve()
        if self.use is not None:
            await self.use(context.tools)
        assert context.sandbox is not None
        for command in self._phases.pop(0) if self._phases else []:
            result = await context.sandbox.exec(["/bin/sh", "-c", command], timeout=60)
            self.printed.append(result.text + result.error_text)
        return StopReason.DONE


class Attempts:
    """Runs attempts on one backend and keeps what the last one made."""

    def __init__(self, backend: SandboxBackend, scratch: Path, image: str = "debian:12") -> None:
        self.pool = Pool(backend)
        self.image = image
        self.scratch = scratch
        self.agent = Runs([], False)

    async def run(
        self,
        task: Path,
        *phases: list[str],
        solve: bool = False,
        use: Use | None = None,
        name: str = "e",
        **keys: Any,
    ) -> EpisodeRecord:
        """Run an episode whose agent first uses its tools, then runs a list of commands per phase."""
        context = build_context(self.scratch, secret=resolve_secret)
        environment = TBench2(TBench2Config(tasks_dir=str(task), **keys), context)
        assert environment.problems(self.pool.backend.capabilities) == []
        (only,) = environment.tasks()
        assert only.problem is None, only.problem
        self.agent = Runs(list(phases), solve)
        self.agent.use = use
        runner = EpisodeRunner(
            name="tbench2",
            environment=environment,
            agent=self.agent,
            pool=self.pool,  # type: ignore[arg-type]
            policy=None,
            limits=Budgets(),
            outcome_policy=Outcomes(),
            context=build_context(self.scratch),
        )
        return (await runner.run(EpisodeRequest(name, name, only, 0, purpose="oracle"))).record
