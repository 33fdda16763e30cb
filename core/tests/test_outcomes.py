"""From an ending and a verdict to an outcome."""

import math

import pytest

from rollhook.environment import Verdict
from rollhook.errors import VerifierError
from rollhook.outcomes import action, checked, combine, reaches, unverified, verified
from rollhook.recipe.schema import Outcomes
from rollhook.records import Outcome


@pytest.mark.parametrize("kind", ["infra_error", "cancelled"])
def test_an_infrastructure_failure_never_trains(kind):
    """Invariant 1."""
    with pytest.raises(ValueError, match="never carries a reward"):
        Outcome(kind, reward=0.0)
    assert not Outcome(kind).trains


@pytest.mark.parametrize("reward", [math.nan, math.inf, True, False])
def test_a_reward_that_is_not_a_number_is_refused(reward):
    with pytest.raises(VerifierError, match=r"the reward, .*, is not a finite number"):
        checked(Verdict(reward))


def test_a_reward_that_is_missing_is_an_infra_error():
    outcome = verified(Verdict(None, detail={"reason": "reward.txt is empty"}))
    assert outcome.kind == "infra_error"
    assert outcome.boundary == "verifier"
    assert outcome.reward is None


def test_zero_is_a_reward():
    assert verified(Verdict(0.0)) == Outcome("scored", 0.0)


@pytest.mark.parametrize("ended", ["agent_timeout", "length", "max_turns"])
@pytest.mark.parametrize(("policy", "reward"), [("zero", 0.0), ("drop", None)])
def test_policies_of_episodes_that_are_not_verified(ended, policy, reward):
    settings = Outcomes(timeout=policy, truncated=policy)
    act = action(ended, settings)
    outcome = unverified(ended, act)
    assert act == policy
    assert outcome.kind == ("timeout" if ended == "agent_timeout" else "truncated")
    assert outcome.reward == reward


@pytest.mark.parametrize("ended", ["done", "agent_timeout", "length", "max_turns"])
def test_the_default_is_to_verify(ended):
    assert action(ended, Outcomes()) == "verify"


def test_phases_combine():
    one, two = Verdict(1.0, {"a": 1.0}, {"x": 1}), Verdict(0.0, {"b": 0.5}, {"y": 2})
    final, mean = combine([one, two], "final"), combine([one, two], "mean")
    assert (final.reward, final.components) == (0.0, {"b": 0.5})
    assert (mean.reward, mean.components) == (0.5, {"a": 0.5, "b": 0.25})
    phases = [
        {"reward": 1.0, "components": {"a": 1.0}, "x": 1},
        {"reward": 0.0, "components": {"b": 0.5}, "y": 2},
    ]
    assert final.detail == mean.detail == {"y": 2, "phases": phases}
    lost = combine([one, Verdict(None, {}, {"reason": "why"}), two], "mean")
    assert (lost.reward, lost.detail["reason"]) == (None, "why")
    assert combine([one], "mean") is one
    assert combine([], "final").reward is None


@pytest.mark.parametrize(
    ("gate", "goes_on"),
    [(None, True), (0.5, True), (0.6, False), ({"a": 1.0}, True), ({"a": 1.1}, False), ({"b": 0.0}, False)],
)
def test_a_gate_asks_for_the_reward_or_for_components(gate, goes_on):
    assert reaches(Verdict(0.5, {"a": 1.0}), gate) is goes_on
    assert not reaches(Verdict(None, {"a": 1.0}), gate)
