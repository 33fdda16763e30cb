"""What an episode's session leaves behind for its record and its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollhook.records import EpisodeRecord, Sample

if TYPE_CHECKING:
    from rollhook.session import Leaf, PolicySession
    from rollhook.session.common import SessionStats

#: of so many episodes that train one is looked at for drift, chosen by its seed: it renders everything anew
DRIFT_EVERY = 8


@dataclass(frozen=True)
class Generated:
    """Leaves that may train, counts, and drift; `lost` says why the leaves cannot be read."""

    leaves: Sequence[Leaf] = ()
    stats: SessionStats | None = None
    drift: tuple[str, ...] | None = None
    lost: str = ""

    def fields(self) -> dict[str, Any]:
        """Return what the episode's record takes."""
        spans = [row for leaf in self.leaves for row in leaf.spans.tolist()]
        fields: dict[str, Any] = {
            "versions": (min(s[2] for s in spans), max(s[3] for s in spans)) if spans else None,
            "drift": self.drift,
        }
        if self.stats is not None:
            for name in ("turns", "prompt_tokens", "completion_tokens", "input_tokens", "cached_tokens"):
                fields[name] = getattr(self.stats, name)
        return fields

    def samples(self, record: EpisodeRecord) -> list[Sample]:
        """Return the leaves as samples of an episode that has a reward."""
        assert record.outcome.reward is not None
        return [
            Sample(
                episode_id=record.episode_id,
                group_id=record.group_id,
                task_id=record.task_id,
                leaf=number,
                token_ids=leaf.token_ids,
                mask=leaf.mask,
                logprobs=leaf.logprobs,
                spans=leaf.spans,
                reward=record.outcome.reward,
                outcome=record.outcome.kind,
                components=dict(record.components),
            )
            for number, leaf in enumerate(self.leaves)
        ]


async def generated(session: PolicySession | None, *, trains: bool, seed: int) -> Generated:
    """Return what a closed session leaves behind."""
    if session is None:
        return Generated()
    try:
        leaves = session.leaves()
    except OSError as error:
        return Generated(stats=session.stats, lost=f"the session's record cannot be read back: {error}")
    looked_at = trains and leaves and seed % DRIFT_EVERY == 0
    drift = await asyncio.to_thread(session.drift, leaves) if looked_at else None
    return Generated(leaves, session.stats, drift)
