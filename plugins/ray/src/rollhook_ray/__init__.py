"""A launcher that submits runs to a Ray cluster by its job API, and brings such clusters up."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, model_validator

from rollhook import Component, Secret, hookimpl
from rollhook.launcher import JobKeys
from rollhook_ray.cluster_keys import ClusterKeys

ADDRESS = "http://127.0.0.1:8265"
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)$")


class RayLauncherConfig(JobKeys):
    """Keys of `launcher: {use: ray}`."""

    address: Annotated[
        str, Field(pattern=r"^https?://[^/\s]+", description="the Ray dashboard as this machine reaches it")
    ] = ADDRESS
    token: Annotated[
        Secret | None, Field(description="reference to the token of a cluster that has RAY_AUTH_MODE=token")
    ] = None
    entrypoint_resources: Annotated[
        dict[str, NonNegativeFloat],
        Field(description="custom resources of the driver, which only worker nodes have"),
    ] = Field(default_factory=lambda: {"worker_node": 1.0})
    entrypoint_num_cpus: Annotated[
        NonNegativeFloat | None, Field(description="CPUs of the driver; null: what the job says, which is 1")
    ] = None
    entrypoint_num_gpus: Annotated[NonNegativeFloat, Field(description="GPUs of the driver")] = 0
    driver_on_head: Annotated[
        bool, Field(description="the driver may run on the head node (a cluster of one node)")
    ] = False
    env_vars: Annotated[
        dict[str, str], Field(description="runtime_env.env_vars of the Ray job: its driver, tasks and actors")
    ] = Field(default_factory=dict)
    shared: Annotated[
        bool, Field(description="this machine sees the run's directory at the path that the nodes use")
    ] = True
    upload_exclude: Annotated[
        tuple[str, ...], Field(description="with code: upload, what stays here: patterns of names and paths")
    ] = ()
    autoscaling: Annotated[
        bool, Field(description="the cluster adds nodes on demand, so what it has now is no limit")
    ] = False
    cluster: Annotated[ClusterKeys, Field(description="the cluster that `rollhook cluster up` makes")] = (
        ClusterKeys()
    )

    @model_validator(mode="after")
    def _no_secrets_in_clear(self) -> Self:
        for name in self.env_vars:
            if _SECRET_NAME.search(name.upper()):
                raise ValueError(
                    f"env_vars.{name} would be shown by Ray to all who reach the dashboard; give a reference "
                    "to it under `secrets`"
                )
        return self


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
