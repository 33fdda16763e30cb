"""A launcher that submits runs to a Ray cluster by its job API, and brings such clusters up."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rollhook import Component, Secret, hookimpl
from rollhook.launcher import JobKeys
from rollhook_ray.cluster_keys import ClusterKeys

ADDRESS = "http://127.0.0.1:8265"


class RayLauncherConfig(JobKeys):
    """Keys of `launcher: {use: ray}`."""

    address: Annotated[
        str, Field(description="the Ray dashboard as the submitting machine reaches it, http:// or https://")
    ] = ADDRESS
    token: Annotated[
        Secret | None, Field(description="reference to the token of a cluster that has RAY_AUTH_MODE=token")
    ] = None
    entrypoint_resources: Annotated[
        dict[str, NonNegativeFloat],
        Field(description="custom resources of the driver, which only worker nodes have"),
    ] = {"worker_node": 1}
    entrypoint_num_cpus: Annotated[NonNegativeFloat, Field(description="CPUs of the driver")] = 1
    env_vars: Annotated[
        dict[str, str], Field(description="runtime_env.env_vars of the Ray job: its driver, tasks and actors")
    ] = {}
    shared: Annotated[
        bool, Field(description="the submitting machine sees the run's directory as the nodes do")
    ] = True
    start_seconds: Annotated[
        PositiveFloat, Field(description="limit of the driver's start, in which its node is checked")
    ] = 60.0
    cluster: Annotated[ClusterKeys, Field(description="the cluster that `rollhook cluster up` makes")] = (
        ClusterKeys()
    )


@hookimpl
def rollhook_launchers() -> list[Component]:
    """Supply the launcher."""
    return [
        Component(
            name="ray",
            config=RayLauncherConfig,
            load="rollhook_ray.launcher:RayLauncher",
            summary="the job API of a Ray cluster",
        )
    ]
