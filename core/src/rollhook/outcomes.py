"""From how an episode ended and what its verifier said to what it trains as."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal

from rollhook.environment import Verdict
from rollhook.errors import VerifierError
from rollhook.records import Ended, Outcome

if TYPE_CHECKING:
    from rollhook.recipe.schema import Outcomes

Action = Literal["verify", "zero", "drop"]


def action(ended: Ended, policy: Outcomes) -> Action:
    """Return what is to be done with an episode whose agent ended so."""
    if ended == "agent_timeout":
        return policy.timeout
    if ended in ("length", "max_turns"):
        return policy.truncated
    return "verify"


def unverified(ended: Ended, act: Action) -> Outcome:
    """Return the outcome of an episode that is not verified."""
    kind: Literal["timeout", "truncated"] = "timeout" if ended == "agent_timeout" else "truncated"
    return Outcome(kind, reward=0.0 if act == "zero" else None)


def checked(verdict: Verdict) -> Verdict:
    """Return a verdict whose numbers are finite; VerifierError for any other, which could not be kept."""
    reward: object = verdict.reward
    if isinstance(reward, bool) or not (reward is None or _finite(reward)):
        raise VerifierError(f"the reward, {reward!r}, is not a finite number")
    for name, value in verdict.components.items():
        if not _finite(value):
            raise VerifierError(f"component {name}, {value!r}, is not a finite number")
    return verdict


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def verified(verdict: Verdict) -> Outcome:
    """Return the outcome of an episode whose verifier ran; a missing reward is an `infra_error`, never 0."""
    reward = verdict.reward
    if reward is None:
        cause = str(verdict.detail.get("reason", "the verifier gave no reward"))
        return Outcome("infra_error", boundary="verifier", cause=cause)
    return Outcome("scored", reward=float(reward))


def reaches(verdict: Verdict, gate: float | Mapping[str, float] | None) -> bool:
    """Return whether a phase's verdict lets the next one run: the reward, or every component named."""
    if verdict.reward is None:
        return False
    if gate is None or isinstance(gate, int | float):
        return gate is None or verdict.reward >= gate
    return all(verdict.components.get(name, -math.inf) >= least for name, least in gate.items())


def combine(verdicts: Sequence[Verdict], how: Literal["final", "mean"]) -> Verdict:
    """Combine the verdicts of an episode's phases; one without a reward leaves the whole without one.

    Of several the detail is that of the last, with all of them under `phases`. A component that a phase
    lacks counts as 0 in its mean.
    """
    if not verdicts:
        return Verdict(None, detail={"reason": "the episode had no phase"})
    if len(verdicts) == 1:
        return verdicts[0]
    last = next((verdict for verdict in verdicts if verdict.reward is None), verdicts[-1])
    phases = [{"reward": v.reward, "components": dict(v.components), **v.detail} for v in verdicts]
    detail = {**last.detail, "phases": phases}
    rewards = [v.reward for v in verdicts if v.reward is not None]
    if how == "final" or len(rewards) < len(verdicts):
        return Verdict(last.reward, last.components, detail)
    names = dict.fromkeys(name for v in verdicts for name in v.components)
    means = {name: sum(v.components.get(name, 0.0) for v in verdicts) / len(verdicts) for name in names}
    return Verdict(sum(rewards) / len(rewards), means, detail)
