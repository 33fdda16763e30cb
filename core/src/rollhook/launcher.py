"""Launchers: where a run's job goes. The job is all that a launcher sees.

    plan -> submit -> status, logs, debug -> stop -> cleanup

A launcher is handed a `Job`, renders a `Plan` without any I/O, and submits what the plan says and nothing
else. What came of it is a `Handle`, which is JSON: any process that has it can ask on. Job ids, run
directories, the submit record, waiting and exit codes are the core's (`rollhook.runtime.jobs`), the script
that runs on the node is `rollhook.job_script`. A launcher that can bring clusters up is also `Clusters`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, StringConstraints

from rollhook.component import BuildContext, Config
from rollhook.errors import Unsupported
from rollhook.secrets import Secret

State = Literal["pending", "running", "succeeded", "failed", "stopped", "lost"]
#: states that do not change any more; `lost` may, when what could not be reached is back
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True)
class Resources:
    """What a job asks for: nodes of so many GPUs each, and what its driver's process takes of one of them."""

    nodes: int = 1
    gpus_per_node: int = 0
    driver_cpus: float = 1.0
    driver_resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Code:
    """Where the job's own code comes from.

    `image`: it is installed on the nodes. `path`: a directory that all nodes see, put first on PYTHONPATH.
    `upload`: a directory of the submitter's machine, sent along by launchers that can.
    """

    source: Literal["image", "path", "upload"] = "image"
    path: str = ""


@dataclass(frozen=True)
class Probe:
    """Shell text that runs on a node before the script; if it fails the job has failed, with its output."""

    name: str
    script: str


@dataclass(frozen=True)
class Job:
    """A bash script to run once on one node of a Ray cluster, and what it needs. Secrets are references.

    `directory` is `<run>/attempts/<n>` as the nodes see it. `secrets` are environment variables of the
    script: name -> reference. `references` are those that the program resolves itself. `files` are
    delivered beside the script, by name. `stopped_code` is the exit code by which the script says that it
    was stopped.
    """

    run_id: str
    attempt: int
    directory: str
    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    references: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    code: Code = Code()
    resources: Resources = Resources()
    probes: Sequence[Probe] = ()
    setup: str = ""
    stop_signal: str = "INT"
    stop_grace_seconds: float = 60.0
    stopped_code: int | None = None
    artefacts: Sequence[str] = ()

    @property
    def id(self) -> str:
        """What the scheduler calls it, `<run_id>-a<n>`."""
        return f"{self.run_id}-a{self.attempt}"


@dataclass(frozen=True)
class Plan:
    """All that a submission writes, runs and sends; it holds no secret, and the same job gives the same plan.

    `files`: path below the job's directory -> text; written there (or carried to the nodes, where the
    submitter does not see that directory). `commands`: argument vectors, in order. `requests`: name -> body
    of what is sent to an API, e.g. a manifest. `notes`: what a reader should know.
    """

    launcher: str
    job: Job
    files: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    requests: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON values, without the texts of the job that `files` has too."""
        job = {"id": self.job.id} | asdict(self.job)
        for name in ("script", "files", "setup"):
            del job[name]
        return {
            "launcher": self.launcher,
            "job": job,
            "files": dict(self.files),
            "commands": [list(each) for each in self.commands],
            "requests": dict(self.requests),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Handle:
    """What is known of a submitted job, enough to ask for it from any process; `data` is the launcher's.

    `stopped_code` is the job's; whoever submits it fills it in.
    """

    launcher: str
    job_id: str
    directory: str
    data: Mapping[str, Any] = field(default_factory=dict)
    stopped_code: int | None = None


@dataclass(frozen=True)
class JobStatus:
    """How a job stands. `message` says why, in a sentence; `raw` is the scheduler's word, as JSON values."""

    state: State
    message: str = ""
    exit_code: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class JobKeys(Config):
    """Keys of every launcher that submits jobs; its own config derives from this."""

    nodes: Annotated[PositiveInt, Field(description="nodes of the job")] = 1
    gpus_per_node: Annotated[NonNegativeInt, Field(description="GPUs of each node")] = 0
    env: Annotated[
        dict[VariableName, str],
        Field(description="environment variables of the job, in clear"),
    ] = Field(default_factory=dict)
    secrets: Annotated[
        dict[VariableName, Secret],
        Field(description="environment variables of the job that are secrets: NAME -> reference"),
    ] = Field(default_factory=dict)
    setup: Annotated[
        str, Field(description="bash lines run on every node first, e.g. to activate an environment")
    ] = ""
    code: Annotated[
        Literal["image", "path", "upload"],
        Field(
            description="image: installed there; path: code_path, seen by all nodes; upload: code_path, sent"
        ),
    ] = "image"
    code_path: Annotated[str | None, Field(description="directory that goes first on PYTHONPATH")] = None
    stop_grace_seconds: Annotated[
        NonNegativeFloat, Field(description="what a stopped job is given to write its checkpoint")
    ] = 60.0


class Launcher(ABC):
    """Runs a job somewhere. `in_process` launchers let the caller drive the run itself.

    Nothing is contacted by the constructor or `plan`. The other methods raise LauncherError with the way out.
    """

    in_process: ClassVar[bool] = False
    #: secret reference schemes that this launcher can carry to the node
    secret_schemes: ClassVar[frozenset[str]] = frozenset({"env", "file"})

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @property
    def shares_files(self) -> bool:
        """Whether the submitter sees the job's directory; if not, `submit` carries the plan's files."""
        return True

    @abstractmethod
    def plan(self, job: Job) -> Plan:
        """Return what would be submitted: pure, complete, redacted."""

    async def preflight(self, plan: Plan) -> Sequence[str]:
        """Look at the site and return all that would make the job fail, a sentence each; changes nothing."""
        return ()

    async def submit(self, plan: Plan) -> Handle:
        """Submit it, and return as soon as the scheduler has it. The plan's files are there, if shared."""
        raise Unsupported(f"launcher {plan.launcher} does not submit jobs")

    async def status(self, handle: Handle) -> JobStatus:
        """Ask the scheduler; `lost` for a job that it does not know and that left no exit code."""
        raise Unsupported(f"launcher {handle.launcher} does not submit jobs")

    def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        """Give the job's output from its beginning; with `follow` until the job has ended, then end."""
        raise Unsupported(f"launcher {handle.launcher} does not submit jobs")

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        """Ask the job to stop (`force`: at once) and say what was done; no error if it has ended."""
        raise Unsupported(f"launcher {handle.launcher} does not submit jobs")

    async def cleanup(self, handle: Handle) -> Sequence[str]:
        """Remove what the ended job left at the site, and return what was removed, a sentence each."""
        return ()

    async def debug(self, handle: Handle) -> Mapping[str, str]:
        """Return what the scheduler and Ray say about the job: file name -> text.

        What cannot be had is a text that says so; nothing is raised.
        """
        return {}


ClusterState = Literal["absent", "pending", "ready", "degraded", "stopped", "unknown"]


@dataclass(frozen=True)
class ClusterInfo:
    """How a cluster stands. `target` is what `--target` takes; `address` is that of its GCS, `host:port`.

    `degraded`: it is up, and nodes that were asked for are missing. `message` says why, in a sentence.
    """

    name: str
    target: str
    state: ClusterState
    address: str = ""
    dashboard: str = ""
    nodes: int | None = None
    message: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterPlan:
    """All that bringing clusters up writes, runs and sends, as in `Plan`; it holds no secret."""

    launcher: str
    targets: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    requests: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "launcher": self.launcher,
            "targets": list(self.targets),
            "files": dict(self.files),
            "commands": [list(each) for each in self.commands],
            "requests": dict(self.requests),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class ClusterOptions:
    """How `cluster up` and `cluster down` go about it; an option that a launcher lacks is Unsupported.

    `install`: put the pinned packages on each host first. `old`: also deployments that are not of this
    recipe, after `confirm` has said yes to the question it is given. `recreate`: replace what has drifted.
    `timeout`: seconds, if `wait`.
    """

    wait: bool = True
    timeout: float = 900.0
    install: bool = False
    old: bool = False
    recreate: bool = False
    confirm: Callable[[str], bool] = field(default=lambda question: False)


class Clusters(ABC):
    """The side of a launcher that keeps clusters. `targets` are names; none given means all of the recipe.

    The methods raise LauncherError with the way out, TimeoutError where a wait was too long, and UsageError
    for a target that the recipe does not have. `say` takes a line of progress.
    """

    @abstractmethod
    def cluster_targets(self) -> Sequence[str]:
        """Return what the recipe declares, in the order in which it is brought up."""

    @abstractmethod
    def cluster_plan(self, targets: Sequence[str] = ()) -> ClusterPlan:
        """Return what `cluster_up` would do: pure, complete, redacted."""

    @abstractmethod
    async def cluster_up(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[ClusterInfo]:
        """Bring them up, or find them up; what was half brought up when it fails is said."""

    @abstractmethod
    async def cluster_down(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[str]:
        """End them and nothing else, and return what was ended, a sentence each; absent ones are no error."""

    @abstractmethod
    async def cluster_status(self, targets: Sequence[str] = ()) -> Sequence[ClusterInfo]:
        """Return how the recipe's clusters stand, absent ones too."""

    @abstractmethod
    async def clusters(self) -> Sequence[ClusterInfo]:
        """Return all clusters that are seen at the site, the recipe's or not."""

    @abstractmethod
    def dashboard(self, target: str | None, port: int) -> AbstractAsyncContextManager[str]:
        """Give the address of a cluster's dashboard, reachable from here while the block runs.

        `port` is the local one where it is forwarded; 0 for any that is free.
        """
