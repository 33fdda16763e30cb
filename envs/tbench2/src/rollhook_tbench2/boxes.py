"""The sandboxes that a task asks for, and why one cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollhook.errors import Unsupported
from rollhook.sandbox import SandboxSpec
from rollhook_tbench2 import templates
from rollhook_tbench2.config import Floor
from rollhook_tbench2.network import Policy
from rollhook_tbench2.stages import BoxPlan, TaskDir, judge_policy

How = Literal["image", "build", "host"]
_ROOT = (None, "root", "0")


@dataclass(frozen=True)
class Ground:
    """What a task's boxes are made on: the capabilities of the sandboxes, and the recipe's keys.

    `hide` replaces the values that `lookup` has given by their names, in what is recorded.
    """

    capabilities: Collection[str]
    floor: Floor
    lookup: templates.Lookup
    hide: Callable[[str], str]

    def how(self, plan: BoxPlan) -> How:
        """Return how a box is made here: from an image, by building one, or without any."""
        if plan.docker_image is not None and "image" in self.capabilities:
            return "image"
        return "build" if plan.needs_image and "image_build" in self.capabilities else "host"


def box_spec(task: TaskDir, plan: BoxPlan, network: Policy, ground: Ground, user: str | None) -> SandboxSpec:
    """Return what a box must be. Raises Unsupported when it cannot be had without images."""
    how, table, dockerfile = ground.how(plan), plan.table, plan.dockerfile
    if how == "host" and (why := why_not_on_host(task, plan)):
        raise Unsupported(f"task {Path(task.path).name}: {why}")
    host = how == "host"
    floor = ground.floor
    memory = table.memory_mb if host else max(table.memory_mb or 0, floor.memory_mb)
    storage = table.storage_mb if host else max(table.storage_mb or 0, floor.storage_mb)
    build = how == "build"
    text = dockerfile.text if dockerfile is not None else f"FROM {plan.docker_image}\n"
    return SandboxSpec(
        image=plan.docker_image if how == "image" else None,
        dockerfile=text if build else None,
        context_dir=str(Path(task.path, plan.directory)) if build and dockerfile is not None else None,
        build_seconds=table.build_timeout_sec if build else None,
        workdir=workdir_of(plan, how),
        user=user or (None if host or dockerfile is None else dockerfile.user or None),
        env={
            **(dockerfile.env if dockerfile is not None and host else {}),
            **templates.resolve(table.env, ground.lookup),
        },
        memory_bytes=memory * 2**20 if memory else None,
        cpus=table.cpus if host else max(table.cpus or 0.0, floor.cpus) or None,
        disk_bytes=storage * 2**20 if storage else None,
        network=network.mode == "public",
        network_allow=network.hosts,
    )


def workdir_of(plan: BoxPlan, how: How) -> str:
    """Return where commands start: as task.toml says, else the Dockerfile, else the backend's default."""
    inherited = plan.dockerfile.workdir if plan.dockerfile else None
    return plan.table.workdir or inherited or (SandboxSpec().workdir if how == "host" else "/")


def why_not_on_host(task: TaskDir, plan: BoxPlan) -> str:
    """Return why a box cannot be had in a sandbox without images; empty: it can."""
    if not plan.needs_image:
        return ""
    if not task.config.host_ok:
        return "it needs its container image, and its task.toml does not say `[metadata] host_ok = true`"
    if plan.dockerfile is None and plan.bundled:
        return f"its verifier is the image {plan.docker_image}: it needs a sandbox that runs images"
    refused = plan.dockerfile.refused if plan.dockerfile else None
    return str(refused) if refused else ""


def refusal(task: TaskDir, ground: Ground, given: Mapping[str, object]) -> str:
    """Return why a task cannot run on this ground, or an empty string; `given` are the recipe's values."""
    return next(_refusals(task, ground, given), "")


def _refusals(task: TaskDir, ground: Ground, given: Mapping[str, object]) -> Iterator[str]:
    judges = [(stage, stage.judge) for stage in task.stages if stage.judge is not None]
    policies = [("network_mode", task.network)]
    policies += [("the verifier's network_mode", judge_policy(task, stage)) for stage, _ in judges]
    for name, policy in policies:
        if policy.capability not in ground.capabilities:
            yield f"{name} {policy} needs a sandbox with the capability {policy.capability}"
    for plan in [task.box, *(judge for _, judge in judges)]:
        if ground.how(plan) == "host" and (why := why_not_on_host(task, plan)):
            yield why
    if "user" not in ground.capabilities:
        images = [(p, p.dockerfile) for p in (task.box, *task.judges.values()) if ground.how(p) != "host"]
        named = [(f"USER in {plan.directory}/Dockerfile", d.user) for plan, d in images if d is not None]
        for key, user in [*_users(task), *named]:
            if user not in _ROOT:
                yield f"{key} needs a sandbox with the capability user"
    for table, env in _environments(task).items():
        for variable, name in templates.missing(env, given):
            yield (
                f"{table}: {variable} takes {name} from the host, and the recipe does not give it: "
                f"set environment.host_env.{name}=env:{name} (or file:PATH)"
            )


def _users(task: TaskDir) -> Iterator[tuple[str, str | None]]:
    for stage in task.stages:
        yield "agent.user", stage.user
        user = stage.verifier.user
        yield "verifier.user", None if user is None else str(user)
        for hook in stage.verifier.collect:
            yield "verifier.collect.user", None if hook.user is None else str(hook.user)


def _environments(task: TaskDir) -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {"environment.env": task.config.environment.env}
    for stage in task.stages:
        found[f"{stage.name + '.' if stage.name else ''}verifier.env"] = stage.verifier.env
        if stage.judge is not None:
            found["verifier.environment.env"] = stage.judge.table.env
    return found
