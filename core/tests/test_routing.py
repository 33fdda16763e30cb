"""The chain of router policies: who decides where no policy does, and what errors name."""

import logging
from pathlib import Path

import pytest

from rollhook import plugins
from rollhook.component import BuildContext, Config
from rollhook.errors import UsageError
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook.routing import Chain, build_chain

A, B, C = (Worker(f"http://{name}") for name in "abc")


class Abstains(RouterPolicy):
    """Leaves every session to the next policy, as `sticky` does with new ones."""

    def pick(self, request, workers):
        return None


@pytest.fixture
def context(tmp_path: Path) -> BuildContext:
    return BuildContext(logging.getLogger("test"), tmp_path, tmp_path, seed=0)


def test_where_no_policy_decides_the_worker_with_the_fewest_open_sessions_is_taken(context):
    chain = Chain([Abstains(Config(), context)])
    loads = [WorkerLoad(A, open_sessions=2), WorkerLoad(B, open_sessions=1, tokens_in_flight=9)]
    assert chain.pick(RouteRequest("s"), [*loads, WorkerLoad(C, open_sessions=1)]) == C
    assert chain.pick(RouteRequest("s"), loads) == B
    assert chain.pick(RouteRequest("s"), []) is None


def test_a_wrong_key_is_named_under_its_policy(context):
    loaded = plugins.load([("router", "sticky"), ("router", "min_load")])
    with pytest.raises(UsageError, match=r"router\.sticky\.tll"):
        build_chain("sticky+min_load", {"sticky": {"tll": 3}}, loaded, context)
