"""Tasks in the form of Terminal-Bench 2 on every sandbox backend: the same directories, the same verdicts.

`tests/tb2` holds them; all build on one Debian image. Without images those run that say that they may; the
others need a container. Harbor's own oracle on the same directories, in Podman, must agree.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import machines
from doubles.client import Double, vendors

from rollhook.rundir import RunDir
from rollhook.runtime.oracle import Proofs, TaskProof
from rollhook.runtime.task_runs import load_parts, proof_recipe, task_source
from rollhook.testing.parts import find_python, needs_part
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
#: those that `.ci/run` tries in containers and at vendors; the others are for the night
FEW = ["sort-lines", "users-own-file", "judged-apart"]


def prove(tmp_path: Path, sandbox: dict[str, Any], names: list[str]) -> dict[str, TaskProof]:
    """Run the oracle and nothing on tasks; they lie alone, as all of a directory must be able to run."""
    root = tmp_path / "tasks"
    root.mkdir()
    for name in names:
        (root / name).symlink_to(TASKS / name)
    rows: dict[str, TaskProof] = {}

    async def run() -> None:
        attempt = RunDir.create(tmp_path / "runs", "tb2").claim()
        recipe = proof_recipe(task_source(str(root), "tbench2", {}), sandbox)
        parts = load_parts(recipe, attempt.path, attempt.run.run_id, attempt.number)
        async with Proofs(parts, attempt) as proofs:
            await proofs.run(proofs.environment.tasks(), 2, lambda row: rows.__setitem__(row.task_id, row))
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


def test_there_are_a_dozen() -> None:
    assert len(VERDICTS) >= 12
    assert len(ON_HOST) >= 8


def test_on_this_machine(tmp_path: Path) -> None:
    needs_part("rollhook_tbench2", "rollhook_agents", "rollhook_local")
    assert verdicts(prove(tmp_path, {"use": "local"}, ON_HOST)) == expected(ON_HOST)


def in_containers(engine: Engine, tmp_path: Path, names: list[str]) -> dict[str, TaskProof]:
    return prove(
        tmp_path, {"use": "docker", "host": engine.host, "image": engine.image, "pull": "never"}, names
    )


def test_in_containers(engine: Engine, tmp_path: Path) -> None:
    assert verdicts(in_containers(engine, tmp_path, FEW)) == expected(FEW)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_all_in_containers(engine: Engine, tmp_path: Path) -> None:
    assert verdicts(in_containers(engine, tmp_path, list(VERDICTS))) == VERDICTS


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    """Run the double of the vendors; no request may be unknown to it."""
    needs_part("rollhook_tbench2", "rollhook_agents")
    if reason := machines.available():
        pytest.skip(f"needs bubblewrap ({reason})")
    with vendors() as running:
        yield running
        assert running.problems() == []


def at_vendor(name: str, double: Double, tmp_path: Path, names: list[str]) -> dict[str, TaskProof]:
    keys = {
        "daytona": {"api_url": double.url("daytona") + "/api"},
        "e2b": {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")},
    }
    secret = tmp_path / "key"
    secret.write_text(double.key)
    return prove(tmp_path, {"use": name, "api_key": f"file:{secret}", **keys[name]}, names)


@pytest.mark.parametrize("name", ["daytona", "e2b"])
def test_at_vendors(name: str, double: Double, tmp_path: Path) -> None:
    needs_part(f"rollhook_{name}", name)
    assert verdicts(at_vendor(name, double, tmp_path, FEW)) == expected(FEW)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["daytona", "e2b"])
def test_all_that_need_no_image_at_vendors(name: str, double: Double, tmp_path: Path) -> None:
    needs_part(f"rollhook_{name}", name)
    assert verdicts(at_vendor(name, double, tmp_path, ON_HOST)) == expected(ON_HOST)


HARBOR = ("harbor==0.26.0", "podman-compose>=1.5")
#: Harbor refuses a network policy on Podman: this one is left out, and the others say nothing of networks
NOT_THERE = "no-way-out"


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Harbor, which wants Python 3.12, into an environment of its own; return its `bin`."""
    needs_part("python3.12")
    python = find_python("3.12")
    assert python is not None
    venv = tmp_path_factory.mktemp("harbor") / "venv"
    subprocess.run([python, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "install", "-q", *HARBOR], check=True)
    return venv / "bin"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_harbors_own_oracle_agrees(engine: Engine, harbor: Path, tmp_path: Path) -> None:
    assert engine.root is not None, "Harbor drives podman itself: unset DOCKER_HOST"
    tasks = tmp_path / "tasks"
    shutil.copytree(TASKS, tasks)
    shutil.rmtree(tasks / NOT_THERE)
    for path in tasks.glob("*/task.toml"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("network_mode")))
    environ = {
        "PATH": f"{harbor}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "HOME": str(tmp_path),
        "CONTAINERS_CONF": str(engine.root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(engine.root / "storage.conf"),
        "PODMAN_COMPOSE_PROVIDER": str(harbor / "podman-compose"),
        "PODMAN_COMPOSE_WARNING_LOGS": "false",
        "HARBOR_TELEMETRY": "0",
        "DO_NOT_TRACK": "1",
    }
    for agent, column in (("oracle", 0), ("nop", 1)):
        argv = [harbor / "harbor", "run", "-p", tasks, "-a", agent, "-e", "podman", "-n", "2", "-y", "-q"]
        argv += ["-o", tmp_path / "jobs", "--job-name", agent]
        subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, check=False)
        theirs = {}
        for path in (tmp_path / "jobs" / agent).glob("*/result.json"):
            trial = json.loads(path.read_text())
            verdict = trial["verifier_result"]
            theirs[path.parent.name.rpartition("__")[0]] = verdict["rewards"]["reward"] if verdict else None
        print(agent, theirs)
        assert theirs == {name: both[column] for name, both in VERDICTS.items() if name != NOT_THERE}
