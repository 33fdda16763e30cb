"""What an engine plugin supplies that takes messages and gives no tokens: an endpoint of somebody else's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rollhook.component import BuildContext
from rollhook.engine.base import SamplingParams
from rollhook.errors import EngineError, Kind
from rollhook.messages import Message, ToolSchema


@dataclass(frozen=True)
class MessageRequest:
    """A whole conversation in. `sampling.stop_token_ids` is empty: an endpoint ends its replies itself."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    sampling: SamplingParams


@dataclass(frozen=True)
class Usage:
    """The tokens of one request as the endpoint counts them; `cached` of the prompt's were not computed."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True)
class Completion:
    """The assistant's message out. `finish_reason` is `stop` or `length`; `usage` None where not reported."""

    message: Message
    finish_reason: str
    usage: Usage | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What one engine may be asked: requests at once, tries of a request after the first, seconds between."""

    max_concurrent: int = 32
    max_retries: int = 6
    retry_seconds: float = 300.0


class BusyError(EngineError):
    """Another try may help, not before `retry_after` seconds where the endpoint says so."""

    kind: Kind = "retryable"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ContextFullError(EngineError):
    """The conversation and the reply that was asked for do not fit into the model's context."""

    kind: Kind = "user"


class MessageEngine(ABC):
    """An endpoint that answers messages. It needs no weights, tokenizer or Ray, and nothing trains on it."""

    #: False: no token ids and log-probabilities, so `check` refuses it in a recipe that trains
    gives_tokens: ClassVar[bool] = False

    #: tokens that the model attends to, where the endpoint tells; known after `start`
    context_length: int | None = None

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @property
    @abstractmethod
    def limits(self) -> RequestLimits:
        """What the engine may be asked."""

    @abstractmethod
    async def start(self) -> None:
        """Connect. Raises EngineError, one sentence, when the endpoint is absent or lacks the model."""

    @abstractmethod
    async def complete(self, request: MessageRequest) -> Completion:
        """Ask once, without retries; cancelled, it gives up the request.

        Raises EngineError: `kind` `user` for what every further try would be refused, anything else may be
        tried again, after `retry_after` seconds of a BusyError.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Disconnect; safe after a failed start and safe to call twice."""
