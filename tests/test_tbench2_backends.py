"""Tasks in the form of Terminal-Bench 2 on every sandbox backend: the same directories, the same verdicts.

`tests/tb2` holds them; all build on one Debian image. Without images those run that say that they may; the
others need a container. Harbor's own oracle on the same directories, in Podman, must agree.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.rundir import RunDir
from rollhook.runtime.oracle import Proofs, TaskProof
from rollhook.runtime.task_runs import load_parts, proof_recipe, task_source
from rollhook.testing.parts import needs_part
from rollhook.testing.podman import Engine, container_engine

TASKS = Path(__file__).parent / "tb2"
#: what the solution and what nothing scores; None: no verdict
VERDICTS: dict[str, tuple[float | None, float | None]] = {
    path.name: (1.0, 0.0) for path in sorted(TASKS.iterdir()) if path.is_dir()
} | {
    "no-verdict": (None, None),
    "partial-credit": (0.5, 0.0),
    "two-steps": (1.0, 0.0),
}  # fmt: skip
ON_HOST = [name for name in VERDICTS if "host_ok = true" in (TASKS / name / "task.toml").read_text()]
#: those that `.ci/run` tries in containers; the others are for the night
FEW = ["sort-lines", "users-own-file", "judged-apart"]


def prove(tmp_path: Path, sandbox: dict[str, Any], names: list[str]) -> dict[str, TaskProof]:
    """Run the oracle and nothing on tasks."""
    rows: dict[str, TaskProof] = {}

    async def run() -> None:
        attempt = RunDir.create(tmp_path / "runs", "tb2").claim()
        recipe = proof_recipe(task_source(str(TASKS), "tbench2", {}), sandbox)
        parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number)
        async with Proofs(parts, attempt) as proofs:
            tasks = [task for task in proofs.environment.tasks() if task.id in names]
            assert [task.problem for task in tasks] == [None] * len(names)
            await proofs.run(tasks, 2, lambda row: rows.__setitem__(row.task_id, row))
        attempt.finish("succeeded")

    asyncio.run(run())
    return rows


def verdicts(rows: dict[str, TaskProof]) -> dict[str, tuple[float | None, float | None]]:
    for row in rows.values():
        print(row)
    return {name: (row.oracle_reward, row.nop_reward) for name, row in rows.items()}


def expected(names: list[str]) -> dict[str, tuple[float | None, float | None]]:
    return {name: VERDICTS[name] for name in names}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    needs_part("rollhook_docker", "rollhook_tbench2", "rollhook_agents")
    with container_engine() as engine:
        yield engine


@pytest.fixture
def host_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the tasks that need no image, as all tasks of a directory must be able to run."""
    needs_part("rollhook_tbench2", "rollhook_agents")
    root = tmp_path / "tasks"
    root.mkdir()
    for name in ON_HOST:
        (root / name).symlink_to(TASKS / name)
    monkeypatch.setattr(sys.modules[__name__], "TASKS", root)


def test_there_are_a_dozen() -> None:
    assert len(VERDICTS) >= 12
    assert len(ON_HOST) >= 8


def test_on_this_machine(tmp_path: Path, host_tasks: None) -> None:
    needs_part("rollhook_local")
    assert verdicts(prove(tmp_path, {"use": "local"}, ON_HOST)) == expected(ON_HOST)


def in_containers(engine: Engine, tmp_path: Path, names: list[str]) -> dict[str, TaskProof]:
    return prove(
        tmp_path, {"use": "docker", "host": engine.host, "image": engine.image, "pull": "never"}, names
    )


def test_in_containers(engine: Engine, tmp_path: Path) -> None:
    assert verdicts(in_containers(engine, tmp_path, FEW)) == expected(FEW)


@pytest.mark.nightly
def test_all_in_containers(engine: Engine, tmp_path: Path) -> None:
    assert verdicts(in_containers(engine, tmp_path, list(VERDICTS))) == VERDICTS
