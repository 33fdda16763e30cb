"""The stages of a task: the task as a whole, or each of its steps, with all that applies to it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rollhook_tbench2.dockerfile import FILE as DOCKERFILE
from rollhook_tbench2.dockerfile import Dockerfile, parse_dockerfile
from rollhook_tbench2.network import Policy
from rollhook_tbench2.problems import TaskProblem, line_of
from rollhook_tbench2.task_toml import FILE as TOML
from rollhook_tbench2.task_toml import (
    Artifact,
    EnvironmentTable,
    HealthCheck,
    StepTable,
    TaskToml,
    VerifierTable,
)

#: where agents publish what is worth keeping; collected wherever anything is
PUBLISHED = "/logs/artifacts"

_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


@dataclass(frozen=True)
class BoxPlan:
    """What a box is made from: a table of settings, an image or a Dockerfile, and the files beside it.

    `directory` is relative to the task; with `bundled` the image holds tests/ already.
    """

    table: EnvironmentTable
    directory: str = "environment"
    docker_image: str | None = None
    dockerfile: Dockerfile | None = None
    bundled: bool = False

    @property
    def needs_image(self) -> bool:
        """Whether it was written for a container image."""
        return self.dockerfile is not None or self.docker_image is not None


@dataclass(frozen=True)
class Stage:
    """What one phase is: `name` and `directory` (relative to the task) are empty for a task without steps.

    `tests` are directories in the order in which they are laid over one another. `judge` is the box that the
    verifier has for itself, None where it works in the agent's.
    """

    name: str
    directory: str
    instruction: str
    agent_seconds: float | None
    user: str | None
    verifier: VerifierTable
    tests: tuple[str, ...]
    judge: BoxPlan | None
    artifacts: tuple[Artifact, ...]
    solution: str = "solution"
    healthcheck: HealthCheck | None = None
    min_reward: float | Mapping[str, float] | None = None


@dataclass(frozen=True)
class TaskDir:
    """The payload of a task: what was read of its directory."""

    path: str
    config: TaskToml
    box: BoxPlan
    network: Policy
    stages: tuple[Stage, ...]

    @property
    def user(self) -> str | None:
        """Whose commands the agent's are, where its step does not say otherwise; None: the image's."""
        user = self.config.agent.user
        return None if user is None else str(user)

    @property
    def instruction(self) -> str:
        """What the agent is asked first."""
        return self.stages[0].instruction

    @property
    def judges(self) -> dict[str, BoxPlan]:
        """The boxes of separate verifiers by name."""
        many = len(self.stages) > 1
        named = {f"verifier-{n}" if many else "verifier": s.judge for n, s in enumerate(self.stages, start=1)}
        return {name: plan for name, plan in named.items() if plan is not None}


def layout_problems(small: Mapping[str, bytes], config: TaskToml | None) -> list[TaskProblem]:
    """Return what is missing, empty or not supported among the files of a task."""
    needed = ["task.toml"]
    steps = config.steps if config is not None else []
    if steps:
        needed += [f"steps/{step.name}/instruction.md" for step in steps]
    else:
        needed.append("instruction.md")
    problems = []
    for name in needed:
        if name not in small:
            problems.append(TaskProblem(name, "", 0, "missing"))
        elif not small[name].strip() and name != "task.toml":
            problems.append(TaskProblem(name, "", 0, "empty"))
    for prefix in [f"steps/{step.name}/" for step in steps] or [""]:
        own, shared = f"{prefix}tests/test.sh", "tests/test.sh"
        script = own if own in small else shared
        # the image of a separate verifier may hold its tests
        if script not in small and not _bundles(small, config, prefix):
            problems.append(TaskProblem(own, "", 0, "missing"))
        elif script in small and not small[script].strip():
            problems.append(TaskProblem(script, "", 0, "empty"))
    for name in small:
        if "docker-compose" in name:
            problems.append(TaskProblem(name, "", 0, "Docker Compose: not supported"))
        elif name == "trajectory.json":
            problems.append(TaskProblem(name, "", 0, "a conversation to begin with: not supported"))
        elif name.endswith(".harborignore"):
            problems.append(TaskProblem(name, "", 0, "rules of files to leave out: not supported"))
    return list(dict.fromkeys(problems))


def _bundles(small: Mapping[str, bytes], config: TaskToml | None, prefix: str) -> bool:
    if config is None:
        return False
    step = next((s for s in config.steps if prefix == f"steps/{s.name}/"), None)
    plan = _judge(small, config, step)
    return plan is not None and plan.bundled


def read_stages(
    directory: Path, config: TaskToml, small: Mapping[str, bytes]
) -> tuple[TaskDir | None, list[TaskProblem]]:
    """Return a task's payload, or what about it cannot work on any sandbox."""
    box = BoxPlan(
        config.environment,
        docker_image=config.environment.docker_image,
        dockerfile=_own_dockerfile(small),
    )
    steps: list[StepTable | None] = [*config.steps] or [None]
    stages = [_stage(directory, config, small, step) for step in steps]
    policies = [_agent_policy(config, step) for step in steps]
    task = TaskDir(str(directory), config, box, policies[0], tuple(stages))
    problems = _network_problems(config, small, policies)
    problems += _leading_out(directory, task)
    for plan in [box, *task.judges.values()]:
        if plan.docker_image is None and plan.dockerfile is not None:
            problems += _copy_problems(directory, plan)
    return task, problems


def _stage(root: Path, config: TaskToml, small: Mapping[str, bytes], step: StepTable | None) -> Stage:
    directory = f"steps/{step.name}/" if step else ""
    verifier = _merged(config.verifier, step.verifier) if step else config.verifier
    judge = _judge(small, config, step)
    user = step.agent.user if step and step.agent.user is not None else config.agent.user
    seconds = step.agent.timeout_sec if step else None
    tests = ["tests", f"{directory}tests"] if step else ["tests"]
    tests = [name for name in tests if not step or os.path.isdir(root / name)]
    artifacts = [*config.artifacts, *(step.artifacts if step else [])]
    if (artifacts or judge) and all(a.source.rstrip("/") != PUBLISHED for a in artifacts):
        artifacts.insert(0, Artifact(source=PUBLISHED))
    return Stage(
        name=step.name if step else "",
        directory=directory.rstrip("/"),
        instruction=_instruction(small[f"{directory}instruction.md"]),
        agent_seconds=seconds if seconds is not None else config.agent.timeout_sec,
        user=None if user is None else str(user),
        verifier=verifier,
        tests=tuple(tests),
        judge=judge,
        artifacts=tuple(artifacts),
        solution=f"{directory}solution",
        healthcheck=step.healthcheck if step else None,
        min_reward=step.min_reward if step else None,
    )


def _instruction(data: bytes) -> str:
    """Return the text without the canary at its beginning, which marks the data and is not for the agent."""
    lines = data.decode("utf-8", "replace").strip().split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()


def _merged(whole: VerifierTable, step: VerifierTable) -> VerifierTable:
    """Return a step's verifier: what it does not say itself holds as for the whole task."""
    given = {name: getattr(step, name) for name in step.model_fields_set}
    given |= {"env": {**whole.env, **step.env}, "collect": [*whole.collect, *step.collect]}
    if step.separate is not None:
        given |= {
            "environment_mode": step.environment_mode,
            "environment": step.environment or whole.environment,
        }
    if step.network_mode is not None:
        given["allowed_hosts"] = step.allowed_hosts
    return whole.model_copy(update=given)


def _judge(small: Mapping[str, bytes], config: TaskToml, step: StepTable | None) -> BoxPlan | None:
    """Return the box of a separate verifier: its image, its tests' Dockerfile, else the task's own box."""
    said = step.verifier.separate if step else None
    if not (config.verifier.separate if said is None else said):
        return None
    own = step.verifier.environment if step else None
    tables = [(own, f"steps/{step.name}/tests")] if step else []
    tables.append((config.verifier.environment, "tests"))
    settings = own or config.verifier.environment or config.environment
    for table, directory in tables:
        if table is not None and table.docker_image:
            return BoxPlan(settings, directory, docker_image=table.docker_image, bundled=True)
        if (source := small.get(f"{directory}/Dockerfile")) is not None:
            dockerfile = _parsed(source, f"{directory}/Dockerfile")
            return BoxPlan(settings, directory, dockerfile=dockerfile, bundled=True)
    base = _own_dockerfile(small)
    return BoxPlan(settings, docker_image=config.environment.docker_image, dockerfile=base)


def _own_dockerfile(small: Mapping[str, bytes]) -> Dockerfile | None:
    source = small.get(DOCKERFILE)
    return _parsed(source, DOCKERFILE) if source is not None else None


def _agent_policy(config: TaskToml, step: StepTable | None) -> Policy:
    own = step.agent.policy if step else None
    return own or config.agent.policy or config.environment.policy or Policy()


def judge_policy(task: TaskDir, stage: Stage) -> Policy:
    """Return the network policy of a separate verifier."""
    assert stage.judge is not None
    return stage.verifier.policy or stage.judge.table.policy or Policy()


def _network_problems(
    config: TaskToml, small: Mapping[str, bytes], policies: list[Policy]
) -> list[TaskProblem]:
    """Return where one sandbox would have to change its network while it runs, which none here can."""
    problems: list[tuple[list[str | int], str]] = []
    steps: list[StepTable | None] = [*config.steps] or [None]
    text = small.get("task.toml", b"").decode("utf-8", "replace")
    baseline = config.environment.policy or Policy()
    for number, (step, agent) in enumerate(zip(steps, policies, strict=True)):
        path: list[str | int] = ["steps", number] if step else []
        if agent != policies[0]:
            reason = f"{agent} where the first step has {policies[0]}"
            problems.append(([*path, "agent", "network_mode"], reason))
        if _judge(small, config, step) is None:
            verifier = (step.verifier.policy if step else None) or config.verifier.policy or baseline
            if verifier != agent:
                reason = f"{verifier} for the verifier in the sandbox of an agent with {agent}"
                problems.append(([*path, "verifier", "network_mode"], reason))
    why = (
        ": no sandbox changes its network while it runs; give the verifier a box of its own "
        "([verifier] environment_mode = 'separate')"
    )
    return [
        TaskProblem(TOML, ".".join(str(part) for part in path), line_of(text, path), reason + why)
        for path, reason in problems
    ]


@lru_cache(maxsize=256)
def _parsed(dockerfile: bytes, file: str) -> Dockerfile:
    return parse_dockerfile(dockerfile.decode("utf-8", "replace"), file)


def _copy_problems(directory: Path, plan: BoxPlan) -> list[TaskProblem]:
    assert plan.dockerfile is not None
    context, problems = directory / plan.directory, []
    for source, _ in plan.dockerfile.copies:
        why = ""
        if not os.path.exists(context / source):
            why = "is not in"
        elif not _inside(context / source, Path(os.path.realpath(context))):
            why = "leads out of"
        if why:
            reason = f"{source} {why} {plan.directory}/"
            problems.append(TaskProblem(f"{plan.directory}/Dockerfile", "COPY", 0, reason))
    return problems


def _leading_out(root: Path, task: TaskDir) -> list[TaskProblem]:
    """Return which directories whose files go into sandboxes are links to elsewhere on this machine."""
    names = [plan.directory for plan in [task.box, *task.judges.values()]]
    for stage in task.stages:
        names += [*stage.tests, stage.solution, *([f"{stage.directory}/workdir"] if stage.directory else [])]
    real = Path(os.path.realpath(root))
    return [
        TaskProblem(name, "", 0, "leads out of the task")
        for name in dict.fromkeys(names)
        if not _inside(real / name, real)
    ]


def _inside(path: Path, root: Path) -> bool:
    """Return whether a path that is followed through links stays in `root`, which has none."""
    return Path(os.path.realpath(path)).is_relative_to(root)
