"""Agents that ask no policy, and what the distribution supplies."""

import pytest

from rollhook.testing.agent import AgentContract
from rollhook.testing.environment import build_context
from rollhook_agents import NopConfig, OracleConfig, rollhook_agents
from rollhook_agents.plain import Nop, Oracle


class TestOracle(AgentContract):
    @pytest.fixture
    def agent(self):
        return Oracle(OracleConfig(), build_context())


class TestNop(AgentContract):
    @pytest.fixture
    def agent(self):
        return Nop(NopConfig(), build_context())


def test_every_component_has_described_keys():
    for component in rollhook_agents():
        for field in component.config.model_fields.values():
            assert field.description
