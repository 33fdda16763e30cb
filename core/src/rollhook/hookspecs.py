"""The table of contents of the system: one provider hook per kind, then observers and filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from rollhook.component import Component

if TYPE_CHECKING:
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe
    from rollhook.records import EpisodeRecord, Group

PROJECT = "rollhook"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

#: kind (the first half of an entry point's name) -> provider hook
PROVIDER_HOOKS = {
    "sandbox": "rollhook_sandboxes",
    "environment": "rollhook_environments",
    "agent": "rollhook_agents",
    "router": "rollhook_router_policies",
    "engine": "rollhook_engines",
    "trainer": "rollhook_trainers",
    "launcher": "rollhook_launchers",
    "tracker": "rollhook_trackers",
    "pack": "rollhook_packs",
}


@hookspec
def rollhook_sandboxes() -> list[Component]:  # type: ignore[empty-body]
    """Sandbox backends: classes of `rollhook.sandbox.SandboxBackend`."""


@hookspec
def rollhook_environments() -> list[Component]:  # type: ignore[empty-body]
    """Environments: classes of `rollhook.environment.Environment`."""


@hookspec
def rollhook_agents() -> list[Component]:  # type: ignore[empty-body]
    """Agents: classes of `rollhook.agent.Agent`."""


@hookspec
def rollhook_router_policies() -> list[Component]:  # type: ignore[empty-body]
    """Router policies: classes of `rollhook.router.RouterPolicy`."""


@hookspec
def rollhook_engines() -> list[Component]:  # type: ignore[empty-body]
    """Engines: classes of `rollhook.engine.Engine`."""


@hookspec
def rollhook_trainers() -> list[Component]:  # type: ignore[empty-body]
    """Trainers: classes of `rollhook.trainer.NativeTrainer`."""


@hookspec
def rollhook_launchers() -> list[Component]:  # type: ignore[empty-body]
    """Launchers: classes of `rollhook.launcher.Launcher`."""


@hookspec
def rollhook_trackers() -> list[Component]:  # type: ignore[empty-body]
    """Trackers: classes of `rollhook.tracker.Tracker`."""


@hookspec
def rollhook_packs() -> list[Component]:  # type: ignore[empty-body]
    """Generated data sets (`data prepare NAME`, `pack:NAME/...`): classes of `rollhook.pack.Pack`."""


@hookspec
def rollhook_check(recipe: Recipe) -> list[Problem]:  # type: ignore[empty-body]
    """Return the problems of this composition that only the plugin can see; called by `check` and `run`."""


@hookspec
def rollhook_run_started(run_id: str, attempt: int, recipe: Recipe) -> None:
    """Observe that an attempt has claimed its run; called once, on the observers' thread."""


@hookspec
def rollhook_episode_finished(record: EpisodeRecord) -> None:
    """Observe a finished episode, whatever its outcome; called on the observers' thread."""


@hookspec
def rollhook_step_finished(step: int, metrics: dict[str, float]) -> None:
    """Observe a committed training step with its metrics; called on the observers' thread."""


@hookspec
def rollhook_run_finished(run_id: str, status: str) -> None:
    """Observe the end of an attempt: `succeeded`, `failed` or `stopped`; called on the observers' thread."""


@hookspec
def rollhook_accept_group(group: Group) -> str | None:
    """Return a reason to reject this group, or None; called inline, an exception rejects the group."""
