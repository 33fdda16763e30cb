"""Keys of `launcher: {use: slurm}`."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic import StringConstraints as Text

from rollhook.component import Config
from rollhook.launcher import JobKeys

#: ports above are handed out by the kernel to whoever connects somewhere
EPHEMERAL = 32768
#: of a node's block: its claim, and what Ray listens on besides its workers
SERVICE_PORTS = 20
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)

Word = Annotated[str, Text(pattern=r"^[^\s\x00]+$")]
Line = Annotated[str, Text(pattern=r"^[^\n\r\x00]+$")]
Absolute = Annotated[str, Text(pattern=r"^/[^\n\r\x00]*$")]
VariableName = Annotated[str, Text(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerKeys(Config):
    """A container for the steps of the job, by Slurm's pyxis plugin and enroot."""

    image: Annotated[
        Word, Field(description="image as pyxis takes it: registry#name:tag, or a file /path/name.sqsh")
    ]
    mounts: Annotated[
        tuple[Word, ...],
        Field(description="SOURCE:TARGET[:FLAGS]; the run's directory is mounted without being named"),
    ] = ()
    workdir: Annotated[Absolute | None, Field(description="working directory inside")] = None
    home: Annotated[bool, Field(description="mount the user's home")] = False
    writable: Annotated[bool, Field(description="its root can be written to")] = True
    pull: Annotated[
        bool,
        Field(description="unpack it on every node before the bring-up, outside its limits"),
    ] = True
    args: Annotated[tuple[Word, ...], Field(description="further --container-... flags")] = ()

    @field_validator("image")
    @classmethod
    def _a_file_is_a_path(cls, value: str) -> str:
        if value.endswith((".sqsh", ".squashfs")) and not value.startswith(("/", "./")):
            raise ValueError("is a file, so it must begin with / or ./, or pyxis asks a registry for it")
        return value


class SlurmLauncherConfig(JobKeys):
    """Keys of `launcher: {use: slurm}`."""

    partition: Annotated[Word | None, Field(description="--partition")] = None
    account: Annotated[Word | None, Field(description="--account")] = None
    qos: Annotated[Word | None, Field(description="--qos")] = None
    constraint: Annotated[Line | None, Field(description="--constraint")] = None
    reservation: Annotated[Word | None, Field(description="--reservation")] = None
    nodelist: Annotated[Word | None, Field(description="--nodelist")] = None
    exclude: Annotated[Word | None, Field(description="--exclude")] = None
    time: Annotated[
        Word | None, Field(description="--time: MINUTES, HH:MM:SS or D-HH:MM:SS; else the partition's")
    ] = None
    exclusive: Annotated[bool, Field(description="whole nodes; if not, set cpus_per_node")] = True
    cpus_per_node: Annotated[
        PositiveInt | None, Field(description="CPUs of each node, else all it is given")
    ] = None
    memory: Annotated[Word | None, Field(description="--mem per node, e.g. 200G; 0: all of it")] = None
    gpu_type: Annotated[Word | None, Field(description="type of the GPUs, as the site names it")] = None
    gpu_request: Annotated[
        Literal["gres", "gpus-per-node", "none"],
        Field(description="how GPUs are asked for; none: where the site gives those of a whole node"),
    ] = "gres"
    extra_args: Annotated[
        tuple[Line, ...], Field(description="further lines for sbatch, e.g. --dependency=singleton")
    ] = ()
    export: Annotated[
        tuple[VariableName, ...],
        Field(description="variables of the submitter that the job gets; none that is a secret"),
    ] = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
    credentials: Annotated[
        tuple[Absolute, ...],
        Field(description="files NAME=value, mode 0600, seen by all nodes, that each reads first"),
    ] = ()
    container: Annotated[ContainerKeys | None, Field(description="none: bare on the nodes")] = None
    strategy: Annotated[
        Literal["two-phase", "symmetric"],
        Field(description="two-phase: head, wait, driver; symmetric: `ray symmetric-run` on every node"),
    ] = "two-phase"
    network: Annotated[
        Word | None,
        Field(description="the network between nodes: a prefix (10.1.) or a CIDR (10.1.0.0/16)"),
    ] = None
    first_port: Annotated[
        int, Field(ge=1024, lt=EPHEMERAL, description="first port that Ray may listen on")
    ] = 10000
    last_port: Annotated[
        int, Field(ge=1024, lt=EPHEMERAL, description="last one, below those that the kernel hands out")
    ] = 31999
    ports_per_node: Annotated[
        int, Field(ge=50, description="ports of one node of one job, one for each worker process")
    ] = 1000
    dedicated_head: Annotated[
        bool, Field(description="the first node runs the driver, and neither actors nor tasks")
    ] = False
    object_store_bytes: Annotated[
        PositiveInt | None, Field(description="Ray's object store of each node, in bytes; else as Ray has it")
    ] = None
    ray_args: Annotated[tuple[Word, ...], Field(description="further arguments of `ray start`")] = ()
    ray_token: Annotated[
        bool, Field(description="only processes of this job may talk to its Ray cluster (Ray 2.52 or newer)")
    ] = True
    temp_dir: Annotated[
        Annotated[Absolute, Text(max_length=24)],
        Field(description="local directory of each node for Ray's files; short, as its sockets need it"),
    ] = "/tmp"  # noqa: S108 - a directory of the job's own is made in it
    join_seconds: Annotated[
        PositiveFloat, Field(description="limit for all nodes to join, from the start of the head's step")
    ] = 1800.0
    head_retries: Annotated[NonNegativeInt, Field(description="further tries to start Ray's head")] = 3
    worker_retries: Annotated[NonNegativeInt, Field(description="further tries of a node to join")] = 20
    signal_seconds: Annotated[
        NonNegativeInt,
        Field(description="before the time limit the job is told to write its checkpoint; 0: it is not"),
    ] = 300
    requeues: Annotated[
        NonNegativeInt,
        Field(description="how often it goes on as a new attempt after the time limit or a lost node"),
    ] = 0
    end_seconds: Annotated[
        NonNegativeFloat, Field(description="what the nodes are given to end after the driver")
    ] = 60.0

    @field_validator("time")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.fullmatch(value):
            raise ValueError("is no time limit; write MINUTES, HH:MM:SS or D-HH:MM:SS")
        return value

    @field_validator("network")
    @classmethod
    def _a_network(cls, value: str | None) -> str | None:
        if value is not None and "/" in value:
            ipaddress.ip_network(value, strict=False)
        elif value is not None and not re.fullmatch(r"[0-9a-fA-F.:]+", value):
            raise ValueError("is neither a prefix such as 10.1. nor a CIDR such as 10.1.0.0/16")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.last_port - self.first_port + 1 < self.ports_per_node:
            raise ValueError(f"between first_port and last_port are fewer than {self.ports_per_node} ports")
        if not self.exclusive and self.cpus_per_node is None:
            raise ValueError("exclusive: false needs cpus_per_node; the job would get one CPU of each node")
        if self.requeues and self.signal_seconds <= self.stop_grace_seconds:
            raise ValueError(
                "signal_seconds must be more than stop_grace_seconds, or the job ends before its checkpoint"
            )
        if self.code == "upload":
            raise ValueError(
                "code: upload is not for slurm; put it where all nodes see it and use code: path"
            )
        if any(not arg.startswith("-") for arg in self.extra_args):
            raise ValueError("extra_args: each begins with - or --, e.g. --dependency=singleton")
        return self
