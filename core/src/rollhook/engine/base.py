"""What an engine plugin supplies: start and stop servers that speak SGLang's endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rollhook.component import BuildContext
from rollhook.errors import Unsupported

if TYPE_CHECKING:
    from rollhook.router import Worker

#: what a pause does to requests under way: they end, queue again to be computed anew, or freeze as they are
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; `max_new_tokens` is set by the session from its budget, per request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """Tokens in. `rid` is unique per try, so that an abort finds it.

    The prefix cache is shared only among requests with the same `cache_key`.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    cache_key: str | None = None


@dataclass(frozen=True)
class Generation:
    """Tokens out, as the engine emitted them: ids and log-probabilities, one each.

    `finish_reason` is `stop`, `length` or `abort`; the stop token is part of `token_ids`.
    `versions` holds one weight version per token where the engine reports it exactly, else None.
    `queue_seconds` is the time before admission, None where not reported.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    weight_version: int | None = None
    versions: Sequence[int] | None = None
    queue_seconds: float | None = None
    cached_tokens: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


class Process(Protocol):
    """A process that the cluster runs for an engine."""

    async def restart(self) -> None:
        """Kill it if it lives and start it anew."""

    async def stop(self) -> None:
        """End it: terminate, then kill. Safe to call twice."""

    async def alive(self) -> bool:
        """Return whether it runs."""

    async def host(self) -> str:
        """Return the address of the node that it runs on."""


class Placement(Protocol):
    """Where an engine may start processes; supplied by `rollhook.cluster` (Ray) or by a test."""

    @property
    def address(self) -> str:
        """Where a server should listen: loopback on one machine, else `{host}`."""

    async def start_process(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        gpus: float = 0,
        node: str | None = None,
    ) -> Process:
        """Start a program on a node of the run, its output appended to `log`.

        `{host}` in an argument becomes the address of that node; `node` is the address of the one to use.
        """

    def free_port(self) -> int:
        """Return a port that is free on the node now."""


class Engine(ABC):
    """Starts inference servers. All control goes over their HTTP endpoints (`rollhook.engine.client`)."""

    #: True: gives token ids and log-probabilities, so it can be trained against
    gives_tokens: ClassVar[bool] = True

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def options(cls, config: Any) -> Sequence[str]:
        """Return a server's own arguments, without weights, addresses and ranks of processes.

        They are for a framework that starts the servers itself (`rollhook.trainer.HostedTrainer`). Raises
        Unsupported where it would have to do without them.
        """
        raise Unsupported("this engine is started by Rollhook only, not by a trainer that hosts it")

    @abstractmethod
    async def start(self, placement: Placement, model_dir: Path, weight_version: int) -> Sequence[Worker]:
        """Start the servers with these weights and return their workers, all healthy.

        Raises EngineError with the tail of the log when one does not come up.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop all servers; safe after a failed start and safe to call twice."""

    def describe(self) -> Mapping[str, str]:
        """Return what a reader of the results must know of the servers, once they are started."""
        return {}

    def published(self, model_dir: Path, weight_version: int) -> None:
        """Learn which weights are the newest; called before they are sent to the servers."""

    async def revive(self, worker: Worker, model_dir: Path, weight_version: int) -> bool:
        """Restart the server behind a dead worker; False when this engine cannot."""
        return False
