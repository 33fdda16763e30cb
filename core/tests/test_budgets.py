"""The budget tree and the agent's clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.budgets import DEFAULTS, AgentClock, resolve
from rollhook.errors import BudgetExceeded
from rollhook.recipe.schema import Budgets

SECONDS = st.floats(0.01, 1e5)
OPTIONAL = st.none() | SECONDS


def test_a_task_asks_and_the_recipe_caps():
    limits = resolve(Budgets(agent=60, verify=1000), {"agent": 900, "verify": 300})
    assert limits.agent == 60
    assert limits.verify == 300
    assert limits.create == DEFAULTS["create"]


@given(
    caps=st.fixed_dictionaries(
        dict.fromkeys(
            ("create", "setup", "agent", "turn", "command", "verify", "teardown", "episode"), OPTIONAL
        )
    ),
    task=st.dictionaries(st.sampled_from(sorted(DEFAULTS)), SECONDS),
)
def test_budgets_nest(caps, task):
    """Invariant 7: a child's limit is at most its parent's, and the lifetime reserves all."""
    budgets = Budgets(**caps)
    limits = resolve(budgets, task)
    assert limits.command <= limits.turn <= limits.agent
    children = limits.create + limits.setup + limits.agent + limits.verify + limits.teardown
    assert limits.episode <= children
    assert max(limits.create, limits.setup, limits.agent, limits.verify, limits.teardown) <= limits.episode
    assert limits.lifetime >= children + budgets.slack


def test_the_clock_runs_only_when_it_is_charged():
    clock = AgentClock(10)
    clock.check()
    clock.charge("command", 4)
    clock.charge("tokens", 3)
    assert clock.remaining == 3
    clock.charge("tokens", 3)
    with pytest.raises(BudgetExceeded, match=r"10 s \(agent\)") as caught:
        clock.check()
    assert caught.value.node == "agent"
    assert clock.used_by == "tokens"


def test_a_turn_has_its_own_limit_and_a_new_turn_starts_afresh():
    clock = AgentClock(10, turn=2, command=1)
    assert clock.command_limit == 1
    clock.charge("command", 1.5)
    assert clock.command_limit == 0.5
    clock.charge("command", 1)
    with pytest.raises(BudgetExceeded) as caught:
        clock.check()
    assert caught.value.node == "turn"
    clock.begin_turn()
    clock.check()
    assert clock.remaining == 2


def test_a_phase_has_at_most_its_own_time_of_what_is_left():
    clock = AgentClock(10)
    clock.charge("command", 3)
    clock.begin_phase(4)
    assert clock.remaining == 4
    clock.begin_phase(60)
    assert clock.remaining == 7
