"""What Rollhook asks of router policies, and what lanes are about."""

import pytest
from acme_lanes import Lanes, LanesConfig

from rollhook.router import RouteRequest, Worker, WorkerLoad
from rollhook.testing.environment import build_context
from rollhook.testing.router import RouterPolicyContract


class TestLanes(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda seed: Lanes(LanesConfig(), build_context(seed=seed))


def test_long_sessions_share_a_lane_and_short_ones_are_left_to_others():
    policy = Lanes(LanesConfig(long=1000), build_context())
    workers = [WorkerLoad(Worker("http://a", rank)) for rank in range(2)]
    assert policy.pick(RouteRequest("long", expected_tokens=5000), workers) == Worker("http://a", 0)
    assert policy.pick(RouteRequest("short", expected_tokens=500), workers) is None
