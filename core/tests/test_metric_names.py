"""The table of metrics against what the parts of a run give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollhook import metric_names
from rollhook.metric_names import SECTIONS, Metric, find, unlisted
from rollhook.runtime.evaluate import Evaluation
from rollhook.runtime.statistics import Rate
from rollhook.sandbox.pool import SandboxPool
from rollhook.testing.scripted import ScriptedBackend

EVERY = [metric for section in SECTIONS for metric in section.metrics]
EXACT = {metric.name for metric in EVERY if "<" not in metric.name}
CORE = Path(metric_names.__file__).parent


def listed(title: str) -> set[str]:
    (section,) = (section for section in SECTIONS if section.title == title)
    return {metric.name for metric in section.metrics}


def test_a_name_stands_once_and_says_what_it_is() -> None:
    names = [metric.name for metric in EVERY]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.text for metric in EVERY)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rollout/pass_rate", "rollout/pass_rate"),
        ("rollout/sums-2/pass_rate", "rollout/<environment>/<figure>"),
        ("outcome/infra_error", "outcome/<kind>"),
        ("groups/rejected", "groups/rejected"),
        ("groups/rejected/too easy", "groups/rejected/<reason>"),
        ("eval/pass_rate", "eval/pass_rate"),
        ("eval/tbench2/pass_rate_greedy", "eval/<environment>/<figure>"),
        ("eval_family/tbench2/sort", "eval_family/<name>"),
        ("train/loss", "train/loss"),
        ("train/z_loss", "train/<name>"),
    ],
)
def test_an_exact_name_comes_before_one_with_a_placeholder(name: str, entry: str) -> None:
    found = find(name)
    assert isinstance(found, Metric)
    assert found.name == entry


def test_a_name_that_is_not_listed_is_told() -> None:
    assert unlisted(["rollout/episodes", "rollout/episode", "outcome/", "loss"]) == {
        "rollout/episode",
        "outcome/",
        "loss",
    }


def test_the_metrics_of_sandboxes_are_those_of_the_pool() -> None:
    class Nowhere:
        def append(self, event: str, /, **data: object) -> int:
            return 0

        async def append_durable(self, event: str, /, **data: object) -> int:
            return 0

    pool = SandboxPool(ScriptedBackend(), run_id="r", attempt=1, journal=Nowhere())
    assert {*pool.stats(), "sandbox/cost"} == listed("Sandboxes")


@pytest.mark.parametrize("mode", ["sampled", "greedy"])
@pytest.mark.parametrize("environment", ["", "sums"])
def test_the_metrics_of_an_evaluation_are_listed(mode: str, environment: str) -> None:
    evaluation = Evaluation(4, mode, {"sort": Rate(1, 2)}, environment=environment, tasks=[(2, 1)])
    found = {entry.name for name in evaluation.metrics() if (entry := find(name))}
    assert unlisted(evaluation.metrics()) == set()
    if not environment:
        suffix = "_greedy" if mode == "greedy" else ""
        of_mode = {name for name in listed("Evaluation") if ("_greedy" in name) == bool(suffix)}
        assert found == of_mode - {"time/evaluate", "eval/<environment>/<figure>"}


def test_every_metric_that_the_runtime_names_is_listed() -> None:
    """Metrics that no short run shows are found in the source: a literal of this form is one."""
    form = re.compile(
        r'"((?:rollout|outcome|groups|buffer|books|staleness|episode|time|loop|weights|sandbox|router)/\w[^"]*)"'
    )
    sources = [*(CORE / "runtime").glob("*.py"), CORE / "sandbox/pool.py", CORE / "session/fleet_stats.py"]
    named = {re.sub(r"\{[^}]+\}", "x", name) for path in sources for name in form.findall(path.read_text())}
    assert len(named) > 30
    assert unlisted(named) == set()
