"""Launchers: where a run's job goes. The job is all that a launcher sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollhook.component import BuildContext


@dataclass(frozen=True)
class Resources:
    """What a job asks for."""

    nodes: int = 1
    gpus_per_node: int = 0


@dataclass(frozen=True)
class Job:
    """A program to run with its environment; secrets are references, never values."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    resources: Resources = Resources()
    stop_signal: str = "SIGINT"
    stop_grace_seconds: float = 60.0


class Launcher(ABC):
    """Runs a job somewhere. `in_process` launchers let the caller drive the run itself."""

    in_process: ClassVar[bool] = False
    #: secret reference schemes that this launcher can carry to the node
    secret_schemes: ClassVar[frozenset[str]] = frozenset({"env", "file"})

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def plan(self, job: Job) -> Mapping[str, Any]:
        """Return what would be submitted: pure, complete, redacted."""
