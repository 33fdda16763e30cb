"""One sequence on its way through the decode loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollhook_torch.sampling import Draw


@dataclass(eq=False)
class Request:
    """One sequence. `done` is called on the decode thread once `finish` is set, `progress` after each token.

    `cached_tokens` are those of the prompt that were not computed for this request.
    """

    rid: str
    prompt: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stops: frozenset[int]
    random: random.Random
    done: Callable[[Request], None]
    progress: Callable[[Request], None] | None = None
    #: whose prefixes it may share; None: those of the same weight version
    extra_key: str | None = None
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    cached_tokens: int = 0
    #: False once its keys and values are those of several versions of the weights
    one_version: bool = True
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None

    @property
    def draw(self) -> Draw:
        """How the next token is drawn; takes one number from the row's own generator."""
        return Draw(self.temperature, self.top_p, self.top_k, self.random.random())

    @property
    def sequence(self) -> tuple[int, ...]:
        """Return the prompt and what was generated."""
        return (*self.prompt, *self.ids)
