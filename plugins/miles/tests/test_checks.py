"""What `check` refuses of a recipe for miles, and the estimate of a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollhook.recipe.check import check_recipe
from rollhook.recipe.load import read_recipe
from rollhook_miles.checks import problems
from rollhook_miles.config import MilesConfig, Parallel
from rollhook_miles.memory import estimate


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", "/models")
    monkeypatch.setenv("TB2_TASKS_DIR", "/tasks")


def found(*overrides: str) -> list[tuple[str, str]]:
    recipe = read_recipe("glm5.2-tbench2-daytona", list(overrides)).validated
    assert recipe is not None
    return [(problem.key, problem.message) for problem in problems(recipe)]


def test_the_shipped_recipe_has_no_problem() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["launcher.nodes=9"], "launcher.nodes", "at least 10"),
        (["launcher.nodes=11"], "launcher.nodes", "leave 12 GPUs for inference, which is no multiple of 8"),
        (["launcher.gpus_per_node=8"], "launcher.gpus_per_node", "trainer.parallel.gpus_per_node is 4"),
        (["trainer.replay=/d", "launcher.nodes=7"], "launcher.nodes", "8 are needed to train"),
        (["+trainer.parallel.tensor=3"], "trainer.parallel", "does not divide the 32 GPUs"),
        (["+trainer.memory.stream_optimizer_to=null"], "trainer.memory.stream_optimizer_to", "279 GB"),
        (["engine.tool_call_parser=qwen25"], "engine.tool_call_parser", "tito_model glm47"),
        (["engine.reasoning_parser=deepseek-r1"], "engine.reasoning_parser", "tito_model glm47"),
        (["router={use: sticky+min_load, dp_aware: 'off'}"], "router.dp_aware", "pile up"),
        (["rollout.pause_mode=abort"], "rollout.pause_mode", "session server"),
        (["~engine"], "engine", "is missing"),
    ],
)
def test_what_cannot_be_is_told_before_a_gpu_is_held(overrides: Sequence[str], key: str, said: str) -> None:
    ((where, message),) = found(*overrides)
    assert where == key
    assert said in message


def test_replay_needs_eight_nodes_and_no_engine() -> None:
    assert found("+trainer.replay=/d/{rollout_id}.pt", "launcher.nodes=8", "~engine") == []


def test_a_rank_of_the_reference_has_279_gb_of_state_on_a_gpu_of_276() -> None:
    config = MilesConfig(model_type="m", ref_load="/r")
    made = estimate(config)
    assert made is not None
    assert made.data_parallel == 1
    assert round(made.state / 1e9) == 279
    assert made.must_stream
    assert "optimizer state (fp32)     279.0 GB" in made.table()


def test_more_data_parallel_ranks_shard_the_state_until_it_fits() -> None:
    wide = MilesConfig(model_type="m", ref_load="/r", parallel=Parallel(nodes=64))
    made = estimate(wide)
    assert made is not None
    assert made.data_parallel == 8
    assert round(made.state / 1e9) == 35
    assert not made.must_stream


def refused(*overrides: str) -> list[str]:
    checked = check_recipe("glm5.2-tbench2-daytona", list(overrides), site="none")
    told = "has no effect: trainer miles has no counterpart of it"
    return [problem.key for problem in checked.problems if problem.message == told]


@pytest.mark.parametrize(
    "override",
    [
        *["rollout.draw=learnable", "rollout.min_group=4", "rollout.fill=true", "rollout.workers=2"],
        *["rollout.permute_rewards=true", "evaluation.greedy=true", "evaluation.episodes=20"],
        *["checkpoint.keep=5", "router.drain_on_update=5", "gateway.port=8000", "model.tool_parser=glm47"],
        *["model.init={architecture: llama, sizes: {}}"],
    ],
)
def test_a_key_that_miles_does_not_read_is_refused(override: str) -> None:
    key = override.partition("=")[0]
    assert [found for found in refused(f"+{override}") if found.startswith(key)] != []


def test_keys_that_are_run_or_rendered_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("budgets.turns=5", "outcomes.timeout=drop", "rollout.refill_limit=2", "steps=3") == []
    assert (
        refused("sandbox=local", "engine.profile=low-latency", "router=prefix_cache", "trackers=[jsonl]")
        == []
    )


def test_it_runs_as_a_job() -> None:
    checked = check_recipe("glm5.2-tbench2-daytona", ["launcher=local"], site="none")
    assert ("launcher.use", "set launcher to one that does, e.g. slurm, ray or kuberay") in [
        (problem.key, problem.hint) for problem in checked.problems
    ]
