"""Router policies: which worker serves a session; synchronous, no I/O."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rollhook.component import BuildContext


@dataclass(frozen=True, order=True)
class Worker:
    """Where requests go: a base URL and, for a data-parallel engine, a rank. Never one string."""

    url: str
    dp_rank: int | None = None


@dataclass(frozen=True)
class WorkerLoad:
    """What the gateway knows of a worker; `queued` only where the engine reports it.

    `requests` counts those under way from this process, the other two those of all processes.
    """

    worker: Worker
    open_sessions: int = 0
    tokens_in_flight: int = 0
    queued: int | None = None
    requests: int = 0


@dataclass(frozen=True)
class RouteRequest:
    """What a policy may see: no bodies.

    `prefix_ids` are the tokens of the prompt, for a chain that `needs_prefix`; else they may be missing.
    `worker` is the one that the session had before, if any.
    """

    session_id: str
    task_id: str = ""
    prefix_ids: Sequence[int] = ()
    expected_tokens: int = 0
    worker: Worker | None = None


class RouterPolicy(ABC):  # noqa: B024 - every method has a default, none suits all
    """One link of a chain such as `sticky+min_load`.

    `workers` in `pick` are the workers on offer now (healthy, not draining, at the current weight
    version), in a fixed order. A session keeps its worker while that is on offer, and its policies are
    asked once.
    """

    #: the prompt's tokens matter: a session's worker is chosen at its first turn, not when it is opened
    needs_prefix: ClassVar[bool] = False
    #: it picks a worker whenever one is on offer, so that no policy after it in a chain ever decides
    always_picks: ClassVar[bool] = False

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @property
    def each_turn(self) -> bool:
        """Whether to be asked now on every turn, also of sessions that have a worker."""
        return False

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return a worker out of `workers`, or None to let the next policy decide."""
        return None

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Learn what the chain decided."""

    def closed(self, session_id: str) -> None:
        """Learn that a session has ended."""

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Learn which workers exist now."""
