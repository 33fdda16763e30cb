"""Keys of the clusters that `launcher: {use: ray}` brings up."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rollhook.component import Config

#: how many ports a node has: its daemons' and its workers'
PORTS_PER_NODE = 1000
_PORT = Field(ge=1024, le=65535)


#: no option of ssh
Destination = Annotated[str, Field(pattern=r"^[^\s-][^\s]*$")]


class Host(Config):
    """A machine that is reached by ssh."""

    host: Annotated[
        Destination, Field(description="[user@]name as ssh takes it, also one of ssh's own config")
    ]
    address: Annotated[
        str | None,
        Field(description="its address as the other nodes reach it; null: what its name resolves to here"),
    ] = None
    cpus: Annotated[NonNegativeInt | None, Field(description="instead of cpus_per_worker")] = None
    gpus: Annotated[NonNegativeInt | None, Field(description="instead of gpus_per_worker")] = None
    python: Annotated[str | None, Field(description="instead of cluster.python")] = None


class Ports(Config):
    """Ports, all below Linux' ephemeral range, so that nothing takes them by chance."""

    gcs: Annotated[int, _PORT, Field(description="Ray's own, of the head")] = 6379
    dashboard: Annotated[int, _PORT, Field(description="dashboard and job API, of the head")] = 8265
    client: Annotated[int, _PORT, Field(description="the Ray client's server, of the head")] = 10001
    node: Annotated[
        int,
        Field(ge=1024, le=65535 - PORTS_PER_NODE),
        Field(
            description=f"first of the {PORTS_PER_NODE} ports of a node; "
            "the second node on the same machine has the next ones"
        ),
    ] = 11000


class Ssh(Config):
    """How ssh is called; all else is ssh's own configuration."""

    config: Annotated[str | None, Field(description="configuration file instead of ~/.ssh/config")] = None
    options: Annotated[
        tuple[str, ...], Field(description="options as after -o, e.g. IdentityFile=~/.ssh/cluster")
    ] = ()
    connect_seconds: Annotated[PositiveInt, Field(description="limit of a connection's start")] = 10


class Install(Config):
    """What `rollhook cluster up --install` puts on each host, with pip."""

    packages: Annotated[
        tuple[str, ...],
        Field(description="requirements; one of ray without a version gets that of the submitting machine"),
    ] = ("ray[default]",)
    constraints: Annotated[str | None, Field(description="constraints file, on the submitting machine")] = (
        None
    )
    options: Annotated[tuple[str, ...], Field(description="options of pip install")] = ()


class Compose(Config):
    """The rendered docker-compose project."""

    image: Annotated[str, Field(description="image with Ray and the run's packages")] = (
        "rayproject/ray:latest"
    )
    shared: Annotated[str, Field(description="directory of the host, seen by all containers")] = "./shared"
    shared_root: Annotated[str, Field(description="where the containers see it")] = "/private"
    shm_size: Annotated[str, Field(description="shared memory of a container, for Ray's objects")] = "8gb"


class ClusterKeys(Config):
    """Keys of `launcher.cluster`: a head without CPUs and GPUs, and workers with the resource worker_node."""

    name: Annotated[
        str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", description="name of the cluster")
    ] = "ray"
    by: Annotated[
        Literal["local", "ssh", "compose"],
        Field(
            description="local: all nodes on this machine; ssh: on `hosts`; "
            "compose: a docker-compose project, which is rendered and not brought up"
        ),
    ] = "local"
    workers: Annotated[PositiveInt, Field(description="number of workers, of local and compose")] = 2
    hosts: Annotated[
        tuple[Destination | Host, ...],
        Field(description="of ssh: the first is the head, the others are workers; one may be named twice"),
    ] = ()
    cpus_per_worker: Annotated[
        NonNegativeInt | None, Field(description="null: what is there; of local: its share of that")
    ] = None
    gpus_per_worker: Annotated[NonNegativeInt | None, Field(description="null: what Ray finds")] = None
    worker_resources: dict[str, NonNegativeFloat] = Field(
        default_factory=lambda: {"worker_node": 100.0}, description="Ray's custom resources of a worker"
    )
    object_store_bytes: Annotated[
        PositiveInt | None,
        Field(description="object store of a worker; null: as Ray sizes it, of local 1 GB"),
    ] = None
    python: Annotated[
        str | None,
        Field(description="Python with Ray on the hosts; null: of ssh python3, of local this program's"),
    ] = None
    setup: Annotated[str, Field(description="bash lines run on every node before Ray is started")] = ""
    env: dict[str, str] = Field(
        default_factory=dict, description="environment of Ray on every node, in clear"
    )
    auth: Annotated[
        Literal["token", "none"],
        Field(description="token: only who has the cluster's token can use it; none: on loopback only"),
    ] = "token"
    dashboard_host: Annotated[str, Field(description="address of the head that the dashboard binds to")] = (
        "127.0.0.1"
    )
    temp_root: Annotated[
        str,
        Field(
            pattern=r"^/.{0,20}$",
            description="where Ray's temporary directory is made; short, as it has sockets",
        ),
    ] = "/tmp"  # noqa: S108 - the directory below it is new and private
    ports: Ports = Ports()
    ssh: Ssh = Ssh()
    install: Install = Install()
    compose: Compose = Compose()
    start_seconds: Annotated[PositiveFloat, Field(description="limit of one node's start")] = 90.0
    stop_seconds: Annotated[PositiveFloat, Field(description="from TERM to KILL")] = 10.0
    old_sessions: Annotated[
        str, Field(description="pattern of the session directories of Ray that count as old deployments")
    ] = "*"
    old_containers: Annotated[
        tuple[str, ...],
        Field(description="patterns of the names of containers that count as old deployments"),
    ] = ("*ray-head*", "*ray-worker*")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.by == "ssh" and len(self.hosts) < 2:
            raise ValueError("`by: ssh` needs `hosts`: the head and at least one worker")
        first, fixed = self.ports.node, {self.ports.gcs, self.ports.dashboard, self.ports.client}
        if len(fixed) < 3 or any(first <= port for port in fixed):
            raise ValueError("`ports`: gcs, dashboard and client have to differ, and to be below node")
        if self.by != "ssh" and self.hosts:
            raise ValueError("`hosts` needs `by: ssh`")
        return self
