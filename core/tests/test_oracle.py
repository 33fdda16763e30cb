"""Proofs of tasks without a model: what a row says, what a resumed proof runs again, what the verbs print."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.environment import Environment, Task
from rollhook.errors import RunError, UsageError
from rollhook.rundir import Attempt, RunDir
from rollhook.runtime.oracle import Proofs, Results, TaskProof
from rollhook.runtime.parts import Parts
from rollhook.runtime.task_runs import proof_recipe, task_source
from rollhook.testing.fake_environment import Sums, SumsConfig


class Solves(Agent):
    needs_policy = False
    needs_solution = True

    async def run(self, context: AgentContext) -> StopReason:
        assert context.solve is not None
        await context.solve()
        return StopReason.DONE


class Idles(Agent):
    needs_policy = False

    async def run(self, context: AgentContext) -> StopReason:
        return StopReason.DONE


class FakePlugins:
    """Builds the environment under test and the two agents."""

    def __init__(self, environment: type[Environment], agents: Mapping[str, type[Agent]]) -> None:
        self.environment = environment
        self.agents = agents

    def build(self, kind: str, name: str, keys: Mapping[str, Any], context: Any) -> Any:
        if kind == "environment":
            return self.environment(SumsConfig(), context)
        return self.agents[name](SumsConfig(), context)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    claimed = RunDir.create(tmp_path / "runs", "oracle").claim()
    yield claimed
    claimed.finish("succeeded")


def prove(
    attempt: Attempt,
    environment: type[Environment] = Sums,
    tasks: Sequence[str] | None = None,
    **agents: type[Agent],
) -> dict[str, TaskProof]:
    plugins: Any = FakePlugins(environment, {"oracle": Solves, "nop": Idles, **agents})
    recipe = proof_recipe({"use": "sums"}, None)
    rows: dict[str, TaskProof] = {}

    async def run() -> None:
        parts = Parts(recipe, plugins, attempt.path, attempt.run.run_id, attempt.number)

        def choose(environment: Environment) -> list[Task]:
            return [task for task in environment.tasks() if tasks is None or task.id in tasks]

        async with Proofs(parts, attempt, choose) as proofs:
            await proofs.run(proofs.tasks, 3, lambda row: rows.__setitem__(row.task_id, row))

    asyncio.run(run())
    return rows


def test_every_task_gets_a_row_with_its_marks(attempt: Attempt) -> None:
    rows = prove(attempt)
    marks = {name: (row.oracle, row.nop, row.ok) for name, row in rows.items()}
    sums = {f"sum-{pair}": ("1", "0", True) for pair in ("1-2", "3-4", "10-20", "7-5")}
    assert marks == {**sums, "unjudged": ("ERR", "ERR", False), "broken": ("ERR", "ERR", False)}
    assert rows["broken"].why == "b is missing"
    assert rows["unjudged"].why == (
        "oracle: verifier: this task has no verifier; nop: verifier: this task has no verifier"
    )
    assert rows["sum-1-2"].why == ""


def test_a_solution_that_does_not_solve_and_a_task_that_is_solved_already_are_named(attempt: Attempt) -> None:
    (row,) = prove(attempt, tasks=["sum-1-2"], oracle=Idles).values()
    assert (row.oracle, row.ok, row.why) == ("0", False, "the solution scores 0")
    (row,) = prove(attempt, tasks=["sum-1-2"], nop=Solves).values()
    assert (row.nop, row.ok, row.why) == ("1", False, "doing nothing scores 1")


def test_an_agent_that_fails_is_an_error_of_its_boundary(attempt: Attempt) -> None:
    class Fails(Idles):
        async def run(self, context: AgentContext) -> StopReason:
            raise RuntimeError("no legs")

    (row,) = prove(attempt, tasks=["sum-1-2"], oracle=Fails).values()
    assert (row.oracle, row.nop, row.final) == ("ERR", "0", False)
    assert row.why == "oracle: agent: RuntimeError: no legs"


def test_an_environment_that_cannot_run_here_is_refused(attempt: Attempt) -> None:
    class NeedsImages(Sums):
        def problems(
            self, sandbox_capabilities: frozenset[str], tasks: Sequence[Task] | None = None
        ) -> Sequence[str]:
            return ["task x needs an image"]

    with pytest.raises(UsageError, match="these tasks cannot run here: task x needs an image"):
        prove(attempt, NeedsImages)


def test_tasks_that_are_not_chosen_refuse_nothing(attempt: Attempt) -> None:
    class OneNeedsImages(Sums):
        def problems(
            self, sandbox_capabilities: frozenset[str], tasks: Sequence[Task] | None = None
        ) -> Sequence[str]:
            every = self.tasks() if tasks is None else tasks
            return [f"{task.id} needs an image" for task in every if task.id == "sum-3-4"]

    with pytest.raises(UsageError, match="sum-3-4 needs an image"):
        prove(attempt, OneNeedsImages)
    assert list(prove(attempt, OneNeedsImages, ["sum-1-2"])) == ["sum-1-2"]


def row(name: str, digest: str = "d", mark: Any = "1") -> TaskProof:
    return TaskProof(name, digest, "f", mark, "0", 1.0, 0.0, mark == "1", "", 0.1)


def test_a_resumed_proof_runs_errors_and_changed_tasks_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    first = Results(path)
    for each in (row("good"), row("bad", mark="0"), row("error", mark="ERR"), row("changed")):
        first.add(each)
    first.close()
    path.write_bytes(path.read_bytes() + b'{"schema":1,"task_id":"torn')
    second = Results(path)
    tasks = [Task(name, "d", "train") for name in ("good", "bad", "error", "new", "torn")]
    todo = second.todo([*tasks, Task("changed", "other", "train")])
    assert [task.id for task in todo] == ["error", "new", "torn", "changed"]
    second.add(row("error"))
    second.close()
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [r["task_id"] for r in rows] == ["good", "bad", "changed", "error"]
    assert {r["schema"] for r in rows} == {1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"my notes", "line 1 is no row"),
        (b'{"schema":1,"task_id":"a"}', "line 1 is no row"),
        (b"[]", "line 1 is no row"),
        (b'{"schema":9}', "has schema 9, this Rollhook reads up to 1"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    line: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(RunError, match=said):
        Results(path)
    assert path.read_bytes() == line + b"\n"


def test_a_source_is_a_directory_a_pack_or_an_environment(tmp_path: Path) -> None:
    assert task_source(str(tmp_path), "tbench2", {"reward_key": "x"}) == {
        "use": "tbench2",
        "tasks_dir": str(tmp_path),
        "reward_key": "x",
    }
    assert task_source("pack.pocket", "tbench2", {}) == task_source("pocket", "tbench2", {})
    assert task_source("environment.tbench2", "x", {"split": "all"}) == {"use": "tbench2", "split": "all"}
    with pytest.raises(UsageError, match="'nowhere' is no directory, pack or environment; packs here: "):
        task_source("nowhere", "tbench2", {})


def test_keys_of_the_sandbox_that_are_wrong_are_told() -> None:
    with pytest.raises(UsageError, match=r"sandbox\.warm: -1 should be greater than or equal to 0"):
        proof_recipe({"use": "sums"}, {"use": "local", "warm": -1})
