"""Records of what happened: samples (tokens), episodes (people), groups (what trains together)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollhook.messages import Message

SCHEMA_VERSION = 1

Ended = Literal["done", "max_turns", "length", "agent_timeout", "cancelled", "infra"]
OutcomeKind = Literal["scored", "timeout", "truncated", "infra_error", "cancelled"]


#: how tokens may differ from their rendered text; the names are those of miles' session mismatch rates
DRIFT_CATEGORIES = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")


@dataclass(frozen=True)
class Outcome:
    """What an episode comes to (`docs/outcomes-and-budgets.md`).

    `reward` is a number exactly when the episode may train: kind `scored`, or `timeout`/`truncated`
    under the policy `zero`. `boundary` and `cause` say what failed in an `infra_error`.
    """

    kind: OutcomeKind
    reward: float | None = None
    boundary: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        if self.kind in ("infra_error", "cancelled") and self.reward is not None:
            raise ValueError(f"an outcome of kind {self.kind} never carries a reward")
        if self.kind == "scored" and self.reward is None:
            raise ValueError("a scored outcome carries its reward")

    @property
    def trains(self) -> bool:
        """Whether a sample of this episode may enter a batch."""
        return self.reward is not None


@dataclass(frozen=True)
class Sample:
    """One leaf of an episode's tree of turns, as it is trained on.

    `token_ids` int32[T]; `mask` uint8[T], 1 on tokens that the engine generated; `logprobs` float32[T],
    0 where mask is 0; `spans` int32[S, 4], rows (start, end, version_first, version_last) over the
    generated tokens, half-open.
    """

    episode_id: str
    group_id: str
    task_id: str
    leaf: int
    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: NDArray[np.int32]
    reward: float
    outcome: OutcomeKind
    components: Mapping[str, float] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of any trained token; None when nothing was generated."""
        return int(self.spans[:, 2].min()) if len(self.spans) else None

    @property
    def mixed_versions(self) -> bool:
        """Whether its trained tokens are of more than one weight version."""
        return len(self.spans) > 0 and bool(self.spans[:, 2].min() != self.spans[:, 3].max())


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode, for people and for resume; tokens are in its samples.

    `timings` are seconds per budget node and kind of work (`create`, `setup`, `agent`, `agent/command`,
    `agent/tokens`, `verify`, `teardown`, `wait/engine`, `total`). `fired` is the budget node that
    ended it, if one did, and `used_by` who had used it up. Engines were given `input_tokens` in all, of
    which they had `cached_tokens`. `drift` names how its tokens differ from its text (DRIFT_CATEGORIES),
    None where that was not looked at.
    """

    episode_id: str
    run_id: str
    attempt: int
    purpose: Literal["train", "eval", "oracle"]
    group_id: str
    task_id: str
    task_digest: str
    environment: str
    family: str
    seed: int
    ended: Ended
    outcome: Outcome
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    drift: Sequence[str] | None = None
    versions: tuple[int, int] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    fired: str = ""
    used_by: str = ""
    warnings: Sequence[str] = ()
    started_at: float = 0.0
    schema: int = SCHEMA_VERSION


@dataclass
class Group:
    """The episodes of one prompt that are normalised together.

    `discarded` are finished ones whose tokens became too old, and the failed ones of a group that is made
    anew; `refills` counts the episodes that replaced failed, cancelled and discarded ones.
    """

    group_id: str
    task_id: str
    environment: str
    family: str
    size: int
    records: list[EpisodeRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    discarded: list[EpisodeRecord] = field(default_factory=list)
    refills: int = 0

    @property
    def rewards(self) -> list[float]:
        """The rewards of the episodes that may train, one per episode."""
        return [r.outcome.reward for r in self.records if r.outcome.reward is not None]
