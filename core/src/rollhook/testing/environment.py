"""The contract of environments: inherit `EnvironmentContract`, give it an environment, run pytest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.environment import Environment, EpisodeContext, Task, Transcript, Verdict
from rollhook.errors import UsageError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.contract import Contract

MakeEnvironment = Callable[[], Environment]
#: an async context manager that makes a live sandbox and removes it
OpenBox = Callable[[SandboxSpec], contextlib.AbstractAsyncContextManager[Sandbox]]

_MARK = "/tmp/.rollhook-mark"
_NEWER_FILES = f"""\
find / '(' -path /proc -o -path /sys -o -path /dev ')' -prune \
  -o -type f -size -2048 -newer {_MARK} -print 2>/dev/null
"""
BUDGET_NODES = {"create", "setup", "agent", "verify"}


def build_context(directory: Path = Path("."), **changes: Any) -> BuildContext:
    """Return a context for building a component in a test."""
    values: dict[str, Any] = {"scratch": directory, "cache": directory, "seed": 0, **changes}
    return BuildContext(logging.getLogger("rollhook.test"), **values)


class EnvironmentContract(Contract):
    """What every environment must do. A suite gives two fixtures and may give more.

    `make_environment` returns a callable that builds the environment afresh from one configuration;
    `open_box` returns what makes a sandbox for a spec (needed when episodes have boxes). Where the data
    can hold such tasks: `problem_task` is the id of one that cannot run, `no_reward_task` the id of one
    whose verifier gives no reward. `task_limit` bounds how many tasks are solved.
    """

    task_limit = 3
    oracle_reward = 1.0

    @pytest.fixture
    def make_environment(self) -> MakeEnvironment:
        """Build the environment under test, each time anew."""
        raise NotImplementedError("give the contract a fixture make_environment that returns a builder")

    @pytest.fixture
    def open_box(self) -> OpenBox | None:
        """Make sandboxes; None where no episode has a box."""
        return None

    @pytest.fixture
    def problem_task(self) -> str | None:
        """Return the id of a task that cannot run."""
        return None

    @pytest.fixture
    def no_reward_task(self) -> str | None:
        """Return the id of a task whose verifier gives no reward."""
        return None

    def test_there_is_a_task_that_can_run(self, make_environment: MakeEnvironment) -> None:
        assert runnable(make_environment())

    def test_task_ids_are_unique(self, make_environment: MakeEnvironment) -> None:
        ids = [task.id for task in make_environment().tasks()]
        assert len(set(ids)) == len(ids)

    def test_the_same_configuration_gives_the_same_tasks(self, make_environment: MakeEnvironment) -> None:
        first, second = make_environment(), make_environment()
        assert [task.id for task in first.tasks()] == [task.id for task in second.tasks()]
        assert [task.id for task in first.tasks()] == [task.id for task in first.tasks()]

    def test_digests_are_stable_and_tell_tasks_apart(self, make_environment: MakeEnvironment) -> None:
        first, second = make_environment().tasks(), make_environment().tasks()
        assert {task.id: task.digest for task in first} == {task.id: task.digest for task in second}
        assert len({task.digest for task in first}) == len(first)

    def test_an_unknown_split_is_a_usage_error(self, make_environment: MakeEnvironment) -> None:
        with pytest.raises(UsageError):
            make_environment().tasks("a split that nobody has")

    def test_tasks_travel_between_processes(self, make_environment: MakeEnvironment) -> None:
        tasks = make_environment().tasks()
        assert [task.id for task in pickle.loads(pickle.dumps(list(tasks)))] == [task.id for task in tasks]

    def test_limits_are_seconds_of_budget_nodes(self, make_environment: MakeEnvironment) -> None:
        for task in make_environment().tasks():
            assert set(task.limits) <= BUDGET_NODES
            assert all(seconds > 0 and math.isfinite(seconds) for seconds in task.limits.values())

    def test_problems_are_sentences(self, make_environment: MakeEnvironment) -> None:
        for problem in make_environment().problems(frozenset()):
            assert isinstance(problem, str)
            assert problem.strip()

    def test_a_task_that_cannot_run_says_why_and_is_refused(
        self, make_environment: MakeEnvironment, problem_task: str | None
    ) -> None:
        if problem_task is None:
            pytest.skip("no problem_task: every task of this environment can run")
        environment = make_environment()
        task = next(task for task in environment.tasks() if task.id == problem_task)
        assert task.problem
        with pytest.raises(Exception, match=r"\S"):
            _ = environment.episode(task, _context({})).boxes

    async def test_the_agent_is_told_what_to_do(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        async with entered(environment, runnable(environment)[0], open_box) as phases:
            async for phase in phases:
                users = [m for m in phase.observation.messages if m["role"] == "user"]
                assert users
                assert all((m["content"] or "").strip() for m in users)

    async def test_the_reference_solution_earns_the_full_reward(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        for task in runnable(environment)[: self.task_limit]:
            verdict = await attempt(environment, task, open_box, solve=True)
            assert verdict.reward == self.oracle_reward, f"{task.id}: {verdict.detail}"

    async def test_doing_nothing_earns_less(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        for task in runnable(environment)[: self.task_limit]:
            verdict = await attempt(environment, task, open_box, solve=False)
            assert verdict.reward is not None, f"{task.id}: {verdict.detail}"
            assert verdict.reward < self.oracle_reward

    async def test_rewards_and_components_are_finite_numbers(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        for solve in (True, False):
            verdict = await attempt(environment, runnable(environment)[0], open_box, solve=solve)
            for number in (verdict.reward, *verdict.components.values()):
                assert type(number) in (int, float)
                assert math.isfinite(number)  # type: ignore[arg-type]

    async def test_a_missing_reward_is_none_and_says_why(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None, no_reward_task: str | None
    ) -> None:
        if no_reward_task is None:
            pytest.skip("no no_reward_task: the verifier of this environment always gives a reward")
        environment = make_environment()
        task = next(task for task in environment.tasks() if task.id == no_reward_task)
        verdict = await attempt(environment, task, open_box, solve=False)
        assert verdict.reward is None
        assert verdict.detail

    async def test_episodes_at_once_do_not_disturb_each_other(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        task = runnable(environment)[0]
        solves = [True, False, True, False]
        verdicts = await asyncio.gather(
            *(attempt(environment, task, open_box, solve=solve) for solve in solves)
        )
        assert [verdict.reward == self.oracle_reward for verdict in verdicts] == solves

    async def test_judging_again_gives_the_same_reward(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        for solve in (True, False):
            once = await attempt(environment, runnable(environment)[0], open_box, solve=solve)
            again = await attempt(environment, runnable(environment)[0], open_box, solve=solve, times=2)
            assert again.reward == once.reward

    async def test_files_that_a_verifier_leaves_earn_nothing_when_planted(
        self, make_environment: MakeEnvironment, open_box: OpenBox | None
    ) -> None:
        environment = make_environment()
        task = runnable(environment)[0]
        untouched = await attempt(environment, task, open_box, solve=False)
        left = await _left_by_the_verifier(environment, task, open_box)
        if not left:
            pytest.skip("the verifier leaves no file where an agent could have put it")
        boxes: dict[str, Sandbox] = {}
        verdict = Verdict(None)
        async with entered(environment, task, open_box, boxes) as phases:
            async for phase in phases:
                for path, data in left.get(phase.box, {}).items():
                    await boxes[phase.box].write(path, data, mode=0o755)
                verdict = await phase.verify(Transcript(list(phase.observation.messages), "done"))
        assert verdict.reward == untouched.reward, f"planted: {left}"

    async def test_closing_twice_is_safe(self, make_environment: MakeEnvironment) -> None:
        environment = make_environment()
        await environment.aclose()
        await environment.aclose()


def runnable(environment: Environment) -> list[Task]:
    """Return the tasks that have no problem."""
    return [task for task in environment.tasks() if task.problem is None]


@contextlib.asynccontextmanager
async def entered(
    environment: Environment,
    task: Task,
    open_box: OpenBox | None,
    boxes: dict[str, Sandbox] | None = None,
) -> AsyncIterator[AsyncIterator[Any]]:
    """Make an episode with its boxes, enter it and yield its phases, as the runtime does.

    `boxes`, where given, is filled with the live sandboxes by name.
    """
    boxes = {} if boxes is None else boxes
    episode = environment.episode(task, _context(boxes))
    async with contextlib.AsyncExitStack() as stack:
        for name, box in episode.boxes.items():
            if box.when == "start":
                assert open_box is not None, f"task {task.id} has the box {name}: give a fixture open_box"
                boxes[name] = await stack.enter_async_context(open_box(box.spec))
        await stack.enter_async_context(episode)
        yield episode.phases()


async def attempt(
    environment: Environment, task: Task, open_box: OpenBox | None, *, solve: bool, times: int = 1
) -> Verdict:
    """Run one episode without an agent, with the reference solution or nothing; return the last verdict.

    Each phase is judged `times` times.
    """
    verdict = Verdict(None, detail={"reason": "the episode has no phase"})
    async with entered(environment, task, open_box) as phases:
        async for phase in phases:
            if solve:
                await phase.solve()
            for _ in range(times):
                verdict = await phase.verify(Transcript(list(phase.observation.messages), "done"))
    return verdict


async def _left_by_the_verifier(
    environment: Environment, task: Task, open_box: OpenBox | None
) -> dict[str, dict[str, bytes]]:
    """Solve a task and return the files that judging it wrote, by box and path."""
    left: dict[str, dict[str, bytes]] = {}
    boxes: dict[str, Sandbox] = {}
    async with entered(environment, task, open_box, boxes) as phases:
        async for phase in phases:
            await phase.solve()
            box = boxes.get(phase.box) if phase.box else None
            if box is not None:
                await box.shell(f"touch {_MARK}; sleep 0.05", cwd="/", timeout=60)
            await phase.verify(Transcript(list(phase.observation.messages), "done"))
            if box is not None:
                found = await box.shell(_NEWER_FILES, cwd="/", timeout=60)
                paths = [path for path in found.text.splitlines() if path.startswith("/")]
                left.setdefault(phase.box, {}).update({path: await box.read(path) for path in paths})
    return {name: files for name, files in left.items() if files}


def _context(boxes: Mapping[str, Sandbox]) -> EpisodeContext:
    return EpisodeContext("episode", 0, boxes, build_context())
