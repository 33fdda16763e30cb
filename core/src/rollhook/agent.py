"""The agent side: drives one phase of an episode through a session and, where there is one, a sandbox."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from rollhook.component import BuildContext
from rollhook.environment import Observation
from rollhook.messages import Message, ToolSchema

if TYPE_CHECKING:
    from rollhook.sandbox.agent_view import AgentSandbox
    from rollhook.tools import Tools


T = TypeVar("T")


class StopReason(StrEnum):
    """Why an agent stopped of its own accord; the runtime adds `agent_timeout`, `cancelled` and `infra`."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    LENGTH = "length"


@dataclass(frozen=True)
class Reply:
    """One generated turn: the parsed message and how generation ended (`stop`, `length`, `tool_calls`).

    After `length` the turn cannot be extended. `tokens_left` is what the session may still hold,
    prompt and reply together. Of the prompt's tokens the engine had `cached_tokens` in its prefix cache.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens_left: int
    cached_tokens: int = 0


class ChatSession(Protocol):
    """The policy as an agent sees it."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> Reply:
        """Generate one turn after `messages` (the whole conversation so far).

        The assistant messages of earlier replies must be passed back unchanged, or the session
        branches. When the budget leaves no room the reply is a clean `length` with nothing generated.
        Raises EngineError, or BudgetExceeded(node="agent") when the agent's clock has run out.
        """


class Budget(Protocol):
    """What an agent may still use."""

    @property
    def turns_left(self) -> int:
        """Turns that may still be generated."""

    @property
    def tokens_left(self) -> int:
        """Tokens that the session may still hold."""

    @property
    def seconds_left(self) -> float:
        """Seconds left on the agent's clock, which runs only during its own commands and tokens."""


class Endpoint(Protocol):
    """The phase's session over HTTP, for a program outside this process.

    `url` is its base URL on this machine, `public_url` elsewhere (None where the recipe names none); below it
    are OpenAI's and Anthropic's paths. `token` drives this session and nothing else.
    """

    url: str
    public_url: str | None
    token: str

    @property
    def turns(self) -> int:
        """Turns that have been generated in this phase."""

    @property
    def finish_reason(self) -> str:
        """How the phase's latest reply ended; empty before the first."""

    async def attend(self, work: Awaitable[T]) -> T:
        """Wait for a program of the agent while its clock runs, which stands still during its turns.

        Raises BudgetExceeded, `work` cancelled, when the clock has run out. Raises EngineError when the
        engines gave no answer to the program's last request, whatever it made of that.
        """


class OnClock(Protocol):
    """Waits for an agent's own work on its clock; `limit` is how many seconds one step of it may take."""

    @property
    def limit(self) -> float:
        """Seconds."""

    async def __call__(self, work: Awaitable[T]) -> T:
        """Raises BudgetExceeded, `work` cancelled, when the clock runs out."""


class _OffClock:
    limit = math.inf

    async def __call__(self, work: Awaitable[T]) -> T:
        return await work


@dataclass(frozen=True)
class AgentContext:
    """All that an agent gets. `solve` is there only in an oracle run; `seed` is the episode's own.

    `endpoint` is None where the run has no policy; `note` keeps something about the agent's work in the
    episode's record (`detail.agent`), which must be JSON. `on_clock(work)` waits for what is neither a
    command of `sandbox` nor a turn, such as calls of tools, on the agent's clock. `heard(messages)` says what
    the conversation is, where it is not that of `session`.
    """

    session: ChatSession
    observation: Observation
    budget: Budget
    sandbox: AgentSandbox | None
    #: `rollhook.tools.Tools`, or what else the environment and the agent agree on, such as a FastMCP server
    tools: Tools | Any | None
    respond: Callable[[Message], Awaitable[Observation | None]]
    seed: int
    solve: Callable[[], Awaitable[None]] | None = None
    episode_id: str = ""
    endpoint: Endpoint | None = None
    note: Callable[[dict[str, Any]], None] = lambda fields: None
    heard: Callable[[list[Message]], None] = lambda messages: None
    on_clock: OnClock = field(default_factory=_OffClock)


class Agent(ABC):
    """Runs phases; one instance serves many episodes at once, so it keeps no state of an episode."""

    #: True: needs the reference solution, so it is refused in a recipe that trains
    needs_solution: ClassVar[bool] = False
    #: False: asks no policy (oracle, nop), so a run without an engine can use it
    needs_policy: ClassVar[bool] = True
    #: True: refuses to run in an episode without a sandbox
    needs_sandbox: ClassVar[bool] = False
    #: True: gives the policy tools, which the model's chat template must show
    needs_tools: ClassVar[bool] = False

    @classmethod
    def asks_from(cls, config: Any) -> Literal["process", "machine", "sandbox"]:
        """Return where it asks the policy: here, or over HTTP on this machine or in the sandbox."""
        return "process"

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def run(self, context: AgentContext) -> StopReason:
        """Work until done or out of budget, and say why it stopped.

        Let BudgetExceeded, EngineError, SandboxError and CancelledError pass; any other exception is
        recorded as an `infra_error` of the agent and never trains.
        """

    async def aclose(self) -> None:
        """Release what the agent holds; safe to call twice."""
