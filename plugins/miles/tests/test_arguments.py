"""The command line against the reference run's, value for value, and its variants."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.recipe.load import read_recipe
from rollhook.recipe.schema import Recipe
from rollhook.trainer import Place, Rendered
from rollhook_miles.config import MilesConfig
from rollhook_miles.trainer import WORKER_ENV, MilesTrainer

#: a server's arguments as `engine: {use: sglang, ...}` of the recipe gives them
BALANCED = """
--dp-size 4 --enable-dp-attention --tp-size 4 --ep-size 4 --mem-fraction-static 0.85
--max-running-requests 256 --chunked-prefill-size 32768 --cuda-graph-max-bs 32 --page-size 64
--kv-cache-dtype fp8_e4m3 --attention-backend nsa --nsa-prefill-backend flashmla_sparse
--nsa-decode-backend flashmla_kv
--moe-a2a-backend deepep --tool-call-parser glm47 --reasoning-parser glm45 --watchdog-timeout 3600
--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1
--speculative-num-draft-tokens 2 --speculative-draft-attention-backend nsa
""".split()  # noqa: SIM905
#: radixark/miles 31f1ca961, run_glm5_2_744b_a40b_daytona.py at 16 nodes, without what names a
#: place of the run, and what our bridge stands in for
REFERENCE = """
--fully-async --pause-generation-mode in_place --async-max-concurrent-samples 128
--rollout-submission-granularity sample --input-key prompt --apply-chat-template --rollout-shuffle
--num-rollout 100 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--max-seq-len 65536 --rollout-temperature 0.8 --global-batch-size 64 --balance-data
--eval-interval 10 --n-samples-per-eval-prompt 2 --eval-max-response-len 8192 --eval-temperature 0.8
--tito-model glm47 --use-session-server --session-server-port 30000
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
--decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 20 --context-parallel-size 4
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192
--data-pad-size-multiplier 1024 --log-probs-chunk-size 16384
--advantage-estimator grpo --kl-loss-coef 0 --kl-loss-type low_var_kl --kl-coef 0 --entropy-coef 0
--eps-clip 0.2 --eps-clip-high 0.28 --use-tis --tis-clip-low 0 --tis-clip 2
--optimizer adam --lr 1e-06 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.85 --sglang-ep-size 4
--sglang-kv-cache-dtype fp8_e4m3 --sglang-nsa-decode-backend flashmla_kv
--sglang-nsa-prefill-backend flashmla_sparse --sglang-attention-backend nsa --sglang-page-size 64
--sglang-cuda-graph-max-bs 32 --sglang-max-running-requests 256 --sglang-chunked-prefill-size 32768
--sglang-watchdog-timeout 3600 --sglang-tool-call-parser glm47 --sglang-reasoning-parser glm45
--sglang-enable-dp-attention --sglang-dp-size 4 --sglang-moe-a2a-backend deepep
--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 1 --sglang-speculative-eagle-topk 1
--sglang-speculative-num-draft-tokens 2 --sglang-speculative-draft-attention-backend nsa
--use-miles-dashboard --dashboard-sglang-scrape-mode direct
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash --allgather-cp --update-weight-buffer-size 2147483648 --actor-num-nodes 8
--actor-num-gpus-per-node 4 --num-gpus-per-node 4 --moe-token-dispatcher-type alltoall
--update-weight-transfer-mode broadcast --stream-optimizer-state-to-disk
--offload-train-disk-dir /scratch/opt_state --rollout-num-gpus 32
--save-interval 100000 --hf-checkpoint /models/GLM-5.2_fp8 --ref-load /models/GLM-5.2_torch_dist
"""
OURS = {
    *("--load", "--save", "--prompt-data", "--eval-prompt-data", "--dump-details"),
    *("--custom-generate-function-path", "--custom-agent-function-path", "--custom-rm-path"),
    "--dynamic-sampling-filter-path",
}
#: the first flag of each group, in the reference's order
ORDER = [
    *("--hf-checkpoint", "--fully-async", "--custom-generate-function-path", "--optimizer"),
    *("--advantage-estimator", "--tensor-model-parallel-size", "--eval-interval"),
    *("--rollout-num-gpus-per-engine", "--dump-details", "--attention-dropout"),
]


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", "/models")
    monkeypatch.setenv("TB2_TASKS_DIR", "/tasks")


def recipe(*overrides: str) -> Recipe:
    loaded = read_recipe("glm5.2-tbench2-daytona", list(overrides))
    assert loaded.validated is not None, loaded.problems
    return loaded.validated


def render(*overrides: str, engine: list[str] = BALANCED, nodes: int = 16) -> Rendered:
    found = recipe(*overrides)
    assert found.trainer is not None
    trainer = MilesTrainer(MilesConfig(**found.trainer.keys), _context())
    return trainer.render(found, engine, Place(nodes, 4, "/shared/runs/glm"))


def _context() -> BuildContext:
    import logging

    return BuildContext(logging.getLogger("test"), Path("/nowhere"), Path("/nowhere"))


def command(rendered: Rendered) -> list[str]:
    """Return the arguments that bash would give to miles' script."""
    line = rendered.script.partition("rollhook_miles.start")[2].replace("\\\n", " ")
    words = shlex.split(line)
    return words[words.index("${model[@]}") + 1 :]


def options(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_the_defaults_are_the_reference_configuration() -> None:
    ours, reference = options(command(render())), options(shlex.split(REFERENCE))
    assert {k: v for k, v in ours.items() if k not in OURS} == reference


def test_the_groups_come_in_the_references_order_and_extra_arguments_last() -> None:
    words = command(render("trainer.extra_args=['--lr','2e-6','--ci-test']"))
    assert [words.index(flag) for flag in ORDER] == sorted(words.index(flag) for flag in ORDER)
    assert words[-3:] == ["--lr", "2e-6", "--ci-test"]


def test_every_flag_is_one_that_miles_has(request: pytest.FixtureRequest) -> None:
    known = request.config.rootpath / ".." / "shared" / "data" / "miles-arguments.txt"
    if not known.is_file():
        pytest.skip("needs shared-data: miles-arguments.txt, which is not part of the project")
    names = set(re.findall(r"^--\S+", known.read_text(), re.MULTILINE))
    variants = [
        render(),
        render("rollout.max_staleness=4", "rollout.unused=drop", "rollout.buffer_groups=24"),
    ]
    variants += [render("router=prefix_cache"), render("router=consistent_hash", "trainer.session_server=v2")]
    variants += [render("trainer.replay='/d/{rollout_id}.pt'", "trainer.start_rollout=0"), low_latency()]
    used = {flag for each in variants for flag in options(command(each))}
    assert {flag for flag in used if not flag.startswith("--sglang-")} <= names


def low_latency() -> Rendered:
    changed = " ".join(BALANCED).replace("--dp-size 4 --enable-dp-attention --tp-size 4", "--tp-size 8")
    return render("engine.profile=low-latency", engine=changed.split())


def test_the_low_latency_shape_is_an_engine_of_eight_gpus() -> None:
    found = options(command(low_latency()))
    assert found["--rollout-num-gpus-per-engine"] == ["8"]
    assert "--sglang-enable-dp-attention" not in found
    assert "--sglang-tp-size" not in found


def test_variants_are_one_key_each() -> None:
    off = options(command(render("evaluation.every=0")))
    assert not [flag for flag in off if flag.startswith(("--eval", "--n-samples-per-eval"))]
    memory = options(command(render("trainer.memory.stream_optimizer_to=null")))
    assert "--stream-optimizer-state-to-disk" not in memory
    loaded = options(command(render("checkpoint.load_from=/old/checkpoints", "trainer.start_rollout=0")))
    assert (loaded["--load"], loaded["--start-rollout-id"]) == (["/old/checkpoints"], ["0"])
    group = options(command(render("rollout.submission=group")))
    assert group["--rollout-submission-granularity"] == ["group"]
    bounded = options(command(render("rollout.max_staleness=4", "rollout.buffer_groups=12")))
    assert bounded["--max-weight-staleness"] == ["4"]
    assert bounded["--async-data-buffer-capacity-factor"] == ["1.5"]


def test_replay_needs_no_engine_no_data_and_eight_nodes() -> None:
    rendered = render("trainer.replay='/d/{rollout_id}.pt'", engine=[], nodes=8)
    found = options(command(rendered))
    assert found["--load-debug-rollout-data"] == ["/d/{rollout_id}.pt"]
    assert found["--rollout-num-gpus"] == ["8"]
    assert "rollhook_miles.bridge.data" not in rendered.script


def test_a_policy_that_miles_lacks_is_our_router_and_its_address_is_given() -> None:
    rendered = render("router=sticky+prefix_cache", "+router.sticky.ttl=60")
    assert "rollhook router --policy sticky+prefix_cache" in rendered.script
    assert "--set sticky.ttl=60" in rendered.script
    found = options(command(rendered))
    assert found["--sglang-router-ip"] == ["$ROUTER_IP"]
    assert found["--session-server-ip"] == ["127.0.0.1"]
    assert options(command(render("router=round_robin")))["--sglang-router-policy"] == ["round_robin"]


def test_the_script_is_bash_and_no_value_is_a_word_of_it(tmp_path: Path) -> None:
    import subprocess

    rendered = render("trainer.root='/a b/$(x)'", "trainer.extra_args=['--run-name','a;b `c`']")
    script = tmp_path / "job.sh"
    script.write_text(rendered.script)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "cd '/a b/$(x)'" in rendered.script
    assert "'a;b `c`'" in rendered.script


def test_no_secret_fits_into_arguments_or_environment() -> None:
    keys: dict[str, Any] = {"model_type": "m", "ref_load": "/r"}
    with pytest.raises(ValueError, match="--wandb-key"):
        MilesConfig(**keys, extra_args=["--wandb-key", "x"])
    with pytest.raises(ValueError, match="DAYTONA_API_KEY"):
        MilesConfig(**keys, env={"DAYTONA_API_KEY": "x"})


def test_the_workers_environment_is_delivered_beside_the_script() -> None:
    rendered = render("+trainer.env.NCCL_DEBUG=INFO")
    assert '"NCCL_DEBUG": "INFO"' in rendered.files[WORKER_ENV]
    assert WORKER_ENV in rendered.script


def test_every_key_of_a_recipe_has_a_treatment() -> None:
    def leaves(model: Any, prefix: str = "") -> list[str]:
        found: list[str] = []
        for name, field in model.model_fields.items():
            inner = field.annotation
            if (
                isinstance(inner, type)
                and hasattr(inner, "model_fields")
                and name not in ("engine", "trainer")
            ):
                found += leaves(inner, f"{prefix}{name}.")
            else:
                found.append(f"{prefix}{name}")
        return found

    treated = {key: MilesTrainer.treats(key) for key in leaves(Recipe)}
    assert set(treated.values()) == {"run", "rendered", "refused"}
