"""Jobs and Ray clusters on Kubernetes, through KubeRay's RayJob and RayCluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollhook import Component, hookimpl
from rollhook_kuberay.config import KubeRayLauncherConfig

if TYPE_CHECKING:
    from rollhook.recipe.problem import Problem
    from rollhook.recipe.schema import Recipe


@hookimpl
def rollhook_launchers() -> list[Component]:
    """Supply the launcher."""
    return [
        Component(
            name="kuberay",
            config=KubeRayLauncherConfig,
            load="rollhook_kuberay.launcher:KubeRayLauncher",
            summary="Kubernetes: a RayJob of its own, or a RayCluster that stays",
        )
    ]


@hookimpl
def rollhook_check(recipe: Recipe) -> list[Problem]:
    """Judge what Kubernetes and KubeRay would refuse, and whether recipe and clusters fit each other."""
    from rollhook_kuberay.rules import check

    return check(recipe)
