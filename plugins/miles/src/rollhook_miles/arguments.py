"""The command line of miles: nine groups and the evaluation, in a fixed order, extra arguments last.

Flags and order are those of radixark/miles 31f1ca961, examples/experimental/openenv/glm52_tbench2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollhook.errors import UsageError
from rollhook.recipe.schema import Recipe
from rollhook.trainer import Place
from rollhook_miles.config import MilesConfig

#: our policy chain -> miles' own; None: what miles takes by itself beside a session server (sticky by least
#: load)
POLICIES: dict[str, str | None] = {
    "sticky+min_load": None,
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "consistent_hash": "consistent_hashing",
}
#: below the directory of the job's files on the node
TRAIN_DATA, EVAL_DATA = "data/train.jsonl", "data/eval.jsonl"
_BRIDGE = "rollhook_miles.bridge"
#: options of a server that miles derives from --rollout-num-gpus-per-engine
_TENSOR = "--tp-size"


@dataclass(frozen=True)
class Run:
    """What the arguments are made of."""

    recipe: Recipe
    config: MilesConfig
    engine: Sequence[str]
    place: Place

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one inference server."""
        return int(_value(self.engine, _TENSOR) or 1)

    @property
    def rollout_gpus(self) -> int:
        """GPUs that are left for inference."""
        parallel = self.config.parallel
        return (self.place.nodes - parallel.nodes) * parallel.gpus_per_node

    @property
    def checkpoints(self) -> str:
        """Where the run's checkpoints go."""
        return f"{self.place.run_dir}/checkpoints"

    @property
    def has_own_router(self) -> bool:
        """Whether `rollhook router` runs in place of miles' router."""
        return self.recipe.router.use not in POLICIES


def arguments(run: Run) -> list[str]:
    """Return all arguments; paths of data and the router's address are shell variables of the script."""
    groups = [checkpoint, rollout, agent, optimizer, algorithm, perf, evaluation, engine, dashboard, misc]
    return [argument for group in groups for argument in group(run)] + list(run.config.extra_args)


def checkpoint(run: Run) -> list[str]:
    """Group 1: where weights come from and go to."""
    assert run.recipe.model is not None
    return [
        *("--hf-checkpoint", str(run.recipe.model.path)),
        *("--ref-load", run.config.ref_load),
        *("--load", run.recipe.checkpoint.load_from or run.checkpoints),
        *("--save", run.checkpoints),
        *("--save-interval", str(run.recipe.checkpoint.every)),
    ]


def rollout(run: Run) -> list[str]:
    """Group 2: how episodes are asked for."""
    r, budgets = run.recipe.rollout, run.recipe.budgets
    found = ["--fully-async", "--pause-generation-mode", r.pause_mode]
    found += ["--async-max-concurrent-samples", str(r.max_concurrent)]
    found += ["--rollout-submission-granularity", "sample" if r.submission == "episode" else "group"]
    if r.max_staleness is not None:
        found += ["--max-weight-staleness", str(r.max_staleness)]
    if r.unused == "drop":
        found += ["--async-unused-samples-handler", "drop"]
    if r.buffer_groups is not None:
        found += ["--async-data-buffer-capacity-factor", f"{r.buffer_groups / r.batch_groups:g}"]
    found += ["--prompt-data", f"$ROLLHOOK_JOB_DIR/{TRAIN_DATA}", "--input-key", "prompt"]
    found += ["--apply-chat-template", *(["--rollout-shuffle"] if run.config.shuffle else [])]
    found += ["--num-rollout", str(run.recipe.steps)]
    found += ["--rollout-batch-size", str(r.batch_groups), "--n-samples-per-prompt", str(r.group_size)]
    found += [
        "--rollout-max-response-len",
        str(budgets.reply_tokens),
        "--max-seq-len",
        str(budgets.max_seq_len),
    ]
    found += ["--rollout-temperature", f"{r.sampling.temperature:g}"]
    if r.sampling.top_p != 1:
        found += ["--rollout-top-p", f"{r.sampling.top_p:g}"]
    if r.sampling.top_k != -1:
        found += ["--rollout-top-k", str(r.sampling.top_k)]
    found += ["--global-batch-size", str(r.batch_groups * r.group_size)]
    return found + (["--balance-data"] if run.config.balance_data else [])


def evaluation(run: Run) -> list[str]:
    """The held-out evaluation; nothing where it is off."""
    e = run.recipe.evaluation
    if not e.every:
        return []
    return [
        *("--eval-interval", str(e.every)),
        *("--eval-prompt-data", e.split, f"$ROLLHOOK_JOB_DIR/{EVAL_DATA}"),
        *("--n-samples-per-eval-prompt", str(e.samples)),
        *("--eval-max-response-len", str(run.recipe.budgets.reply_tokens)),
        *("--eval-temperature", f"{run.recipe.rollout.sampling.temperature:g}"),
    ]


def agent(run: Run) -> list[str]:
    """Group 3: our bridge, and the session server that it asks."""
    use = ["--use-session-server", *(["v2"] if run.config.session_server == "v2" else [])]
    return [
        *("--custom-generate-function-path", f"{_BRIDGE}.generate"),
        *("--custom-agent-function-path", f"{_BRIDGE}.run"),
        *("--custom-rm-path", f"{_BRIDGE}.reward"),
        *("--dynamic-sampling-filter-path", f"{_BRIDGE}.keep_group"),
        *("--tito-model", run.config.tito_model),
        *use,
        *("--session-server-port", str(run.config.session_server_port)),
    ]


def perf(run: Run) -> list[str]:
    """Group 4: how the policy in training is cut up, and its memory."""
    p, m = run.config.parallel, run.config.memory
    found = ["--tensor-model-parallel-size", str(p.tensor)]
    found += ["--sequence-parallel"] if p.sequence else []
    found += ["--pipeline-model-parallel-size", str(p.pipeline)]
    if p.first_stage_layers is not None:
        found += ["--decoder-first-pipeline-num-layers", str(p.first_stage_layers)]
    if p.last_stage_layers is not None:
        found += ["--decoder-last-pipeline-num-layers", str(p.last_stage_layers)]
    found += ["--context-parallel-size", str(p.context), "--expert-model-parallel-size", str(p.expert)]
    found += ["--expert-tensor-parallel-size", str(p.expert_tensor)]
    if m.recompute:
        found += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        found += ["--recompute-num-layers", "1"]
    found += ["--use-dynamic-batch-size"] if m.dynamic_batch else []
    found += ["--max-tokens-per-gpu", str(m.tokens_per_gpu)]
    found += ["--data-pad-size-multiplier", str(m.pad_multiple)]
    return [*found, "--log-probs-chunk-size", str(m.log_probs_chunk)]


def algorithm(run: Run) -> list[str]:
    """Group 5: GRPO."""
    a = run.config.algorithm
    found = ["--advantage-estimator", "grpo", "--kl-loss-coef", f"{a.kl_loss_coef:g}"]
    found += ["--kl-loss-type", a.kl_loss_type, "--kl-coef", f"{a.kl_coef:g}"]
    found += ["--entropy-coef", f"{a.entropy_coef:g}"]
    found += ["--eps-clip", f"{a.clip_low:g}", "--eps-clip-high", f"{a.clip_high:g}"]
    if a.tis:
        found += ["--use-tis", "--tis-clip-low", f"{a.tis_low:g}", "--tis-clip", f"{a.tis_high:g}"]
    return found


def optimizer(run: Run) -> list[str]:
    """Group 6: Adam."""
    o = run.config.optimizer
    found = ["--optimizer", "adam", "--lr", f"{o.lr:g}", "--lr-decay-style", o.decay]
    found += ["--weight-decay", f"{o.weight_decay:g}"]
    return [*found, "--adam-beta1", f"{o.beta1:g}", "--adam-beta2", f"{o.beta2:g}"]


def engine(run: Run) -> list[str]:
    """Group 7: the recipe's engine in miles' words, which are SGLang's behind --sglang-."""
    found = ["--rollout-num-gpus-per-engine", str(run.gpus_per_engine)]
    for option, values in _options(run.engine):
        if option != _TENSOR:
            found += [f"--sglang-{option[2:]}", *values]
    if run.has_own_router:
        found += ["--sglang-router-ip", "$ROUTER_IP", "--sglang-router-port", str(run.config.router_port)]
        # by default it takes the router's address, and the two need not be on one node
        found += ["--session-server-ip", "127.0.0.1"]
    elif (policy := POLICIES[run.recipe.router.use]) is not None:
        found += ["--sglang-router-policy", policy]
    return found


def dashboard(run: Run) -> list[str]:
    """Group 8: miles' own dashboard, and the batches that `replay` reads."""
    if not run.config.dashboard:
        return []
    details = f"{run.place.run_dir}/dump_details"
    return ["--dump-details", details, "--use-miles-dashboard", "--dashboard-sglang-scrape-mode", "direct"]


def misc(run: Run) -> list[str]:
    """Group 9: what is left, the GPUs' shares among it."""
    gpus = str(run.config.parallel.gpus_per_node)
    found = ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    found += ["--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]
    found += ["--attention-backend", "flash", "--allgather-cp"]
    found += ["--update-weight-buffer-size", str(run.config.update_weight_buffer_bytes)]
    found += ["--actor-num-nodes", str(run.config.parallel.nodes), "--actor-num-gpus-per-node", gpus]
    found += ["--num-gpus-per-node", gpus, "--moe-token-dispatcher-type", "alltoall"]
    found += ["--update-weight-transfer-mode", "broadcast"]
    if (directory := run.config.memory.stream_optimizer_to) is not None:
        found += ["--stream-optimizer-state-to-disk", "--offload-train-disk-dir", directory]
    found += ["--rollout-num-gpus", str(max(run.rollout_gpus, 8))]
    if run.config.replay is not None:
        found += ["--load-debug-rollout-data", run.config.replay]
    if run.config.start_rollout is not None:
        found += ["--start-rollout-id", str(run.config.start_rollout)]
    return found


def _options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return a server's arguments as options with their values."""
    found: list[tuple[str, list[str]]] = []
    for argument in argv:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            found.append((option, [value] if equals else []))
        elif found:
            found[-1][1].append(argument)
        else:
            raise UsageError(f"engine.extra_args: {argument!r} belongs to no option")
    return found


def _value(argv: Sequence[str], option: str) -> str | None:
    return next((values[0] for name, values in _options(argv) if name == option and values), None)
