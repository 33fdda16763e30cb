"""The keys of `launcher: {use: kuberay}`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from rollhook import Config, Secret
from rollhook.launcher import JobKeys

Role = Literal["training", "generation", "environments"]
#: the order in which clusters are brought up: what trains comes last
ROLES: tuple[Role, ...] = ("generation", "environments", "training")
Words = Annotated[str, Field(min_length=1, pattern=r"\S")]
HealthAddress = Annotated[str, Field(pattern=r"^\d{1,5}(/\S*)?$")]


class Scheduler(Config):
    """Who places the pods."""

    kind: Annotated[
        Literal["default", "kai", "kueue"],
        Field(description="kai: pods name its scheduler; kueue: a queue admits the job or cluster"),
    ] = "default"
    queue: Annotated[Words | None, Field(description="queue of kai or kueue")] = None
    topology: Annotated[
        Words | None, Field(description="kai: topology of the nodes, put on worker pods as an annotation")
    ] = None
    topology_placement: Annotated[
        Words | None, Field(description="kai: node label that all workers of a group must share")
    ] = None

    @model_validator(mode="after")
    def _whole(self) -> Scheduler:
        if self.kind != "default" and self.queue is None:
            raise PydanticCustomError("queue", "needs a queue: set launcher.scheduler.queue")
        if self.kind == "default" and self.queue is not None:
            raise PydanticCustomError("queue", "has a queue, which only kind kai or kueue uses")
        if self.kind != "kai" and (self.topology or self.topology_placement):
            raise PydanticCustomError("topology", "has a topology, which only kind kai uses")
        return self


class Toleration(Config):
    """A taint that pods tolerate."""

    key: Annotated[str | None, Field(description="taint; none with operator Exists: every taint")] = None
    operator: Annotated[Literal["Equal", "Exists"], Field(description="how value is compared")] = "Equal"
    value: Annotated[str | None, Field(description="value of the taint")] = None
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        Field(description="effect of the taint; none: every effect"),
    ] = None
    toleration_seconds: Annotated[NonNegativeInt | None, Field(description="for NoExecute: how long")] = None

    @model_validator(mode="after")
    def _whole(self) -> Toleration:
        if self.key is None and self.operator != "Exists":
            raise PydanticCustomError("toleration", "needs a key, or operator: Exists for every taint")
        return self


class Placement(Config):
    """Where pods may land; added to what the pod specs say."""

    node_selector: Annotated[
        dict[str, str], Field(default_factory=dict, description="labels that a worker's node must have")
    ]
    head_node_selector: Annotated[
        dict[str, str], Field(default_factory=dict, description="labels that the head's node must have")
    ]
    tolerations: Annotated[
        tuple[Toleration, ...], Field(description="taints that head and workers tolerate")
    ] = ()
    affinity: Annotated[
        dict[str, Any] | None, Field(description="affinity of workers, as in a pod spec; free-form")
    ] = None


class Mount(Config):
    """A volume in every pod of the Ray clusters: exactly one of claim, host_path and empty_dir."""

    path: Annotated[str, Field(pattern=r"^/", description="where the pods see it")]
    claim: Annotated[Words | None, Field(description="PersistentVolumeClaim")] = None
    sub_path: Annotated[Words | None, Field(description="directory inside the claim")] = None
    host_path: Annotated[str | None, Field(pattern=r"^/", description="directory of the node")] = None
    empty_dir: Annotated[Words | None, Field(description="size of a directory that ends with the pod")] = None
    memory: Annotated[bool, Field(description="empty_dir is in memory, as /dev/shm is")] = False
    read_only: Annotated[bool, Field(description="pods cannot write there")] = False

    @model_validator(mode="after")
    def _one(self) -> Mount:
        if sum(each is not None for each in (self.claim, self.host_path, self.empty_dir)) != 1:
            raise PydanticCustomError("mount", "needs exactly one of claim, host_path and empty_dir")
        if self.memory and self.empty_dir is None:
            raise PydanticCustomError("mount", "has memory: true, which only empty_dir has")
        if self.sub_path is not None and self.claim is None:
            raise PydanticCustomError("mount", "has a sub_path, which only a claim has")
        return self


class Claim(Config):
    """A DRA resource claim of every worker; its template is made, and removed with the cluster."""

    kind: Annotated[
        Literal["devices", "compute_domain"],
        Field(description="devices: of a device class; compute_domain: of NVIDIA's driver, for NVLink"),
    ] = "devices"
    device_class: Annotated[Words | None, Field(description="device class of kind devices")] = None
    count: Annotated[PositiveInt, Field(description="devices of a worker")] = 1

    @model_validator(mode="after")
    def _whole(self) -> Claim:
        if (self.kind == "devices") != (self.device_class is not None):
            raise PydanticCustomError("claim", "needs a device_class with kind devices, and only with it")
        return self


class PodSize(Config):
    """What a Ray container asks for, where its spec is Rollhook's."""

    cpus: Annotated[Words, Field(description="processors, as Kubernetes counts them")] = "4"
    memory: Annotated[Words, Field(description="memory, e.g. 64Gi")] = "16Gi"


class Daemon(Config):
    """A Ray job that runs on a cluster beside the training, e.g. an inference server."""

    entrypoint: Annotated[Words, Field(description="shell text that Ray runs on the cluster")]
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$", description="its id in Ray")]
    env: Annotated[dict[str, str], Field(default_factory=dict, description="environment variables, in clear")]
    health: Annotated[
        HealthAddress | None, Field(description="PORT/PATH on the head pod that answers once it serves")
    ] = None
    health_seconds: Annotated[PositiveFloat, Field(description="within which it has to answer")] = 300.0


class ClusterKeys(Config):
    """One Ray cluster. Without `spec` Rollhook writes one: a head without CPUs, and workers of one kind."""

    name: Annotated[str | None, Field(description="name of the RayCluster; mode raycluster needs it")] = None
    spec: Annotated[
        dict[str, Any] | None, Field(description="spec of a RayCluster (ray.io/v1); free-form")
    ] = None
    nodes: Annotated[PositiveInt | None, Field(description="workers; training: launcher.nodes")] = None
    gpus_per_node: Annotated[
        NonNegativeInt | None, Field(description="GPUs of a worker; training: launcher.gpus_per_node")
    ] = None
    head: Annotated[PodSize, Field(description="size of the head, without spec")] = PodSize()
    worker: Annotated[PodSize, Field(description="size of a worker, without spec")] = PodSize()
    labels: Annotated[
        dict[str, str], Field(default_factory=dict, description="labels of the cluster and its pods")
    ]
    annotations: Annotated[
        dict[str, str], Field(default_factory=dict, description="annotations of the cluster")
    ]
    segment_size: Annotated[
        PositiveInt | None, Field(description="split worker groups into groups of so many nodes")
    ] = None
    daemon: Annotated[Daemon | None, Field(description="Ray job that runs beside the training")] = None


class DeploymentKeys(Config):
    """A Deployment beside the clusters, and a Service for its ports."""

    name: Annotated[str, Field(description="name of the Deployment and of its Service")]
    spec: Annotated[dict[str, Any], Field(description="spec of a Deployment (apps/v1); free-form")]
    labels: Annotated[dict[str, str], Field(default_factory=dict, description="labels of it and its pods")]
    annotations: Annotated[dict[str, str], Field(default_factory=dict, description="annotations of it")]
    health: Annotated[
        HealthAddress | None, Field(description="PORT/PATH of a pod that answers once it serves")
    ] = None
    health_seconds: Annotated[PositiveFloat, Field(description="within which it has to answer")] = 300.0


class Deletion(Config):
    """Rules by which KubeRay removes what a finished RayJob left (in place of shutdown and ttl_seconds)."""

    workers_seconds: Annotated[NonNegativeInt | None, Field(description="after which workers go")] = 0
    cluster_seconds: Annotated[NonNegativeInt | None, Field(description="after which the cluster goes")] = 600
    self_seconds: Annotated[NonNegativeInt | None, Field(description="after which the RayJob goes")] = None


class KubeRayLauncherConfig(JobKeys):
    """Keys of `launcher: {use: kuberay}`."""

    mode: Annotated[
        Literal["rayjob", "raycluster"],
        Field(description="rayjob: a cluster for this job alone; raycluster: one that stays, and is re-used"),
    ] = "rayjob"
    image: Annotated[Words, Field(description="image of the Ray containers, with Rollhook in it")]
    namespace: Annotated[
        Words | None, Field(description="null: the pod's own, else the kubeconfig's current one")
    ] = None
    context: Annotated[Words | None, Field(description="context of the kubeconfig; null: current")] = None
    kubeconfig: Annotated[Words | None, Field(description="file; null: KUBECONFIG, ~/.kube/config")] = None
    user: Annotated[
        Words | None, Field(description="owner of what is made; null: ROLLHOOK_USER, else who runs this")
    ] = None
    image_pull_secrets: Annotated[
        tuple[Words, ...], Field(description="secrets that pull images; replace those of the specs")
    ] = ()
    service_account: Annotated[Words | None, Field(description="of every pod; null: as the specs say")] = None
    token: Annotated[
        Secret | None,
        Field(description="reference to the token of Ray clusters with authOptions, read on this machine"),
    ] = None
    ray_version: Annotated[Words | None, Field(description="Ray in the image; null: not said")] = None
    labels: Annotated[dict[str, str], Field(default_factory=dict, description="labels of all that is made")]
    annotations: Annotated[
        dict[str, str], Field(default_factory=dict, description="annotations of all that is made")
    ]
    scheduler: Annotated[Scheduler, Field(description="who places the pods")] = Scheduler()
    placement: Annotated[
        Placement,
        Field(default_factory=lambda: Placement.model_validate({}), description="where pods may land"),
    ]
    mounts: Annotated[
        tuple[Mount, ...], Field(description="volumes of every Ray pod; storage.root is on one")
    ] = ()
    claims: Annotated[
        dict[str, Claim],
        Field(default_factory=dict, description="DRA claims of the workers, by the name that pods give them"),
    ]
    env_from: Annotated[
        tuple[Words, ...], Field(description="Secrets whose keys are environment variables of Ray pods")
    ] = ()
    mount_secrets: Annotated[
        tuple[Words, ...],
        Field(description="Secrets that Ray pods see as files; mode rayjob adds those the recipe refers to"),
    ] = ()
    clusters: Annotated[
        dict[Role, ClusterKeys],
        Field(
            default_factory=lambda: {"training": ClusterKeys.model_validate({})},
            description="Ray clusters by role",
            min_length=1,
        ),
    ]
    deployments: Annotated[
        dict[str, DeploymentKeys],
        Field(default_factory=dict, description="deployments beside the clusters, by any name"),
    ]
    shares_files: Annotated[
        bool, Field(description="this machine sees storage.root under the same path, too")
    ] = False

    submission_mode: Annotated[
        Literal["HTTPMode", "K8sJobMode", "SidecarMode"],
        Field(description="rayjob: how KubeRay submits; HTTPMode needs no further pod"),
    ] = "HTTPMode"
    shutdown: Annotated[bool, Field(description="rayjob: KubeRay deletes the cluster when it ended")] = True
    ttl_seconds: Annotated[
        NonNegativeInt,
        Field(description="rayjob: how long the cluster, with its GPUs, is kept after the end"),
    ] = 60
    deletion: Annotated[
        Deletion | None, Field(description="rayjob: finer rules in place of shutdown and ttl_seconds")
    ] = None
    active_seconds: Annotated[
        PositiveInt | None, Field(description="rayjob: after which KubeRay ends the job")
    ] = None
    ready_deadline_seconds: Annotated[
        PositiveInt | None, Field(description="rayjob: within which the job has to run")
    ] = None
    retries: Annotated[
        NonNegativeInt, Field(description="rayjob: how often KubeRay tries again, on a new cluster")
    ] = 0

    submit: Annotated[
        Literal["port_forward", "exec"],
        Field(
            description="raycluster: by Ray's job API through the Kubernetes API, or a process on the head"
        ),
    ] = "port_forward"
    exec_directory: Annotated[
        str, Field(pattern=r"^/", description="raycluster: where `exec` keeps its files on the head")
    ] = "/tmp"  # noqa: S108
    replace: Annotated[
        bool, Field(description="stop what runs first: Ray jobs and daemons, or an ended RayJob of this name")
    ] = False
    recreate: Annotated[
        bool, Field(description="raycluster: delete and make anew a cluster whose spec has changed")
    ] = False
    skip_daemons: Annotated[bool, Field(description="raycluster: submit the job alone")] = False
    ready_seconds: Annotated[
        PositiveFloat, Field(description="raycluster: within which a cluster has to be ready")
    ] = 900.0
    poll_seconds: Annotated[
        NonNegativeFloat, Field(gt=0, description="how often the API is asked while waiting")
    ] = 3.0
    request_seconds: Annotated[
        PositiveFloat, Field(description="limit of one request to the Kubernetes API")
    ] = 30.0
