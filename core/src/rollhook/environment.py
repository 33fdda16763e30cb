"""The environment side: tasks, boxes, phases, episodes and verdicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from rollhook.component import BuildContext
from rollhook.messages import Message

if TYPE_CHECKING:
    from rollhook.sandbox import Sandbox, SandboxSpec
    from rollhook.tools import Tools


@dataclass(frozen=True)
class Task:
    """One task; its identity is `digest`, the hash of all that decides what it asks and how it is judged.

    `limits` maps budget nodes (`create`, `setup`, `agent`, `verify`) to the seconds that the task asks
    for. `payload` is the environment's own and must be picklable. `problem` says why the task cannot
    run (a malformed file, an unsupported feature); such a task is listed, never run.
    """

    id: str
    digest: str
    split: str
    family: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    payload: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Box:
    """A sandbox that an episode wants: before the agent (`start`) or for verification only (`verify`)."""

    spec: SandboxSpec
    when: Literal["start", "verify"] = "start"


@dataclass(frozen=True)
class Observation:
    """What the environment says to the agent: messages to append to the conversation."""

    messages: Sequence[Message]


@dataclass(frozen=True)
class Verdict:
    """What a verifier found: `reward` None means that it gave none (the episode becomes an `infra_error`)."""

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Transcript:
    """What happened in a phase, for its verifier: the messages and how the agent ended."""

    messages: Sequence[Message]
    ended: str


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode may ask of the runtime: its live sandboxes by box name, its id and its seed."""

    episode_id: str
    seed: int
    boxes: Mapping[str, Sandbox]
    build: BuildContext

    def box(self, name: str = "main") -> Sandbox:
        """Return the live sandbox of a box; KeyError while it does not exist."""
        return self.boxes[name]


class Phase(ABC):
    """One stretch of agent work with its own observation and verification."""

    observation: Observation
    #: the box whose sandbox the agent gets; None: the agent gets none
    box: str | None = None
    #: Tools; for the tools agent also a FastMCP server, or a connected client of one
    tools: Tools | Any | None = None
    #: user of the agent's commands; None: that of the box (`SandboxSpec.user`)
    user: str | None = None
    #: seconds of `agent` and `verify` in this phase; what is more than the task's has no effect
    limits: Mapping[str, float] = {}
    #: the `verify` boxes that this phase's verification uses; None: all
    judges: Sequence[str] | None = None
    #: the phases after this one run only if its reward, or each of these components, reaches this
    min_reward: float | Mapping[str, float] | None = None

    async def respond(self, message: Message) -> Observation | None:
        """Speak between the agent's turns; None: nothing to say."""
        return None

    async def solve(self) -> None:
        """Apply the reference solution in the sandbox; only ever called in an oracle run.

        Raises Unsupported when the task has none, AgentError when the solution itself fails.
        """
        from rollhook.errors import Unsupported

        raise Unsupported("this environment has no reference solutions")

    @abstractmethod
    async def verify(self, transcript: Transcript) -> Verdict:
        """Judge the phase. Nothing of the agent runs any more when this is called.

        Raises whatever it likes: any exception is an `infra_error` of the verifier, never a reward.
        """


class Episode(ABC):
    """A single-use attempt at one task: boxes are read first, then it is entered, then its phases run."""

    boxes: Mapping[str, Box] = {}
    combine: Literal["final", "mean"] = "final"

    async def __aenter__(self) -> Self:
        """Prepare, with every `start` box alive."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release what the episode holds; sandboxes are the runtime's to close."""

    @abstractmethod
    def phases(self) -> AsyncIterator[Phase]:
        """Yield the phases in order; usually one.

        What a phase needs before its agent works is done before it is yielded, within the budget's `setup`.
        """


class Environment(ABC):
    """Supplies tasks and makes episodes of them; built once per process, used by many episodes at once."""

    #: False: `verify` only awaits work inside a sandbox, so it may run on the runtime's own event loop;
    #: True: it may compute, so it runs on a thread of its own that is left behind past its limit
    verifies_apart: ClassVar[bool] = True

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split (None: all), in a fixed order.

        Reads files, so the runtime calls it off the event loop. Raises UsageError for an unknown
        split or data that is not there, with the way to get it.
        """

    @abstractmethod
    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return a fresh single-use episode; no I/O. `ctx.boxes` fills after its `boxes` were read."""

    def problems(
        self, sandbox_capabilities: frozenset[str], tasks: Sequence[Task] | None = None
    ) -> Sequence[str]:
        """Return why this environment cannot run on a sandbox with these capabilities; empty: it can.

        `tasks` are those that are to be run, by default all. Called before any episode is made; those made
        afterwards may suit what the sandbox can do.
        """
        return ()

    def lint(self, task: Task) -> Sequence[str]:
        """Return what is doubtful about a task that can run; reads files, so called off the event loop."""
        return ()

    def hidden(self, task: Task) -> Mapping[str, bytes]:
        """Return the files that no agent may be able to read, by name: tests, solutions.

        Their SHA-256 is looked for in a sandbox (`tasks doctor`). Reads files, so called off the event loop.
        """
        return {}

    def describe(self) -> Mapping[str, str]:
        """Return what a reader of the results must know of the data: sizes, splits, stated noise."""
        return {}

    async def aclose(self) -> None:
        """Release what the environment holds; safe to call twice."""
